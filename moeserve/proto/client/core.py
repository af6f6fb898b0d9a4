"""`Core`: what both clients know and decide, without input or output; they only send, wait and sleep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from moeserve.proto import moe_pb2
from moeserve.proto.client.batch import CallOptions, Choice, ClientBatch, Logits, check_lane
from moeserve.proto.client.call import ClientCall
from moeserve.proto.client.lanes import Lanes
from moeserve.proto.client.patience import Clock, Patience
from moeserve.proto.client.payload import TRANSPORTS, shares
from moeserve.proto.host import host_id
from moeserve.proto.tensors import Array, Spec
from moeserve.proto.texts import quoted
from moeserve.proto.transports.shared_memory import SharedTensor, region_size

L = TypeVar("L")


@dataclass(frozen=True)
class Settings:
    """What holds for every call of a client, as MoeClient explains it. ValueError: no such transport;
    TypeError: a value of another type.
    """

    model: str
    patience: Patience
    lane: int | None
    transport: str

    def __post_init__(self) -> None:
        if not isinstance(self.model, str):
            raise TypeError(f"model={quoted(self.model)} must be a name, or ''")
        check_lane(self.lane)
        if self.transport not in TRANSPORTS:
            raise ValueError(f"transport={self.transport!r} is not one of {', '.join(TRANSPORTS)}")


class Core(Generic[L]):
    """A client's settings and the lanes it knows. Safe from any thread.

    connect: makes the way to a lane from its address and the most bytes of a message.
    """

    def __init__(self, connect: Callable[[str, int], L], settings: Settings) -> None:
        self.lanes: Lanes[L] = Lanes(connect)
        self.settings = settings

    @property
    def seconds(self) -> float:
        """The timeout of a question to the front door."""
        return self.settings.patience.seconds

    def clock(self, timeout: float | Patience | None) -> Clock:
        """The clock of a call that starts now; None: with the client's own patience."""
        return Clock(self.settings.patience if timeout is None else Patience.of(timeout))

    def call(
        self,
        layer: int,
        hidden: Array | SharedTensor,
        route: Choice | Logits,
        options: CallOptions,
    ) -> ClientCall[L]:
        """A call of its checked arrays. Raises TensorError, and ValueError for tensors of two lanes."""
        batch = ClientBatch.of(layer, hidden, route, options)
        asked, settings = options.get("lane"), self.settings
        bound = batch.lane(settings.lane if asked is None else asked)
        return ClientCall(batch, self.lanes, settings.model, bound, settings.transport)

    def place(self, topology: moe_pb2.GetTopologyReply, rank: int, spec: Spec) -> tuple[L, int]:
        """Returns where lane `rank` makes a tensor in shared memory: the way there, and the region's bytes.

        Raises MoeError where there is no such lane, or it cannot share memory with this process.
        """
        lane = self.lanes.pick(topology, rank, 0)
        shares("shared_memory", spec.nbytes, lane, host_id())
        return self.lanes.link(topology, lane), region_size(spec.nbytes)
