"""Triton text of our expert kernels."""
