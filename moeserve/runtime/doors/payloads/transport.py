"""`Transport`: one way for a tensor's bytes to reach a rank and for the answer to go back."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from moeserve.proto import moe_pb2
from moeserve.proto.tensors import Spec
from moeserve.runtime.doors.payloads.region import Hold
from moeserve.runtime.doors.payloads.regions import Regions


@dataclass(frozen=True, eq=False)
class Lent:
    """An input that may lie in the caller's memory: read only, and closed once, after the last look."""

    tensor: Tensor
    close: Callable[[], None]
    reached: bool = False  # by the device, which may read it there
    hold: Hold | None = None  # on the region that it lies in


@dataclass(frozen=True, eq=False)
class Room:
    """The place that an answer goes to.

    `put` takes the answer there, unless it lies there already, and fills the empty message that stands for
    it; `close` once at the end.
    """

    put: Callable[[Tensor, moe_pb2.Tensor], None]
    close: Callable[[], None]
    inline: bool = False  # the place is the message itself
    reached: Tensor | None = None  # the place itself, where the device may write into it
    hold: Hold | None = None  # on the region that it is in


class Transport(Protocol):
    """Payloads of one sort. Safe to call from any thread."""

    def lend(self, message: moe_pb2.Tensor, spec: Spec, field: str) -> Lent:
        """The tensor of `spec` in `message`, without a copy where that can be.

        Raises TensorError naming `field` for a payload of another size, RegionError for a region that is
        not there.
        """

    def room(self, output: moe_pb2.Region, spec: Spec) -> Room:
        """Room for the answer of `spec`, made sure of before anything is computed, as `output` asks.

        Raises as `lend` does, with the field `output`.
        """


@dataclass(frozen=True)
class TransportEntry:
    """An entry of the table: a transport's name, and the field of `Tensor.payload` that it answers for."""

    name: str
    payload: str
    build: Callable[[Regions], Transport]


def nothing_to_close() -> None:
    """The `close` of memory that ends with the last view of it."""
