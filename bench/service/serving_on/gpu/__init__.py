"""Parts of `gpu_serve_on`: members on GPUs are killed and stopped under calls and under passes."""
