"""Stand-ins for communication libraries, on CPU tensors over gloo: real signatures, checks and layouts."""
