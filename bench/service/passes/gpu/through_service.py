"""A rank as a service on the first GPU, and this process's ways to it from the second."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from bench.service.passes.gpu.steps import microseconds
from moeserve.dispatch.mail.kernels import Given
from moeserve.runtime.config import Config
from moeserve.runtime.launch.local_cluster import LocalCluster
from moeserve.torch import Settings, connect
from moeserve.torch.attached_device import AttachedDevice
from moeserve.torch.ways import Rows

HOME = "cuda:1"
IDLE_ROWS = 16


class Opened(Protocol):
    """Opens a way by its name, rows, stages and the layers of a forward pass; its owner closes it."""

    def __call__(
        self, name: str, rows: int, stages: int, layers: tuple[int, ...], rows_wire: str = "auto"
    ) -> AttachedDevice: ...


@contextmanager
def service(config: Config, order: tuple[int, ...]) -> Iterator[Opened]:
    """The service, with a caller that is attached and idle."""
    with LocalCluster(config) as cluster:

        def opened(
            name: str, rows: int, stages: int, layers: tuple[int, ...], rows_wire: str = "auto"
        ) -> AttachedDevice:
            given = Settings(
                "attached",
                cluster.address,
                name=name,
                rows=rows,
                stages=stages,
                device=HOME,
                rows_wire=rows_wire,
                layers=layers,
            )
            way: AttachedDevice = connect(given)  # type: ignore[assignment]
            return way

        idle = opened("idle", IDLE_ROWS, 1, order)
        yield opened
        idle.close()


def hop_through(
    way: AttachedDevice, given: list[Given], layers: int, passes: int
) -> tuple[list[float], list[Tensor]]:
    """The caller's graph of a forward pass, one layer after the other: a layer's times, and the answers."""
    stream, graph = torch.cuda.Stream(HOME), torch.cuda.CUDAGraph()
    rows = [Rows(one.hidden, one.route, one.weights) for one in given]
    with torch.cuda.device(HOME), torch.cuda.stream(stream):
        for _ in range(3):
            for at, one in enumerate(rows):
                way.mixed(at % layers, one)
    way.check()
    with torch.cuda.device(HOME):
        with torch.cuda.graph(graph, stream=stream):
            answers = [way.mixed(at % layers, one) for at, one in enumerate(rows)]
        found = microseconds(graph.replay, passes, stream, len(given))
    way.check()
    return found, answers
