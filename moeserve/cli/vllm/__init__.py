"""vLLM's names for what chooses experts' kernels, and what says the same here."""
