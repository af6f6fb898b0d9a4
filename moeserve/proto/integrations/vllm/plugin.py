"""The entry point that vLLM calls in each of its processes. It imports nothing of vLLM unless the plug-in is
chosen.
"""

from __future__ import annotations

import os

_INSTALLED: list[str] = []


def register() -> None:
    """Puts the experts of this process behind MOESERVE_EXPERTS; without it, and a second time, does nothing.

    ValueError: a setting that cannot be. ContractError: a vLLM in which what the plug-in needs is not as it
    knows it. What is raised here ends vLLM's start.
    """
    from moeserve.proto.integrations.settings import Settings

    settings = Settings.chosen(os.environ)
    if settings is None or _INSTALLED:
        return
    from moeserve.proto.integrations.remote_layers import RemoteLayers
    from moeserve.proto.integrations.vllm import caches, config, contracts, experts, model, op, weights

    contracts.check()
    layers = RemoteLayers(settings)
    op.install(layers)
    for seam in (config, experts, model):
        seam.install(layers)
    weights.install()
    caches.install(settings)
    _INSTALLED.append(settings.address)
