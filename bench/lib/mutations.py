"""Seeded mutations of bytes, of JSON and TOML texts and of protobuf messages: what no good client sends."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

NUMBERS = (0, 1, -1, 2, 7, 127, 128, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1)
NUMBERS += (-(2**31), -(2**63), 2**63, 2**64 - 1, 2**64, 10**30)
FLOATS = (0.0, -0.0, 0.5, -1.5, 1e308, 1e-308, float("inf"), float("-inf"), float("nan"))
TEXTS = ("", "a", "-1", "0", "\x00", "é" * 40, "\ud800", "x" * 200, "x" * 70_000, "../../etc/passwd", "%s%n")
TEXTS += ("F32", "BF16", "fp32", "nan", "None", "__class__", "\n2026-01-01T00:00:00Z ERROR head: forged")
WORDS = (b"", b"\x00" * 8, b"\xff" * 8, b"{", b"}", b"[", b"]", b'"', b"null", b"1e999", b"-0", b"\\ud800")
WORDS += (b"[" * 3000, b'{"a":' * 1500, b"=", b"\n", b"[[", b"'''", b"\xc3\x28", b"\xef\xbb\xbf", b"true")


class Mutations:
    """Makes variants; the same seed makes the same ones."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def of_bytes(self, data: bytes, others: Sequence[bytes] = ()) -> bytes:
        """One to a few changes of bytes: flipped, overwritten, cut, doubled, moved, or of another's."""
        for _ in range(self.random.choice((1, 1, 1, 2, 3, 8))):
            data = self._changed(data, others)
        return data

    def _changed(self, data: bytes, others: Sequence[bytes]) -> bytes:
        draw = self.random
        at = draw.randrange(len(data) + 1)
        end = min(len(data), at + draw.choice((1, 2, 4, 8, 64)))
        match draw.randrange(9):
            case 0 if data:
                at = draw.randrange(len(data))
                return data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]
            case 1:
                return data[:at] + draw.randbytes(end - at) + data[end:]
            case 2:
                return data[:at] + data[end:]
            case 3:
                return data[:end] + data[at:]
            case 4:
                return data[:at] + draw.choice(WORDS) + data[end:]
            case 5:
                width, kind = draw.choice(((1, "B"), (2, "H"), (4, "I"), (8, "Q")))
                number = struct.pack(f"<{kind}", draw.choice(NUMBERS) % (1 << 8 * width))
                return data[:at] + number + data[at + width :]
            case 6:
                return data[:at]
            case 7 if others:
                other = draw.choice(others)
                return data[:at] + other[draw.randrange(len(other) + 1) :]
            case _:
                return data[:at] + draw.randbytes(draw.choice((1, 3, 17))) + data[at:]

    def of_json(self, text: bytes) -> bytes:
        """A JSON text with some of its values, keys or members changed; bytes of it, where it is none."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return self.of_bytes(text)
        if self.random.random() < 0.2:
            return self.of_bytes(text)
        for _ in range(self.random.choice((1, 1, 2, 5))):
            value = self.of_value(value)
        try:
            return json.dumps(value).encode(errors="surrogatepass")
        except (ValueError, RecursionError):
            return self.of_bytes(text)

    def of_value(self, value: Any) -> Any:
        """A value of JSON with one part changed."""
        draw = self.random
        if isinstance(value, dict) and value and draw.random() < 0.85:
            key = draw.choice(sorted(value))
            found = dict(value)
            match draw.randrange(8):
                case 0:
                    del found[key]
                case 1:
                    found[draw.choice(TEXTS)] = found[key]
                case _:
                    found[key] = self.of_value(found[key])
            return found
        if isinstance(value, list) and value and draw.random() < 0.85:
            at = draw.randrange(len(value))
            match draw.randrange(8):
                case 0:
                    return value[:at] + value[at + 1 :]
                case 1:
                    return [*value, *value[at:]]
                case _:
                    return [*value[:at], self.of_value(value[at]), *value[at + 1 :]]
        return self.odd()

    def odd(self) -> Any:
        """A value that nobody expects."""
        draw = self.random
        kind = draw.randrange(7)
        choices: tuple[Any, ...] = (
            draw.choice(NUMBERS),
            draw.choice(FLOATS),
            draw.choice(TEXTS),
            None,
            draw.random() < 0.5,
            [self.odd() for _ in range(draw.randrange(4))] if kind == 5 else [],
            {draw.choice(TEXTS): self.odd()} if kind == 6 else {},
        )
        return choices[kind]

    def of_message(self, message: Message, data: bytes) -> bytes:
        """The message in `data` with fields set to odd values; bytes of it, where it cannot be parsed."""
        if not message.DESCRIPTOR.fields or self.random.random() < 0.3:
            return self.of_bytes(data)
        made = type(message)()
        try:
            made.MergeFromString(data)
            for _ in range(self.random.choice((1, 1, 2, 4))):
                self._set(made)
            return made.SerializeToString()
        except (DecodeError, ValueError, TypeError):
            return self.of_bytes(data)

    def _set(self, message: Message) -> None:
        """Sets or clears a field of a message, or of one within it."""
        draw = self.random
        if not message.DESCRIPTOR.fields:
            return
        field = draw.choice(message.DESCRIPTOR.fields)
        if draw.random() < 0.1:
            message.ClearField(field.name)
        elif field.type == FieldDescriptor.TYPE_MESSAGE and not field.is_repeated:
            self._set(getattr(message, field.name))
        elif field.is_repeated:
            there = getattr(message, field.name)
            if field.type == FieldDescriptor.TYPE_MESSAGE:
                self._set(there.add())
            elif there and draw.random() < 0.5:
                there[draw.randrange(len(there))] = self._scalar(field)
            else:
                there.extend([self._scalar(field)] * draw.choice((1, 1, 2, 300)))
        else:
            setattr(message, field.name, self._scalar(field))

    def _scalar(self, field: FieldDescriptor) -> Any:
        draw = self.random
        if field.type == FieldDescriptor.TYPE_STRING:
            return draw.choice(TEXTS).encode(errors="replace").decode()
        if field.type == FieldDescriptor.TYPE_BYTES:
            return draw.randbytes(draw.choice((0, 1, 7, 64, 5000)))
        if field.type == FieldDescriptor.TYPE_BOOL:
            return draw.random() < 0.5
        if field.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
            return draw.choice(FLOATS)
        wide = field.type in (FieldDescriptor.TYPE_UINT64, FieldDescriptor.TYPE_INT64)
        signed = field.type in (FieldDescriptor.TYPE_INT32, FieldDescriptor.TYPE_INT64)
        bits = (64 if wide else 32) - signed
        return draw.choice([number for number in NUMBERS if 0 <= number < 1 << bits])
