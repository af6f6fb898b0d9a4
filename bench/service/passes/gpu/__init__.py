"""Parts of `gpu_pass`: rows of a caller's GPU to an owner's and home, in one process or through a service."""
