"""A process whose GPU makes whole forward passes over a device lane, as one recorded graph: `by_passes`."""

from __future__ import annotations

import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from bench.service.serving_on.gpu.asking import Answer, compared, failure, orders
from bench.service.serving_on.gpu.service import ROWS, Call
from moeserve.proto import moe_pb2, moe_pb2_grpc
from moeserve.proto.channel import MAX_MESSAGE_BYTES
from moeserve.proto.client import MoeClient
from moeserve.proto.client.sync_link import Link
from moeserve.proto.errors import MoeError
from moeserve.torch import Rows, Settings, connect
from moeserve.torch.attached_device import AttachedDevice
from moeserve.torch.ways import Way

NAME = "gpu-serve-on"
TIMEOUT = 30.0  # seconds for an answer, and for a lane to be made again
AGAIN_SECONDS = 0.01  # between attempts to make the lane again
LOOK_SECONDS = 5.0  # for a rank to say who is attached


class Passes(Protocol):
    """A caller's forward passes."""

    def run(self) -> list[Tensor]:
        """The answers of all layers. Raises MoeError."""

    def renew(self) -> None:
        """Makes the lane again, after an error. Raises MoeError."""


class _Recorded:
    """A GPU's passes, replayed from one graph."""

    def __init__(self, way: AttachedDevice, given: list[tuple[int, Rows]]) -> None:
        self._way, device = way, given[0][1].hidden.device
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            for _ in range(3):
                for layer, rows in given:
                    way.mixed(layer, rows)
        way.check()
        with torch.cuda.graph(self._graph, stream=self._stream):
            self._answers = [way.mixed(layer, rows) for layer, rows in given]

    def run(self) -> list[Tensor]:
        """As `Passes.run`."""
        with torch.cuda.stream(self._stream):
            self._graph.replay()
        self._way.check()
        return self._answers

    def renew(self) -> None:
        """As `Passes.renew`."""
        self._way.renew()


class _Called:
    """Passes with rows in host memory, which the way tries again by itself."""

    def __init__(self, way: Way, given: list[tuple[int, Rows]]) -> None:
        self._way, self._given = way, given

    def run(self) -> list[Tensor]:
        """As `Passes.run`."""
        return [self._way.mixed(layer, rows) for layer, rows in self._given]

    def renew(self) -> None:
        """As `Passes.renew`."""


@torch.no_grad()
def by_passes(pipe: Connection, answers: Any, address: str, calls: list[Call], device: str) -> None:
    """One pass at a time; after an error its lane is made again, and it goes on."""
    torch.set_num_threads(1)
    if device != "cpu":
        torch.cuda.set_device(device)
    settings = Settings("attached", address, name=NAME, rows=ROWS, device=device, timeout=TIMEOUT)
    way = connect(settings)
    given = [(call.layer, Rows(*(column.to(device) for column in call.batch))) for call in calls]
    rights = [call.right.to(device) for call in calls]
    passes: Passes = _Called(way, given)
    if device != "cpu":
        passes = _Recorded(cast(AttachedDevice, way), given)
    for _ in orders(pipe):
        began = time.time()
        try:
            found = passes.run()
            answers.put(compared(-1, began, list(zip(found, rights, strict=True))))
        except MoeError as error:
            answers.put(Answer(-1, began, time.time(), failure(error)))
            _again(passes.renew, answers, pipe)
    way.close()


def _again(renew: Callable[[], None], answers: Any, pipe: Connection) -> None:
    """Tries until the lane is there again, or another order has come."""
    while not pipe.poll():
        began = time.time()
        try:
            renew()
        except MoeError as error:
            answers.put(Answer(-1, began, time.time(), failure(error), tried=True))
            time.sleep(AGAIN_SECONDS)
        else:
            return


def attached_at(address: str) -> int:
    """The rank that has the lane; -1: none has it now."""
    with MoeClient(address, timeout=LOOK_SECONDS) as client:
        lanes = client.topology().lanes
    for lane in lanes:
        link = Link(lane.address, MAX_MESSAGE_BYTES, None)
        try:
            stub = moe_pb2_grpc.DeviceLaneServiceStub(link.channel)  # type: ignore[no-untyped-call]
            told = link.unary(stub.ListDeviceLanes, moe_pb2.ListDeviceLanesRequest(), LOOK_SECONDS)
            if NAME in {one.name for one in told.lanes}:
                return int(lane.rank)
        finally:
            link.close()
    return -1
