"""Answers on their way from a rank's device to its callers: `InOrder`, the thread that finishes steps."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

import torch
from torch import Tensor

from moeserve.runtime.rank.host_threads import as_here

log = logging.getLogger(__name__)

MOST_UNFINISHED = 3
"""Steps that were launched and whose answers have not left; the coordinator has two under way at a time."""

MOST_RUNS = 8
"""Runs and steps that were launched, of which another run waits: its answers lie in its caller's memory."""

FINISH_SECONDS = 120.0
"""Within which a launched step has to end by default. Dispatchers and process groups end their own waits long
before.
"""


class InOrder:
    """One thread that finishes what was launched, in the order in which it was launched.

    At most so many steps wait here as `put` says, so that the memory of their answers is bounded.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._acts: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._unfinished = 0
        self._closed = False  # acts that come now are done by who brings them
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self.seconds = FINISH_SECONDS  # within which what waits here has to end

    @property
    def unfinished(self) -> int:
        """How much is left to finish; `put` waits while it is too much."""
        return self._unfinished

    @property
    def idle(self) -> bool:
        """Whether nothing is left to finish."""
        return self._unfinished == 0

    def put(self, act: Callable[[], None], most: int = MOST_UNFINISHED) -> None:
        """Has `act` called after all that was put before. Waits while so much is unfinished; after `close`,
        until all is finished, and calls it then.

        Raises TimeoutError when that takes too long.
        """
        with self._changed:
            self._wait_for(lambda: self._unfinished < (1 if self._closed else most))
            if not self._closed:
                self._add(act)
                return
        _do(act)

    def beside(self, act: Callable[[], None]) -> None:
        """Has a small `act` called soon, by the same thread; never waits for others. After `close` the thread
        that brings it calls it at once.
        """
        with self._changed:
            if not self._closed:
                self._add(act)
                return
        _do(act)

    def _add(self, act: Callable[[], None]) -> None:
        self._unfinished += 1
        self._acts.put(act)
        if self._thread is None:
            self._thread = threading.Thread(target=as_here(self._run), name=self._name, daemon=True)
            self._thread.start()

    def drain(self) -> None:
        """Waits until all is finished. Raises TimeoutError when that takes too long."""
        with self._changed:
            self._wait_for(lambda: self._unfinished == 0)

    def close(self) -> None:
        """Ends the thread when all is finished; does not wait for it."""
        with self._changed:
            self._closed = True
            self._acts.put(None)

    def _wait_for(self, true: Callable[[], bool]) -> None:
        if not self._changed.wait_for(true, self.seconds):
            raise TimeoutError(
                f"{self._unfinished} launched steps have not ended within {self.seconds:g} s "
                "(step.finish_seconds): the device does not come to the end of its work"
            )

    def _run(self) -> None:
        while (act := self._acts.get()) is not None:
            try:
                _do(act)
            finally:
                del act
                with self._changed:
                    self._unfinished -= 1
                    self._changed.notify_all()


def _do(act: Callable[[], None]) -> None:
    """Calls `act`, whose failure concerns no other act."""
    try:
        act()
    except Exception:
        log.exception("what was to be done after a step failed")


def on_host(answer: Tensor) -> Tensor:
    """`answer` in host memory, complete; it is copied to pinned memory, of which torch keeps used blocks.

    A copy to pageable memory would hold up the copies of all other threads as long as it waits.
    """
    if answer.device.type == "cpu":
        return answer
    home = torch.empty(answer.shape, dtype=answer.dtype, pin_memory=True)
    home.copy_(answer, non_blocking=True)
    torch.cuda.current_stream(answer.device).synchronize()
    return home
