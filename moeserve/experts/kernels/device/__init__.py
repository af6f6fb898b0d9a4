"""Device code of our own expert kernels; imported only where the package triton is installed."""
