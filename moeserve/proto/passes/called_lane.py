"""`CalledLane`: a device lane over which single calls go, and `Rounds`, by which its passes are foreseen."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TypeVar

from moeserve.proto.client.patience import Clock
from moeserve.proto.errors import DeadlineExceeded, InvalidArgument, MoeError, Overloaded, Unavailable
from moeserve.proto.passes.answers import SMALLEST_BYTES
from moeserve.proto.passes.attached import AttachedLane, Wanted
from moeserve.proto.passes.buffers import AnswerBuffers
from moeserve.proto.passes.mailbox import MOST_LAYERS
from moeserve.proto.passes.running import Columns, Pass, PassLate, cut_of
from moeserve.proto.tensors import Plain

T = TypeVar("T")

log = logging.getLogger(__name__)

FEWEST_ROWS = 16
"""Of a lane's step, as it is attached for calls of fewer."""

TRIES = 2
"""Passes in which a call is tried: its caller may have rested for too long in the first."""

AGREEING_ROUNDS, MOST_AGREEING, FEWEST_CALLS = 2, 16, 8
"""Rounds over the same layers, and calls in them, after which a standing pass is begun; twice as many rounds
after each pass that ended before it had gone round.
"""

REST_SECONDS, RESTLESS_CALLS, LONG_STEPS = 0.005, 8, 16
"""From an answer to the next call, which counts as a rest; calls in a row without one, after which short
rounds are so many steps of one pass: what goes round is launched, and in a group agreed upon, at once. Only
between two times of all its steps may a pass's caller rest for long.
"""


LEAVE_SECONDS = 0.25
"""For a pass that is left to end, before another begins; a call goes another way after it, unless its answer
is to lie where that pass may still write one.
"""


class Rounds:
    """Over which layers one caller's calls go round."""

    def __init__(self) -> None:
        self._seen: deque[int] = deque(maxlen=2 * MOST_LAYERS)
        self._agreeing = AGREEING_ROUNDS
        self._restless = 0  # calls in a row that came soon after the answer before
        self._answered = -math.inf

    def called(self, layer: int, at: float = -math.inf, answered: float = -math.inf) -> None:
        """Notes a call that was made, and answered, at these times of the monotonic clock."""
        self._restless = self._restless + 1 if at - self._answered < REST_SECONDS else 0
        self._answered = answered
        self._seen.append(layer)

    def held(self, calls: int, layers: int) -> None:
        """A standing pass over so many layers has ended after so many calls."""
        kept = calls > layers
        self._agreeing = AGREEING_ROUNDS if kept else min(MOST_AGREEING, 2 * self._agreeing)

    def of(self, layer: int) -> tuple[int, ...]:
        """The layers of the round that a call of `layer` begins; () where the last calls were no rounds. More
        than once where the round is short, and its caller does not rest.
        """
        seen = list(self._seen)
        with suppress(ValueError):
            length = seen[::-1].index(layer) + 1
            needed = max(self._agreeing * length, FEWEST_CALLS)
            if length <= MOST_LAYERS and len(seen) >= needed:
                last, found = seen[-needed:], tuple(seen[-length:])
                if all(one == found[(at - needed) % length] for at, one in enumerate(last)):
                    return found * (-(-LONG_STEPS // length) if self._restless >= RESTLESS_CALLS else 1)
        return ()

    def longer(self, layers: int) -> bool:
        """Whether a pass over so many layers would be one over more if it began now."""
        return layers < LONG_STEPS and self._restless >= RESTLESS_CALLS


def divided(rows: int, most: int) -> list[tuple[int, int]]:
    """Where a call's rows begin and end that are a step each, of so many at most. The steps are about alike,
    as those that are launched together are, and the first has the most.
    """
    if rows <= most:
        return [(0, rows)]
    steps = -(-rows // most)
    each = -(-rows // steps)
    return [(at, min(at + each, rows)) for at in range(0, rows, each)]


def power_of_two(count: int) -> int:
    """That is as many, or more."""
    return 1 << (count - 1).bit_length()


def room_for(rows: int, most: int) -> int:
    """The rows of a lane that is attached for a call of so many, and takes `most` at most."""
    return min(most, max(FEWEST_ROWS, power_of_two(rows)))


def no_answer(layer: int, clock: Clock) -> DeadlineExceeded:
    """The error of a call whose time is over, whatever it waited for last."""
    text = f"layer {layer}: no answer within {clock.patience.seconds:g} s"
    return DeadlineExceeded("DEADLINE_EXCEEDED", "deadline", text)


class CalledLane:
    """A lane that is attached, and the pass that runs on it. One thread at a time uses it."""

    def __init__(self, lane: AttachedLane, rounds: Rounds | None = None, *, placed: bool = False) -> None:
        """rounds: of its caller's calls that went another way before, and may again. placed: its memory is
        handed out, and calls fill and read it there.
        """
        self.lane, self.placed = lane, placed
        self.user = threading.get_ident()  # who called last
        self.used_at = time.monotonic()
        self._turn = threading.RLock()  # a thread that was interrupted as it took it has it again
        self._busy = False  # a call of the thread that has the turn is under way
        self._buffers = AnswerBuffers(lane.memory)
        self._stays = False  # the answer of what was posted, in its buffer
        self._rounds = Rounds() if rounds is None else rounds
        self._run: Pass | None = None
        self._goes_on = False  # it has further steps
        self._calls, self._demanded = 0, 0

    @classmethod
    def attach(cls, address: str, wanted: Sequence[Wanted]) -> CalledLane:
        """A lane as the first of these that a rank has memory for. Raises as `AttachedLane.attach`."""
        for at, one in enumerate(wanted[:-1]):
            if one in wanted[at + 1 :]:
                continue
            try:
                return cls(AttachedLane.attach(address, one))
            except InvalidArgument:
                pass
            except Overloaded as refused:
                if refused.reason != "region_limit":
                    raise
        return cls(AttachedLane.attach(address, wanted[-1]))

    @contextmanager
    def taken(self, clock: Clock) -> Iterator[None]:
        """For a call over rows that were placed here, one at a time. Raises DeadlineExceeded where others
        have it for as long as the call has time, and RuntimeError in a signal's handler in such a call.
        """
        taken = False
        try:
            if not (taken := self._turn.acquire(timeout=clock.remaining)):
                text = f"other calls over the same placed rows took {clock.patience.seconds:g} s"
                raise DeadlineExceeded("DEADLINE_EXCEEDED", "deadline", text)
            if self._busy:
                raise RuntimeError("a signal's handler calls over the rows of the call that it interrupts")
            try:
                self._busy = True
                yield
            finally:
                self._busy = False
        finally:
            if taken:
                self._turn.release()

    def fits(self, rows: Plain, rank: int | None) -> bool:
        """Whether such rows may go over it; rank: whose lane it has to be, None for any."""
        wanted = self.lane.wanted
        there = rows.dtype.name == wanted.dtype and len(rows.storage) <= wanted.rows * wanted.stages
        return there and rank == wanted.rank

    def asked(
        self,
        layer: int,
        columns: Columns,
        version: int,
        clock: Clock,
        take: Callable[[Pass], T],
        *,
        stays: bool = False,
    ) -> tuple[Pass, T] | None:
        """What `take` has of the pass in which a call's rows were answered; None where the lane gives no
        answer. Then its pass runs on: `drop` it, or `rest`. The arguments are those of `post`. Raises
        DeadlineExceeded where the call's time is over, and what else `take` does that is no MoeError.
        """
        began = time.monotonic()
        for _ in range(TRIES):
            try:
                run = self.post(layer, columns, version, clock, stays=stays)
                found = take(run)
            except MoeError as failed:
                if isinstance(failed, DeadlineExceeded) and not clock.remaining:
                    raise no_answer(layer, clock) from failed
                log.debug("a lane gives no answer: %s", failed)
                if not isinstance(failed, PassLate):  # its caller was late, and may begin another pass
                    return None
                self.drop()
                continue
            self.called(layer, began)
            return run, found
        return None

    def post(self, layer: int, columns: Columns, version: int, clock: Clock, *, stays: bool = False) -> Pass:
        """Brings a call's rows to steps of as many stages as they need, of a pass with weights of this
        version, 0 for any: the first are under way while the others are copied. Raises as `run_of` does.

        stays: the answer may be handed out where it lies, in memory of the lane.
        """
        parts = divided(len(columns[0].storage), self.lane.wanted.rows)
        run = self.run_of(layer, version, clock, len(parts))
        self._stays = stays and self._may_stay(columns[0], parts)
        buffer = 0 if self.placed else self._buffers.next
        for stage, (start, stop) in enumerate(parts):
            cut = columns if len(parts) == 1 else cut_of(columns, start, stop)
            run.post_columns(stage, stop - start, cut, placed=self.placed, buffer=buffer)
        return run

    def _may_stay(self, rows: Plain, parts: list[tuple[int, int]]) -> bool:
        """Whether an answer to such rows may be held in its buffer: a copy is not worth less than that, there
        is another buffer for the next, and its parts lie one behind the other.
        """
        layout = self.lane.layout
        dense = len(parts) == 1 or (
            all(stop - start == layout.rows for start, stop in parts[:-1])
            and layout.answer(1) - layout.answer(0) == layout.hidden_spec(layout.rows).nbytes
        )
        return dense and self._buffers.spare and rows.spec.nbytes >= SMALLEST_BYTES

    def take(self, run: Pass, like: Plain, place: Callable[[], Plain], clock: Clock) -> Plain:
        """The answer to what was posted, which is like `like`: in the lane's memory where it may stay there,
        else copied to `place()` as it comes, unless that is where it lies. Raises MoeError.
        """
        parts = divided(len(like.storage), self.lane.wanted.rows)
        if self._stays:
            for stage in range(len(parts)):
                run.arrived(stage, clock.remaining)
            return self._buffers.hand_out(like)
        into = place()
        for stage, (start, stop) in enumerate(parts):
            run.take_into(stage, into.rows(start, stop), clock.remaining)
        return into

    def run_of(self, layer: int, version: int, clock: Clock, stages: int = 1) -> Pass:
        """The pass whose next steps are of this layer at so many stages, with weights of this version, 0 for
        any. Raises MoeError; DeadlineExceeded where the one before it does not end.
        """
        run, longer = self._run, False
        if run is not None and self._goes_on and run.status is None:
            length = len(run.layers)
            wanted = (run.layer(0), run.stages, self._demanded) == (layer, stages, version)
            longer = wanted and self._calls % length == 0 and self._rounds.longer(length)
            if wanted and not longer:
                return run
        if run is not None:
            if self._goes_on and not longer:  # else it goes on, as one of more steps
                self._rounds.held(self._calls, len(run.layers))
            run.leave(self._within(clock))
        layers = self._rounds.of(layer)
        self._goes_on, self._calls, self._demanded = bool(layers), 0, version
        run = self._run = self.lane.begin(
            layers or (layer,),
            stages=stages,
            standing=self._goes_on,
            any_weights=True,
            weights_version=version,
            timeout=self._within(clock),
        )
        return run

    def _within(self, clock: Clock) -> float:
        """Seconds for a pass that was left to end."""
        return clock.remaining if self.placed else min(clock.remaining, LEAVE_SECONDS)

    def called(self, layer: int, at: float) -> None:
        """Notes a call that was made at this time, and is answered."""
        self.used_at = time.monotonic()
        self._rounds.called(layer, at, self.used_at)
        self._calls += 1

    def drop(self) -> None:
        """Ends the pass that runs: its caller waits no longer."""
        self._goes_on = False
        if self._run is not None and self._run.status is None:
            self._run.give_up()

    def rest(self, layer: int, clock: Clock) -> None:
        """Ends the pass that runs, and waits until the rank writes no answer of it any more. Raises
        DeadlineExceeded of a call of this layer.
        """
        self._goes_on = False
        if self._run is None:
            return
        try:
            self._run.leave(clock.remaining)
        except Unavailable:
            pass  # the rank is gone
        except DeadlineExceeded as late:
            raise no_answer(layer, clock) from late

    @property
    def alive(self) -> bool:
        """Whether the rank keeps the lane."""
        return self.lane.alive

    def end(self) -> None:
        """Ends a call that another thread waits for; that thread closes the lane."""
        self.lane.memory.end()

    def close(self, seconds: float) -> None:
        """Detaches the lane, for whose rank's answer it waits so long."""
        self.drop()
        self.lane.close(seconds)
