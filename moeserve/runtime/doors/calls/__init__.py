"""How calls come in at a door: whom it lets in, in which threads, and what they may hold."""
