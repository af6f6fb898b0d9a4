"""Checks of formats, layouts and dialects against their laws and against other decoders."""
