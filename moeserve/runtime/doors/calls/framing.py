"""What a large message must look like before it is parsed: a few fields, and long bytes only in tensors.

Parsing holds the interpreter. A message of 200 MB that is one tensor takes as long as to copy it; one of as
many small fields takes seconds, in which no other call runs.
"""

from __future__ import annotations

from google.protobuf.message import DecodeError

LARGE_BYTES = 1 << 20
"""Messages up to here are parsed without a look; only a Forward request may have more."""

MOST_FIELDS = 64
LONGEST_FIELD = 1 << 16
"""Bytes of a field that is neither a tensor nor a tensor's data, such as a name or a shape."""

Layout = dict[int, "Layout | None"]

_TENSOR: Layout = {3: None}  # data, of any length
_REQUEST: Layout = {5: _TENSOR, 6: {1: _TENSOR, 2: _TENSOR}, 7: _TENSOR}  # hidden, choice, logits


def check_framing(data: bytes, *, forward: bool) -> None:
    """Raises DecodeError for a large message that is no Forward request, or has more fields than one has."""
    if len(data) <= LARGE_BYTES:
        return
    if not forward:
        raise DecodeError(f"a message of {len(data)} bytes: this call takes {LARGE_BYTES} at most")
    _Walk(data).fields(0, len(data), _REQUEST)


class _Walk:
    """Counts the fields of a message, and goes over their bytes without a look."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._left = MOST_FIELDS

    def fields(self, at: int, end: int, layout: Layout) -> None:
        """Looks at the fields in [at, end), of which `layout` names those that may be long."""
        while at < end:
            self._left -= 1
            if self._left < 0:
                raise DecodeError(f"a message of {len(self._data)} bytes has more than {MOST_FIELDS} fields")
            key, at = self._number(at, end)
            field, wire = key >> 3, key & 7
            if wire == 0:
                _, at = self._number(at, end)
            elif wire in (1, 5):
                at += 8 if wire == 1 else 4
            elif wire == 2:
                length, at = self._number(at, end)
                if length > end - at:
                    raise DecodeError("a field of the message is longer than the message")
                if field not in layout and length > LONGEST_FIELD:
                    text = f"field {field} has {length} bytes, and {LONGEST_FIELD} at most"
                    raise DecodeError(f"{text} in a message of {len(self._data)} bytes")
                inner = layout.get(field)
                if inner is not None:
                    self.fields(at, at + length, inner)
                at += length
            else:
                raise DecodeError(f"a field of the message has wire type {wire}")

    def _number(self, at: int, end: int) -> tuple[int, int]:
        """The variable-length integer at `at`, and where it ends."""
        value = 0
        for shift in range(0, 70, 7):
            if at >= end:
                break
            byte = self._data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, at
        raise DecodeError("a number in the message does not end")
