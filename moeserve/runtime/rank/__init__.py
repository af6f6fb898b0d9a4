"""One rank: its experts, lane, dispatchers and its part in the group."""
