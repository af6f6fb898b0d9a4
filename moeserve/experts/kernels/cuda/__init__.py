"""Device code of our own expert kernels; all but `codes` needs the package triton."""
