"""`Threads`: a pool of threads that grows with the calls under way, and shrinks when they are over.

gRPC takes no other pool than concurrent.futures', whose threads stay for ever, each with memory of its own.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

SPARE = 16  # threads that stay though they have nothing to do
IDLE_SECONDS = 5.0  # for which more than these were not needed, before one of them ends

Work = tuple[Future[Any], Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class Threads(ThreadPoolExecutor):
    """At most `most` threads, called `name`."""

    def __init__(self, most: int, name: str, idle_seconds: float = IDLE_SECONDS) -> None:
        super().__init__(most, name)
        self._most = most
        self._name = name
        self._idle_seconds = idle_seconds
        self._works: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._count = 0  # threads
        self._idle = 0  # of them
        self._waiting = 0  # works that no thread has taken
        self._scarce = 0.0  # when no more than the spare threads were last idle
        self._closed = False
        self._mutex = threading.Lock()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Has a thread call `fn`; RuntimeError after `shutdown`."""
        future: Future[Any] = Future()
        with self._mutex:
            if self._closed:
                raise RuntimeError(f"the threads {self._name!r} have ended")
            self._waiting += 1
            if self._idle - self._waiting < SPARE:
                self._scarce = time.monotonic()
            more = self._waiting > self._idle and self._count < self._most
            self._count += more
        self._works.put((future, fn, args, kwargs))
        if more:
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: FBT001, FBT002  # inherited
        """Takes no further work; threads end when they have none. It waits for nobody."""
        with self._mutex:
            if self._closed:
                return
            self._closed = True
            count = self._count
        for _ in range(count):
            self._works.put(None)

    def _work(self) -> None:
        while True:
            work = self._next()
            if work is None:
                return
            future, fn, args, kwargs = work
            if future.set_running_or_notify_cancel():
                try:
                    result = fn(*args, **kwargs)
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(result)
                    del result
            del work, future, fn, args, kwargs  # an idle thread holds nothing of its last call

    def _next(self) -> Work | None:
        """The next work; None where this thread is to end, and counts no more."""
        while True:
            with self._mutex:
                if self._spare():
                    self._count -= 1
                    return None
                self._idle += 1
            try:
                work = self._works.get(timeout=self._idle_seconds)
            except queue.Empty:
                with self._mutex:
                    self._idle -= 1
                continue
            with self._mutex:
                self._idle -= 1
                if work is None:
                    self._count -= 1
                else:
                    self._waiting -= 1
            return work

    def _spare(self) -> bool:
        """Whether one thread more would be idle beside those that stay, for some time already."""
        idle = self._idle - self._waiting
        return idle >= SPARE and time.monotonic() - self._scarce > self._idle_seconds
