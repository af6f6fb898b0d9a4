"""What several kernels of the table share: steps on Hopper, and what stands around a library's calls."""
