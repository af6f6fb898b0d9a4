"""Benches of expert kernels and of one layer, and what the sanitizer says of the kernels."""
