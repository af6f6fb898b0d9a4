"""Peer memory: buffers that all ranks of a host map, and what dispatchers over them share."""
