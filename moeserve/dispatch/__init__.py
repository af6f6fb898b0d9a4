"""The dispatchers: they bring tokens to their experts' ranks and the weighted answers home."""
