"""Its operators."""
