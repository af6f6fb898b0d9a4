"""Metrics: their table and exporters."""
