"""What dispatchers cost by the rows of a step, by which a plan chooses among them.

`measure` times dispatchers on the group that will use them. `costs` fits the times and finds the cheapest for
each range of rows. `files` keeps them for later starts in the same setting.
"""
