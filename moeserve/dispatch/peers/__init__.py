"""Peer memory: buffers that members of a host map, and what dispatchers over them share."""
