"""Lanes: jobs between the doors of a member and its step thread."""
