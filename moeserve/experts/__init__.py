"""One layer's experts: gate, activation, kernels, placement, load, and the bank of prepared weights."""
