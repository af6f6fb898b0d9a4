"""Benches of model servers whose experts are behind a service."""
