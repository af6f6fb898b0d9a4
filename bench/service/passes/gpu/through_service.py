"""A rank as a service on the first GPU, and this process's ways to it from the second, or from the same."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

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

OWNER = "cuda:0"
IDLE_ROWS = 16
REBALANCE_SECONDS = 1.0  # between two rebalances
REBALANCE_LIMIT = 30.0  # seconds for one


def home() -> str:
    """The device of this process's rows."""
    return f"cuda:{min(1, torch.cuda.device_count() - 1)}"


class Opened:
    """A context: a service that is asked to rebalance meanwhile. Called, it opens a way by its name, rows,
    stages and the layers of a forward pass; who asked for it closes it.
    """

    def __init__(self, address: str) -> None:
        self._address, self._outcomes = address, Counter[str]()
        self._over, self._quiet = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._rebalance, name="rebalancing", daemon=True)

    def __call__(
        self, name: str, rows: int, stages: int, layers: tuple[int, ...], rows_wire: str = "auto"
    ) -> AttachedDevice:
        given = Settings(
            "attached",
            self._address,
            name=name,
            rows=rows,
            stages=stages,
            device=home(),
            rows_wire=rows_wire,
            layers=layers,
        )
        way: AttachedDevice = connect(given)  # type: ignore[assignment]
        return way

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """No rebalance is asked for meanwhile."""
        self._quiet.set()
        try:
            yield
        finally:
            self._quiet.clear()

    def __enter__(self) -> Opened:
        self._thread.start()
        return self

    def __exit__(self, *ended: object) -> None:
        self._over.set()
        self._thread.join(REBALANCE_LIMIT)
        print(json.dumps({"rebalanced meanwhile": dict(self._outcomes)}), flush=True)

    def _rebalance(self) -> None:
        """By two policies in turn."""
        with MoeClient(self._address, timeout=REBALANCE_LIMIT) as client:
            while not self._over.wait(REBALANCE_SECONDS):
                if self._quiet.is_set():
                    continue
                policy = ("even", "eplb")[self._outcomes.total() % 2]
                try:
                    outcome = client.rebalance(policy=policy, timeout=REBALANCE_LIMIT).outcome
                except MoeError as error:
                    outcome = f"{type(error).__name__}: {error}"
                self._outcomes[outcome] += 1


@contextmanager
def service(config: Config, order: tuple[int, ...]) -> Iterator[Opened]:
    """The service, with a caller that is attached and idle, and a rebalance that is asked for each second: of
    one owner, which has nothing to move.
    """
    with LocalCluster(config) as cluster, Opened(cluster.address) as opened:
        idle = opened("idle", IDLE_ROWS, 1, order)
        yield opened
        idle.close()


def hop_through(
    way: AttachedDevice, given: list[Given], layers: int, passes: int
) -> tuple[list[float], list[Tensor]]:
    """The caller's graph of a forward pass, one layer after the other: a layer's times, and the answers."""
    device = home()
    stream, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
    rows = [Rows(one.hidden, one.route, one.weights) for one in given]
    with torch.cuda.device(device), torch.cuda.stream(stream):
        for _ in range(3):
            for at, one in enumerate(rows):
                way.mixed(at % layers, one)
    way.check()
    with torch.cuda.device(device):
        with torch.cuda.graph(graph, stream=stream):
            answers = [way.mixed(at % layers, one) for at, one in enumerate(rows)]
        found = microseconds(graph.replay, passes, stream, len(given))
    way.check()
    return found, answers
