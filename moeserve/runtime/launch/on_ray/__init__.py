"""Ranks, spares and the whole service on Ray."""
