"""A stand-in for the package triton_kernels."""
