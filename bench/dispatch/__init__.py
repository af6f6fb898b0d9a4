"""Benches of dispatch and combine between GPUs."""
