"""moeserve: an expert-parallel mixture-of-experts runtime service.

Importing the package imports nothing heavy: public names are resolved when first used, so that a client
environment (numpy, grpcio, protobuf) can import `MoeClient` without torch.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "MoeClient": "moeserve.proto.client",
    "AsyncMoeClient": "moeserve.proto.client",
    "LaneClient": "moeserve.proto.passes.lane_client",
    "Checkpoint": "moeserve.checkpoints.checkpoint",
}

__all__ = ["AsyncMoeClient", "Checkpoint", "LaneClient", "MoeClient", "__version__"]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'moeserve' has no attribute {name!r}; it has {', '.join(__all__)}")
