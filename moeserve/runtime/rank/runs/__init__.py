"""Steps of passes on an owner's GPU, launched ahead: rows come from a caller's GPU, and answers go there."""
