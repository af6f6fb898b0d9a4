"""How experts get from rank to rank while steps run: who holds them (`peers`), and who copies (`mover`)."""
