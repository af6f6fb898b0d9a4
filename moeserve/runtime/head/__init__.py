"""The head: it forms the group, orders its steps and changes its epoch."""
