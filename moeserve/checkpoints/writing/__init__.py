"""Writes checkpoints: the experts in another format, all else as it is, tensor by tensor."""
