"""Standing the loss of an owner: second replicas on other owners, and who takes over which experts."""
