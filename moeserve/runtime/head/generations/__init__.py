"""How the group comes together, ends, and comes together again: who is waited for, and for how long."""
