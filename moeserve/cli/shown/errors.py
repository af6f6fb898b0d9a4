"""Explains an error in one line; for a missing package it names the extra that installs it."""

from __future__ import annotations

EXTRAS: dict[str, str] = {
    "torch": "server",
    "safetensors": "server",
    "prometheus_client": "server",
    "grpc_health": "server",
    "grpc_reflection": "server",
    "tqdm": "server",
    "ray": "cluster",
    "transformers": "transformers",
}
"""The extra of pyproject.toml that installs a package, by the package's import name."""


def explain(error: Exception) -> str:
    """Returns the error's message, or its type without one; for a missing package, the `pip install`."""
    package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if package in EXTRAS:
        return f"this needs the package {package}; pip install 'moeserve[{EXTRAS[package]}]' brings it"
    return str(error) or type(error).__name__
