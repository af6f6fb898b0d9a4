"""Peer memory: buffers that all ranks of a host map, and what carriers over them share."""
