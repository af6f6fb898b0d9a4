"""Rows between a caller's GPU and an owner's, and answers home: memory that both map, and four kernels."""
