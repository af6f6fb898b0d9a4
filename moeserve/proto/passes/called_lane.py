"""`CalledLane`: a device lane over which single calls go, and `Rounds`, by which its passes are foreseen."""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import suppress

from moeserve.proto.client.batch import Choice, Logits
from moeserve.proto.client.patience import Clock
from moeserve.proto.passes.attached import AttachedLane
from moeserve.proto.passes.mailbox import MOST_LAYERS
from moeserve.proto.passes.running import Pass
from moeserve.proto.tensors import Plain
from moeserve.proto.transports.shared_memory import SharedTensor

AGREEING_ROUNDS, MOST_AGREEING, FEWEST_CALLS = 2, 16, 8
"""Rounds over the same layers, and calls in them, after which a standing pass is begun; twice as many rounds
after each pass that ended before it had gone round.
"""


class Rounds:
    """Over which layers one caller's calls go round."""

    def __init__(self) -> None:
        self._seen: deque[int] = deque(maxlen=2 * MOST_LAYERS)
        self._agreeing = AGREEING_ROUNDS

    def called(self, layer: int) -> None:
        """Notes a call."""
        self._seen.append(layer)

    def held(self, calls: int, layers: int) -> None:
        """A standing pass over so many layers has ended after so many calls."""
        kept = calls > layers
        self._agreeing = AGREEING_ROUNDS if kept else min(MOST_AGREEING, 2 * self._agreeing)

    def of(self, layer: int) -> tuple[int, ...]:
        """The layers of the round that a call of `layer` begins; () where the last calls were no rounds."""
        seen = list(self._seen)
        with suppress(ValueError):
            length = seen[::-1].index(layer) + 1
            needed = max(self._agreeing * length, FEWEST_CALLS)
            if length <= MOST_LAYERS and len(seen) >= needed:
                last, found = seen[-needed:], tuple(seen[-length:])
                if all(one == found[(at - needed) % length] for at, one in enumerate(last)):
                    return found
        return ()


class CalledLane:
    """A lane that is attached, and the pass that runs on it. One thread at a time uses it."""

    def __init__(self, lane: AttachedLane) -> None:
        self.lane = lane
        self.user = threading.get_ident()  # who called last
        self.used_at = time.monotonic()
        self.turn = threading.Lock()  # of one whose memory was handed out: a call at a time
        self._rounds = Rounds()
        self._run: Pass | None = None
        self._goes_on = False  # it has further steps
        self._calls, self._demanded = 0, 0

    def fits(self, rows: Plain, rank: int | None) -> bool:
        """Whether such rows may go over it; rank: whose lane it has to be, None for any."""
        wanted = self.lane.wanted
        there = rows.dtype.name == wanted.dtype and len(rows.storage) <= wanted.rows
        return there and rank == wanted.rank

    def run_of(self, layer: int, version: int, clock: Clock) -> Pass:
        """The pass whose next step is of this layer, with weights of this version, 0 for any. Raises
        MoeError; DeadlineExceeded where the one before it does not end.
        """
        run = self._run
        wanted = run is not None and self._goes_on and (run.layer(0), self._demanded) == (layer, version)
        if run is not None and wanted and run.status is None:
            return run
        if run is not None:
            if self._goes_on:
                self._rounds.held(self._calls, len(run.layers))
            run.leave(clock.remaining)
        layers = self._rounds.of(layer)
        self._goes_on, self._calls, self._demanded = bool(layers), 0, version
        run = self._run = self.lane.begin(
            layers or (layer,), standing=self._goes_on, any_weights=True, weights_version=version
        )
        return run

    def post(self, run: Pass, rows: Plain, route: Choice | Logits, placed: SharedTensor | None) -> None:
        """Brings the rows of a call; placed: where they are already. Raises TensorError for what the lane
        does not take.
        """
        if placed is None:
            run.post_plain(0, rows, route)
        else:
            run.post_placed(0, len(rows.storage), route)

    def called(self, layer: int) -> None:
        """Notes a call that was answered."""
        self.used_at = time.monotonic()
        self._rounds.called(layer)
        self._calls += 1

    def drop(self) -> None:
        """Ends the pass that runs: its caller waits no longer."""
        self._goes_on = False
        if self._run is not None and self._run.status is None:
            self._run.give_up()

    @property
    def alive(self) -> bool:
        """Whether the rank keeps the lane."""
        return self.lane.alive

    def close(self) -> None:
        """Detaches the lane."""
        self.drop()
        self.lane.close()
