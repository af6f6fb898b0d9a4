"""A rank as a service on the first GPU, and this process's ways to it from the second."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from bench.service.passes.gpu.steps import microseconds
from moeserve.dispatch.mail.kernels import Given
from moeserve.proto.client import MoeClient
from moeserve.proto.errors import MoeError
from moeserve.runtime.config import Config
from moeserve.runtime.launch.local_cluster import LocalCluster
from moeserve.torch import Settings, connect
from moeserve.torch.attached_device import AttachedDevice
from moeserve.torch.ways import Rows

HOME = "cuda:1"
IDLE_ROWS = 16
REBALANCE_SECONDS = 1.0  # between two rebalances
REBALANCE_LIMIT = 30.0  # seconds for one


class Opened(Protocol):
    """Opens a way by its name, rows, stages and the layers of a forward pass; its owner closes it."""

    def __call__(
        self, name: str, rows: int, stages: int, layers: tuple[int, ...], rows_wire: str = "auto"
    ) -> AttachedDevice: ...


@contextmanager
def rebalancing(address: str) -> Iterator[None]:
    """Experts of the service are rebalanced meanwhile, by two policies in turn; prints what came of it."""
    over, outcomes = threading.Event(), Counter[str]()

    def run() -> None:
        with MoeClient(address, timeout=REBALANCE_LIMIT) as client:
            while not over.wait(REBALANCE_SECONDS):
                policy = ("even", "eplb")[outcomes.total() % 2]
                try:
                    outcomes[client.rebalance(policy=policy, timeout=REBALANCE_LIMIT).outcome] += 1
                except MoeError as error:
                    outcomes[f"{type(error).__name__}: {error}"] += 1

    thread = threading.Thread(target=run, name="rebalancing", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(REBALANCE_LIMIT)
        print(json.dumps({"rebalanced meanwhile": dict(outcomes)}), flush=True)


@contextmanager
def service(config: Config, order: tuple[int, ...]) -> Iterator[Opened]:
    """The service, with a caller that is attached and idle, and a rebalance that is asked for each second: of
    one owner, which has nothing to move.
    """
    with LocalCluster(config) as cluster, rebalancing(cluster.address):

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
