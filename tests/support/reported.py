"""What ranks have told the head of their load."""

from __future__ import annotations

import time
from collections.abc import Collection

from moeserve.proto.client import MoeClient

SECONDS = 30.0


def until_reported(client: MoeClient, layers: Collection[int], pairs: int = 1) -> None:
    """Waits until ranks, which report about once a second, have told of so many pairs of a token and an
    expert in each of these layers.
    """
    until = time.monotonic() + SECONDS
    while True:
        told = {layer.layer: sum(layer.tokens) for layer in client.status(experts=True).layers}
        if all(told[layer] >= pairs for layer in layers):
            return
        assert time.monotonic() < until, f"{pairs} pairs of layers {layers}: {told}"
        time.sleep(0.05)
