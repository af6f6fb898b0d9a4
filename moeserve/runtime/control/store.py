"""`StreamStore`: where a generation's process groups meet, kept by the head, reached over a member's stream.

torch.distributed brings a `TCPStore`, which listens on every interface and asks nobody who they are. This one
opens no socket: what a member asks goes over its stream to the head, which has checked its token.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError, Store  # type: ignore[attr-defined]  # not exported

from moeserve.runtime.control.stream import Message, StreamClosed

Answers = queue.SimpleQueue[Message]


class StreamStore(Store):
    """The store of one generation. Any thread may use it; `answered` and `close` come from who receives.

    Whatever waits for a key, `get` included, waits at most `seconds` (or the time that the caller gives), and
    ends at once with `close`. All methods raise DistStoreError, a RuntimeError, where the head does not
    answer or refuses. torch keeps no reference to it that Python counts: its owner holds it until the groups
    that met in it have ended.
    """

    def __init__(self, send: Callable[[Message], None], generation: int, seconds: float) -> None:
        super().__init__()
        self.set_timeout(timedelta(seconds=seconds))
        self._send, self.generation = send, generation
        self._lock = threading.Lock()  # around the next two
        self._closed = ""  # why nothing is asked any more
        self._asked: dict[int, Answers] = {}
        self._numbers = itertools.count(1)

    def answered(self, message: Message) -> None:
        """Takes the head's answer to a call. One that nobody waits for any more is dropped."""
        with self._lock:
            answers = self._asked.get(message["call"]) if message["generation"] == self.generation else None
        if answers is not None:
            answers.put(message)

    def close(self, reason: str) -> None:
        """Ends every call, those that wait now and later ones, with `reason`."""
        with self._lock:
            self._closed = self._closed or reason
            for answers in self._asked.values():
                answers.put({"error": self._closed})

    def _ask(self, what: str, keys: list[str], within: timedelta | None = None, **more: Any) -> Any:
        """The head's answer to one call."""
        limit: timedelta = within or self.timeout  # type: ignore[attr-defined]  # torch forgets to declare it
        seconds = limit.total_seconds()
        answers: Answers = queue.SimpleQueue()
        with self._lock:
            if self._closed:
                raise DistStoreError(f"{what} of {_named(keys)}: {self._closed}")
            call = next(self._numbers)
            self._asked[call] = answers
        asked = {"kind": "store", "generation": self.generation, "call": call, "what": what, "keys": keys}
        try:
            self._send(asked | more)
            answer = answers.get(timeout=seconds)
        except queue.Empty:
            self._forget(call)
            raise DistStoreError(f"{what} of {_named(keys)}: timed out after {seconds:g} s") from None
        except StreamClosed as closed:
            raise DistStoreError(f"{what} of {_named(keys)}: the head is gone: {closed}") from closed
        finally:
            with self._lock:
                del self._asked[call]
        if "error" in answer:
            raise DistStoreError(f"{what} of {_named(keys)}: {answer['error']}")
        return answer.get("value")

    def _forget(self, call: int) -> None:
        """Tells the head that nobody waits for a call any more."""
        asked = {"kind": "store", "generation": self.generation, "call": call, "what": "forget", "keys": []}
        try:
            self._send(asked)
        except StreamClosed as closed:
            self.close(f"the head is gone: {closed}")

    # -- what torch.distributed asks of a store; their names, arguments and results are torch's -------------

    def set(self, key: str, value: bytes | str) -> None:
        self._ask("set", [key], values=[_bytes(value)])

    def multi_set(self, keys: list[str], values: list[bytes | str]) -> None:
        self._ask("set", list(keys), values=[_bytes(value) for value in values])

    def get(self, key: str) -> bytes:
        value: bytes = self._ask("get", [key])[0]
        return value

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return list(self._ask("get", list(keys)))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._ask("wait", list(keys), timeout)

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask("check", list(keys)))

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", [key], amount=amount))

    def append(self, key: str, value: bytes | str) -> None:
        self._ask("append", [key], values=[_bytes(value)])

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        value: bytes = self._ask("compare_set", [key], values=[_bytes(expected), _bytes(desired)])
        return value

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete", [key]))

    def num_keys(self) -> int:
        return int(self._ask("count", []))

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> StreamStore:
        return self  # it serves several threads as it is

    deleteKey, getNumKeys = delete_key, num_keys  # what torch's C++ calls them


def _bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _named(keys: list[str]) -> str:
    """A few keys, for an error."""
    return f"{', '.join(map(repr, keys[:3]))}{f' and {len(keys) - 3} more' if len(keys) > 3 else ''}"
