"""How payloads travel between a client and a lane of one host."""
