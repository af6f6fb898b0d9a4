"""Which kernels and dispatchers serve a layer, and by which costs."""
