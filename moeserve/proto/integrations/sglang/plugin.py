"""The entry point that SGLang calls in each of its processes. It imports nothing of SGLang unless it is
chosen.
"""

from __future__ import annotations

import os

_INSTALLED: list[str] = []


def register() -> None:
    """Puts the experts of this process behind MOESERVE_EXPERTS; without it, and a second time, does nothing.

    SystemExit: a setting that cannot be, or a SGLang in which what the plug-in needs is not as it knows it.
    SGLang would log any other exception, and go on with experts of its own.
    """
    from moeserve.proto.integrations.settings import CACHES, Settings

    try:
        settings = Settings.chosen(os.environ)
        if settings is None or _INSTALLED:
            return
        if settings.caches != "keep":
            raise ValueError(
                f"{CACHES}={settings.caches}: with SGLang only keep; /flush_cache drops its prefixes"
            )
        from moeserve.proto.integrations.remote_layers import RemoteLayers
        from moeserve.proto.integrations.sglang import contracts, experts, model, weights

        contracts.check()
        layers = RemoteLayers(settings)
        for seam in (experts, model):
            seam.install(layers)
        weights.install()
    except Exception as failed:
        raise SystemExit(f"the moeserve plug-in cannot be used: {failed}") from failed
    _INSTALLED.append(settings.address)
