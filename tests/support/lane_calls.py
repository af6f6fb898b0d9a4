"""For tests of clients of lanes: answers that are compared, and which calls went another way."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from houses import Alone

from moeserve.proto.client import MoeClient
from moeserve.proto.passes.lane_client import LaneClient

CLOSE = {"rtol": 1e-4, "atol": 1e-4}


class Ordinary:
    """How many calls were made as `MoeClient` makes them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        real = MoeClient.call

        def call(client: MoeClient, *given: Any, **options: Any) -> Any:
            self.calls += 1
            return real(client, *given, **options)

        monkeypatch.setattr(MoeClient, "call", call)


def check(client: LaneClient, alone: Alone, layer: int, rows: int, seed: int) -> None:
    batch = alone.batch(rows, seed=seed)
    torch.testing.assert_close(client.forward(layer, *batch), alone.forward(layer, *batch), **CLOSE)


def in_threads(count: int, call: Callable[[int], object]) -> None:
    """Calls `call` in so many threads at once, each with its number. Raises the first's error."""
    with ThreadPoolExecutor(count) as pool:
        for _ in pool.map(call, range(count), timeout=60.0):
            pass


def line_of(client: LaneClient) -> Any:
    """The lane of a client that has one."""
    (line,) = client._idle
    return line
