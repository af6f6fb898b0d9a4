"""`Carried`: a Forward message whose hidden states lie beside it, so that only gRPC copies their bytes.

protobuf copies a tensor's bytes when it is given them, when it makes the message, when it parses it, and
when it is asked for them. On the wire a carried message is an ordinary one: `hidden` comes in two pieces,
dtype and shape first and the data last, and parsers merge them, as the encoding of protobuf demands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from moeserve.proto import moe_pb2

CARRIED_BYTES = 1 << 18
"""Data of this size on is carried beside its message; less is copied sooner than it is looked for: each end
takes 20 us more for a message of a few rows where nothing of that is in its caches.
"""

FORWARD = "/moeserve.v1.LaneService/Forward"
"""The method that takes and gives carried messages; others take them whole."""

DATA = 3  # Tensor.data
LENGTH_DELIMITED = 2

M = TypeVar("M", moe_pb2.ForwardRequest, moe_pb2.ForwardReply)


@dataclass(frozen=True, eq=False)
class Carried(Generic[M]):
    """A message and the bytes of its `hidden.data`, which is empty in one that came, and not set in one to be
    sent.
    """

    message: M
    data: memoryview


def beside(message: M, array: NDArray[Any]) -> Carried[M]:
    """`message`, whose `hidden` has dtype and shape, with the bytes of the dense `array` as its data."""
    return Carried(message, np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def packed(sent: Any) -> bytes:
    """The bytes of a message, or of a carried one."""
    if not isinstance(sent, Carried):
        whole: bytes = sent.SerializeToString()
        return whole
    data_head = _head(DATA, len(sent.data))
    number = sent.message.DESCRIPTOR.fields_by_name["hidden"].number
    head = _head(number, len(data_head) + len(sent.data)) + data_head
    return b"".join((sent.message.SerializeToString(), head, sent.data))


def unpacking(kind: Callable[[], M]) -> Callable[[bytes], M | Carried[M]]:
    """What parses the bytes of messages of `kind`; large data of `hidden` is a view of them.

    Raises DecodeError as protobuf does.
    """
    parse: Any = kind
    number = parse.DESCRIPTOR.fields_by_name["hidden"].number

    def unpack(received: bytes) -> M | Carried[M]:
        if len(received) >= CARRIED_BYTES:
            found = _lifted(received, number)
            if found is not None:
                message: M = parse.FromString(found[0])
                tensor = message.hidden
                if tensor.WhichOneof("payload") == "data" and not tensor.data:
                    return Carried(message, found[1])
        whole: M = parse.FromString(received)
        return whole

    return unpack


def _head(field: int, length: int) -> bytes:
    return _varint(field << 3 | LENGTH_DELIMITED) + _varint(length)


def _varint(value: int) -> bytes:
    made = bytearray()
    while value > 0x7F:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    made.append(value)
    return bytes(made)


@dataclass(frozen=True)
class _Field:
    number: int
    wire: int
    begin: int  # of its key
    value: int  # of its bytes, where it is length-delimited
    end: int


def _lifted(received: bytes, hidden: int) -> tuple[bytes, memoryview] | None:
    """The message with its only large `hidden.data` left empty, and that data; None where it has none, or is
    not what it should be: then protobuf shall say so.
    """
    place: tuple[_Field, _Field] | None = None
    try:
        for outer in _fields(received, 0, len(received)):
            if outer.number != hidden or outer.wire != LENGTH_DELIMITED:
                continue
            for inner in _fields(received, outer.value, outer.end):
                if inner.number != DATA:
                    continue
                if place is not None or inner.wire != LENGTH_DELIMITED:
                    return None
                place = outer, inner
    except ValueError:
        return None
    if place is None or place[1].end - place[1].value < CARRIED_BYTES:
        return None
    outer, inner = place
    kept = received[outer.value : inner.begin] + _head(DATA, 0) + received[inner.end : outer.end]
    rest = received[: outer.begin] + _head(hidden, len(kept)) + kept + received[outer.end :]
    return rest, memoryview(received)[inner.value : inner.end]


def _fields(received: bytes, at: int, end: int) -> Iterator[_Field]:
    """The fields in [at, end). ValueError where they are not fields."""
    while at < end:
        begin = at
        key, at = _number(received, at, end)
        wire, value = key & 7, at
        if wire == 0:
            _, at = _number(received, at, end)
        elif wire == 1:
            at += 8
        elif wire == 5:
            at += 4
        elif wire == LENGTH_DELIMITED:
            length, value = _number(received, at, end)
            at = value + length
        else:
            raise ValueError(f"wire type {wire}")
        if at > end:
            raise ValueError("a field is longer than its message")
        yield _Field(key >> 3, wire, begin, value, at)


def _number(received: bytes, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end and shift < 64:
        byte = received[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise ValueError("a number that does not end")
