"""Where experts live and how they compute: gate, activation, kernels, placement, load, checkpoints."""
