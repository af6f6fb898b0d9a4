"""`Entries`: what a member executes, from the head's stream to its executing thread, in the head's order.

Two threads share the reading of the stream. The receiving one sees what comes while an entry is executed: an
abort, a question. To hand each step's header from it to the executing one costs a wake-up and a turn at the
interpreter, as much as many a step takes. So where the stream is a ring, the executing thread reads it itself
between two steps, and takes steps and runs there and nothing else: what else comes is left to the receiving
one. That one looks every `LOOK_SECONDS` whether a step takes long, and reads meanwhile.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Collection
from typing import Protocol

from moeserve.runtime.control.stream import Message

LOOK_SECONDS = 0.01
"""Between looks whether a step still runs that ran at the last one. What comes meanwhile is seen so much
later, or at most twice as much.
"""

STEPS = ("step", "run")
"""Kinds of entries that the executing thread takes by itself."""

REST_LOOKS = 100  # without a step, after which nobody looks until one begins


class StepSource(Protocol):
    """What steps are taken from: a `HeadStream`."""

    @property
    def followed(self) -> bool:
        """Whether steps can be taken: what is received comes over a ring."""

    def wake(self) -> None:
        """Has the `take` under way return, or the next one."""

    @property
    def ready(self) -> bool:
        """Whether the next message is there, or begins to come."""

    def take(self, kinds: Collection[str], seconds: float) -> Message | None:
        """The next message, where it is of one of these kinds and comes within so many seconds."""

    @property
    def waits(self) -> bool:
        """Whether there is something that `take` has left to who receives."""


class Entries:
    """A queue in the head's order, and who of two threads reads the stream: one at a time, never both.

    The receiving thread calls `await_turn` before each look at the stream, and `put`; the executing one
    calls `next`.
    """

    def __init__(self, source: StepSource | None) -> None:
        """source: what the executing thread takes steps from; None: the receiving one reads all."""
        self._source = source
        self._queue: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._lock = threading.Lock()  # over who reads
        self._receives = True  # the receiving thread reads; else the executing one does, when it is idle
        self._taking = False  # the executing thread is at the stream
        self._executed = 0  # entries that were given out
        self._rests = False  # the receiving thread sleeps until it is woken
        self._wake = threading.Event()

    def put(self, entry: Message) -> None:
        """Adds an entry; by the thread that receives. From a step on the executing thread reads, where it
        can.
        """
        with self._lock:
            self._queue.put(entry)
            if entry["kind"] in STEPS and self._source is not None and self._source.followed:
                self._receives = False

    def put_beside(self, entry: Message) -> None:
        """Adds an entry that did not come over the stream; from any thread."""
        with self._lock:
            self._queue.put(entry)
            taking = self._taking
        if taking and self._source is not None:
            self._source.wake()

    def await_turn(self) -> None:
        """Returns when the receiving thread is to read: the other one executes what takes long, or has left
        something to it.
        """
        seen, idle = -1, 0
        while not self._receives:
            self._rests = idle >= REST_LOOKS
            if (
                self._rests and self._executed != seen
            ):  # looked at after `_rests`, which its writer does not do
                self._rests = False
            self._wake.wait(None if self._rests else LOOK_SECONDS)
            self._wake.clear()
            self._rests = False
            with self._lock:
                same = self._executed == seen
                self._receives = self._receives or (same and not self._taking)
            seen, idle = self._executed, idle + 1 if same else 0

    def next(self, seconds: float) -> Message | None:
        """The next entry; None where none came within `seconds`. By the executing thread."""
        with self._lock:
            self._taking = not self._receives and self._queue.empty()
        if self._source is None or not self._taking:
            return self._given(self._queued(seconds))
        entry = self._source.take(STEPS, seconds)
        left = entry is None and self._source.waits
        with self._lock:
            self._taking = False
            self._receives = self._receives or left
        if left:
            self._wake.set()
        if entry is None:
            entry = self._queued(seconds if left else 0.0)
        return self._given(entry)

    @property
    def another(self) -> bool:
        """Whether one more entry is there already. By the executing thread."""
        if not self._queue.empty():
            return True
        return not self._receives and self._source is not None and self._source.ready

    def rest(self) -> list[Message]:
        """What was added and has not been given out; the stream is not read for it."""
        found = []
        while (entry := self._queued(0.0)) is not None:
            found.append(entry)
        return found

    def _queued(self, seconds: float) -> Message | None:
        try:
            return self._queue.get(timeout=seconds)
        except queue.Empty:
            return None

    def _given(self, entry: Message | None) -> Message | None:
        """Counts an entry that is executed now; the receiving thread looks again."""
        if entry is not None:
            self._executed += 1
            if self._rests:
                self._wake.set()
        return entry
