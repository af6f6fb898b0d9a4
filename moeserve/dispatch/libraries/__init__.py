"""What adapters to libraries of all2all share."""
