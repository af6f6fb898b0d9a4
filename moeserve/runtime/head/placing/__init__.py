"""How the placement of experts changes while steps run: what moves, in which steps, and who agrees."""
