"""Rows on their way from callers' memory to a rank's device, and answers on their way home."""
