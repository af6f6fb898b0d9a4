"""Benches of placement and of the choice of replicas on recorded expert loads."""
