"""Checkpoints on disk: how experts are stored, read, written and re-quantized."""
