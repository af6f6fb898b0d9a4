"""Benches of a whole service: models served, what a call costs, experts that move while it serves."""
