"""`Restoring`: a member reads what it has yet to hold of its experts, beside the steps of other layers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from moeserve.proto.texts import clipped
from moeserve.runtime.control.stream import Message, StreamClosed
from moeserve.runtime.rank.host_threads import as_here
from moeserve.runtime.rank.weights.copies import Abandoned, Copier

log = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 10.0  # seconds before a layer that cannot be read is tried again
STOP_SECONDS = 60.0  # for the expert that is being read when nobody wants it any more

Restore = Callable[[int, Copier], None]
"""Fills the slots of the layer at a position by the copier; raises Abandoned once that is told so."""


class Restored(NamedTuple):
    """A layer that a member holds now, or cannot read: its position, and why not."""

    position: int
    why_not: str = ""


class Restoring:
    """One thread at a time. `restore` fills one layer, `send` tells the head of each."""

    def __init__(
        self, make_copier: Callable[[], Copier], restore: Restore, send: Callable[[Message], None]
    ) -> None:
        self._make_copier, self._restore, self._send = make_copier, restore, send
        self._copier: Copier | None = None  # of the thread
        self._thread: threading.Thread | None = None

    def begin(self, generation: int, positions: Sequence[int]) -> None:
        """Reads these layers, in their order, and says so in `generation`. None may be under way."""
        if not positions:
            return
        self._copier = self._make_copier()
        self._thread = threading.Thread(
            target=as_here(self._run),
            args=(generation, list(positions), self._copier),
            name="restoring",
            daemon=True,
        )
        self._thread.start()

    def stop(self) -> None:
        """Ends what is under way, after the expert that is being read. TimeoutError: it does not end."""
        thread, copier = self._thread, self._copier
        if thread is None or copier is None:
            return
        copier.abandoned.set()
        thread.join(STOP_SECONDS)
        if thread.is_alive():
            raise TimeoutError(f"an expert has not been read for {STOP_SECONDS:g} s, and nothing else may be")
        self._thread = self._copier = None

    def _run(self, generation: int, left: list[int], copier: Copier) -> None:
        pause = FIRST_PAUSE
        while left and not copier.abandoned.is_set():
            at = left.pop(0)
            try:
                self._restore(at, copier)
                self._tell(generation, Restored(at))
                pause = FIRST_PAUSE
            except Abandoned:
                return
            except StreamClosed as closed:
                log.info("nobody is told of restored layers any more: %s", closed)
                return
            except Exception as error:
                why = clipped(f"{type(error).__name__}: {error}")
                text = "the layer at %d cannot be restored, and is tried again: %s"
                log.warning(text, at, why, exc_info=error)
                left.append(at)
                self._tell_why(generation, Restored(at, why))
                copier.abandoned.wait(pause)
                pause = min(LONGEST_PAUSE, 2 * pause)

    def _tell_why(self, generation: int, restored: Restored) -> None:
        try:
            self._tell(generation, restored)
        except StreamClosed as closed:
            log.info("nobody is told what cannot be restored: %s", closed)

    def _tell(self, generation: int, restored: Restored) -> None:
        told = {"kind": "restored", "generation": generation, "layer": restored.position}
        self._send(told | {"why_not": restored.why_not})
