"""Passes on a device lane: rows and answers by memory that a caller and a rank both map."""
