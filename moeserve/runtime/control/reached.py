"""`Reached`: how far a member is in what all do together; who holds the others up is behind them."""

from __future__ import annotations

import threading
from enum import IntEnum
from typing import NamedTuple


class Phase(IntEnum):
    """Where the thread that executes entries is, in the order in which it gets there."""

    PREPARED = 0  # of a generation, before it joins
    GROUP = 1  # forms the process group
    DISPATCHERS = 2  # builds the dispatchers
    JOINED = 3
    BEGUN = 4  # of a step
    DISPATCH = 5
    EXPERTS = 6
    COMBINE = 7
    DEVICE = 8  # waits until the device has the answer
    DONE = 9


WORDS = {
    Phase.PREPARED: "has not begun to join",
    Phase.GROUP: "forms the process group",
    Phase.DISPATCHERS: "builds the dispatchers",
    Phase.JOINED: "has joined",
    Phase.BEGUN: "has begun it",
    Phase.DISPATCH: "is in dispatch",
    Phase.EXPERTS: "is in its experts",
    Phase.COMBINE: "is in combine",
    Phase.DEVICE: "waits for its device",
    Phase.DONE: "has finished it",
}


class Reached(NamedTuple):
    """A step's number, 0 before the first of a generation, and the phase; what is behind is less."""

    step: int
    phase: Phase

    def __str__(self) -> str:
        where = f" step {self.step}:" if self.step else ""
        return f"{where} it {WORDS[self.phase]}".strip()


class Progress:
    """How far one member is. Its executing thread notes it, and any thread that a step has ended.

    Any thread reads it.
    """

    def __init__(self) -> None:
        self._writes = threading.Lock()  # a step may end while the next one begins
        self.reached = Reached(0, Phase.PREPARED)

    def join(self, phase: Phase) -> None:
        """Notes a phase of the joining of a generation."""
        with self._writes:
            self.reached = Reached(0, phase)

    def begin(self, step: int) -> None:
        """Notes that a step begins."""
        with self._writes:
            self.reached = Reached(step, Phase.BEGUN)

    def end(self, step: int) -> None:
        """Notes that a step has ended on the device; from any thread. A later one may have begun."""
        with self._writes:
            if self.reached.step == step:
                self.reached = Reached(step, Phase.DONE)

    def enter(self, phase: Phase) -> None:
        """Notes a phase of the step that began last."""
        with self._writes:
            self.reached = Reached(self.reached.step, phase)
