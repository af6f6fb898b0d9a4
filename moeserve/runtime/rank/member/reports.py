"""`Reports`: tells the coordinator what a member has counted, from a thread that is not the steps'."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from moeserve.experts.routing.meter import Snapshot
from moeserve.runtime.control.messages import report_message
from moeserve.runtime.control.stream import Message, StreamClosed

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Counted:
    """What a member has counted since its start, in a generation."""

    generation: int
    steps: int
    expert_rows: int
    load: Snapshot  # its tokens are read by the thread that reports


class Reports:
    """One thread. A report that is put while another is being sent waits, and a newer one replaces it."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self._waiting: Counted | None = None
        self._closed = False
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="reports", daemon=True).start()

    def put(self, counted: Counted) -> None:
        """Has `counted` reported; returns at once."""
        with self._changed:
            self._waiting = counted
            self._changed.notify()

    def close(self) -> None:
        """Ends the thread, after the report that it sends."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _next(self) -> Counted | None:
        """The newest report; None when there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is not None or self._closed)
            counted, self._waiting = self._waiting, None
            return None if self._closed else counted

    def _run(self) -> None:
        while (counted := self._next()) is not None:
            try:
                tokens = counted.load.read().tokens
                self._send(report_message(counted.generation, (counted.steps, counted.expert_rows), tokens))
            except StreamClosed as closed:
                log.info("nobody takes reports of the load any more: %s", closed)
                return
            except Exception:
                log.exception("a report of the load could not be made; the next one holds what it held")
