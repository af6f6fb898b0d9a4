"""Messages as bytes: a frame is a length in four bytes, little-endian, and a map of MessagePack."""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from moeserve.proto.texts import clipped

Message = dict[str, Any]

LENGTH = struct.Struct("<I")

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Message)


def encoded(message: Message) -> bytes:
    """One message as a frame; several ends can be sent the same one.

    A character that UTF-8 has no bytes for, as the name of a file may hold, becomes a question mark. Raises
    TypeError for values that are no plain ones.
    """
    frame = bytearray(256)
    try:
        _ENCODER.encode_into(message, frame, LENGTH.size)
    except UnicodeEncodeError:
        _ENCODER.encode_into(_utf8(message), frame, LENGTH.size)
    LENGTH.pack_into(frame, 0, len(frame) - LENGTH.size)
    return bytes(frame)


def decoded(body: bytes) -> Message:
    """The message of a frame, without its length. Raises ValueError, with a short reason, for other bytes."""
    try:
        message: Message = _DECODER.decode(body)
    except (ValueError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError(f"a frame is no message: {clipped(str(error))}") from error
    if not isinstance(message.get("kind"), str):
        raise ValueError("a frame is no message: it must be a map with a kind")
    return message


def _utf8(value: Any) -> Any:
    """`value` with texts that UTF-8 can hold."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {_utf8(key): _utf8(one) for key, one in value.items()}
    return [_utf8(one) for one in value] if isinstance(value, list | tuple) else value
