"""What adapters to all2all libraries share: a probe before the first call, and rows as libraries take them.

An adapter that sends one copy of a row to each rank inherits `RowExchange`. `probe` refuses a library on all
ranks when one of them lacks something. `travel` widens rows to the sizes a library has, and crops them on
arrival.
"""
