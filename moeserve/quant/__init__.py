"""Numbers: formats with their reference encode and decode, packed tensors, schemes and weight layouts."""
