"""What a host and its GPU are, and compiling CUDA text for it."""
