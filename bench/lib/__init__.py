"""What benches share: the record of a result, tables of results, a quiet machine, processes on a GPU."""
