"""Inline bytes: the payload rides in the message.

Works between any two hosts; costs a few copies each way.
"""

from torch import Tensor

from moeserve.proto import moe_pb2
from moeserve.proto.tensors import Spec, as_torch, encode_into, plain
from moeserve.runtime.doors.payloads.regions import Regions
from moeserve.runtime.doors.payloads.transport import Lent, Room, TransportEntry, nothing_to_close


class Inline:
    """Views the bytes that arrived, and copies the answer into the reply."""

    def lend(self, message: moe_pb2.Tensor, spec: Spec, field: str) -> Lent:
        """A view of the message's bytes, which the tensor keeps alive."""
        return Lent(as_torch(message.data, spec, field), nothing_to_close)

    def room(self, output: moe_pb2.Region, spec: Spec) -> Room:
        """The reply itself is the room."""
        return Room(_put, nothing_to_close, inline=True)


def _put(answer: Tensor, message: moe_pb2.Tensor) -> None:
    encode_into(message, plain(answer, "hidden"))


def _build(regions: Regions) -> Inline:
    return Inline()


ENTRY = TransportEntry(name="inline", payload="data", build=_build)
