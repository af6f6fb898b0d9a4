"""`KeyStore`: the keys in which a generation's process groups meet, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from moeserve.runtime.control.stream import Message

STORE_BYTES = 64 << 20  # of keys, values and calls that wait; 64 members of a gloo group take under 1 MB
ENTRY_BYTES = 100  # that a key, or a call that waits for one, costs beside its text

T = TypeVar("T")

Answer = tuple[int, Message]
"""A member's seat, and what it is told."""


class StoreFull(ValueError):
    """The keys would take more than the limit."""


@dataclass(eq=False)
class _Waiting:
    """A call that waits until all of its keys are there."""

    keys: list[str]
    missing: set[str]
    valued: bool  # whether it wants their values
    nbytes: int


class KeyStore:
    """Answers what members' `StreamStore`s ask; the group's lock guards it. It has no thread and no clock.

    Who waits for a key bounds the wait and says when it is over.
    """

    def __init__(self, limit: int = STORE_BYTES) -> None:
        self._limit = limit
        self._values: dict[str, bytes] = {}
        self._waiting: dict[tuple[int, int], _Waiting] = {}  # by seat and the seat's number of the call
        self.nbytes = 0  # that it holds

    def answers(self, seat: int, asked: Message) -> list[Answer]:
        """Takes one call of a member; the answers that it brings about, to that member and to others.

        Raises KeyError, TypeError or ValueError for a call that is malformed.
        """
        call = int(asked["call"])
        keys = [_checked(key, str) for key in asked["keys"]]
        try:
            return self._answers(seat, call, keys, asked)
        except StoreFull as full:
            return [(seat, {"call": call, "error": str(full)})]

    def _answers(self, seat: int, call: int, keys: list[str], asked: Message) -> list[Answer]:
        value: object = None
        written: list[str] = keys
        match asked["what"]:
            case "get" | "wait":
                return self._wait(seat, call, keys, valued=asked["what"] == "get")
            case "forget":
                self._drop(seat, call)
                return []
            case "set":
                new = [_checked(value, bytes) for value in asked["values"]]
                self._write(dict(zip(keys, new, strict=True)))
            case "append":
                (key,), (more,) = keys, asked["values"]
                self._write({key: self._values.get(key, b"") + _checked(more, bytes)})
            case "add":
                (key,) = keys
                value = int(self._values.get(key, b"0")) + int(asked["amount"])
                self._write({key: str(value).encode()})
            case "compare_set":
                (key,), (expected, desired) = keys, asked["values"]
                if self._values.get(key, b"") == expected:
                    self._write({key: _checked(desired, bytes)})
                else:
                    written = []
                value = self._values.get(key, expected)
            case "check":
                value, written = all(key in self._values for key in keys), []
            case "delete":
                (key,), written = keys, []
                value = self._delete(key)
            case "count":
                value, written = len(self._values), []
            case unknown:
                raise ValueError(f"unknown call {unknown!r} of the store")
        return [(seat, {"call": call, "value": value}), *self._waited(written)]

    def _wait(self, seat: int, call: int, keys: list[str], *, valued: bool) -> list[Answer]:
        missing = {key for key in keys if key not in self._values}
        size = sum(ENTRY_BYTES + len(key) for key in keys)
        waiting = _Waiting(keys, missing, valued, size)
        if not missing:
            return [(seat, self._answer(call, waiting))]
        self._take(size)
        self._waiting[seat, call] = waiting
        return []

    def _waited(self, written: Iterable[str]) -> Iterable[Answer]:
        """Answers to calls for which the last key has come."""
        for key in written:
            if key not in self._values:
                continue  # nobody who waits for it is to go on without it
            for (seat, call), waiting in list(self._waiting.items()):
                waiting.missing.discard(key)
                if not waiting.missing:
                    self._drop(seat, call)
                    yield seat, self._answer(call, waiting)

    def _answer(self, call: int, waiting: _Waiting) -> Message:
        value = [self._values[key] for key in waiting.keys] if waiting.valued else None
        return {"call": call, "value": value}

    def _drop(self, seat: int, call: int) -> None:
        waiting = self._waiting.pop((seat, call), None)
        self.nbytes -= 0 if waiting is None else waiting.nbytes

    def _write(self, new: Mapping[str, bytes]) -> None:
        """Writes all keys or, where they would take more than the limit, none. Raises StoreFull."""
        self._take(sum(self._growth(key, value) for key, value in new.items()))
        self._values.update(new)

    def _growth(self, key: str, value: bytes) -> int:
        """How many bytes more the store holds once `key` has `value`."""
        before = self._values.get(key)
        return ENTRY_BYTES + len(key) + len(value) if before is None else len(value) - len(before)

    def _delete(self, key: str) -> bool:
        value = self._values.pop(key, None)
        if value is None:
            return False
        self.nbytes -= ENTRY_BYTES + len(key) + len(value)
        for waiting in self._waiting.values():
            if key in waiting.keys:
                waiting.missing.add(key)
        return True

    def _take(self, size: int) -> None:
        """Counts `size` more bytes. Raises StoreFull where they are over the limit."""
        if size > 0 and self.nbytes + size > self._limit:
            raise StoreFull(f"the store of a generation holds {self.nbytes} of {self._limit} bytes")
        self.nbytes += size


def _checked(value: object, kind: type[T]) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"the store takes {kind.__name__} here, not {type(value).__name__}")
    return value
