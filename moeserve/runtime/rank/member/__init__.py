"""A member: its part in the group, its steps from header to answer, and what it tells its head."""
