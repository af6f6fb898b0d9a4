"""vLLM's settings that choose experts' kernels, and the configuration keys that do the same."""
