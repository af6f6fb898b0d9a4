"""`Finishing`: from a launched step to its callers' answers, by one of two threads."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from moeserve.runtime.control.stream import Message, StreamClosed
from moeserve.runtime.rank.answers import MOST_RUNS, MOST_UNFINISHED, InOrder
from moeserve.runtime.rank.rank import Rank
from moeserve.runtime.rank.transfers.transfers import InFlight
from moeserve.runtime.step import Header, Job, Phases, Stamp, StepRecord

log = logging.getLogger(__name__)

LARGE_BYTES = 1 << 20
"""The head is told that a step has ended before answers of this size on are given out, or those of a job of
several callers, and else right after the first: to tell it takes longer than to give out a small one.
"""

Parts = Sequence[tuple[int, "Job | None"]]
"""Rows and job of each caller in a step, in its order; None for a job that is gone."""


@dataclass(frozen=True, eq=False)
class Launched:
    """A step that was launched; its answers are on their way to the host."""

    header: Header
    generation: int
    stamp: Stamp
    parts: Parts
    callers: int  # whose rows the jobs have
    flight: InFlight
    phases: Phases
    started: float  # time.monotonic() seconds
    lasted: float  # seconds of the launch


class Finishing:
    """Finishes steps in the order in which they were launched: waits for the device, looks who was late, and
    answers the callers.

    A thread of its own does so (`put`), or the one that launches, which keeps a step and looks whether it has
    ended between two others (`keep`, `finish_ended`). All but `beside` is called by the latter. Acts behind
    short runs, which overtake others on the device, have one more thread (`after`).
    """

    def __init__(
        self, rank: Rank, send: Callable[[Message], None], observe: Callable[[StepRecord], None]
    ) -> None:
        self.failed: Callable[[Message, Exception], None] = _nobody_hears  # of a step without an answer
        self._rank, self._send, self._observe = rank, send, observe
        self._in_order, self._short = InOrder("answers"), InOrder("short-runs")
        self._kept = deque[Launched]()
        self._broken = 0  # the generation in which a step failed: it gives out no further answer
        self._untold = False  # whether it was said that the device's timestamps cannot be read

    def within(self, seconds: float) -> None:
        """What was launched has to end within so many seconds."""
        self._in_order.seconds = self._short.seconds = seconds

    @property
    def idle(self) -> bool:
        """Whether nothing is left to finish."""
        return not self._kept and self._in_order.idle

    def full(self, most: int = MOST_UNFINISHED) -> bool:
        """Whether `put` keeps its caller waiting, or `after`, of MOST_RUNS."""
        return len(self._kept) + self._in_order.unfinished >= most

    @property
    def keeps(self) -> bool:
        """Whether steps are left to `finish_ended`."""
        return bool(self._kept)

    def put(self, launched: Launched) -> None:
        """Has the step finished after those before it. Raises TimeoutError where they do not end."""
        try:
            self.hand_over()
            self._in_order.put(lambda: self.finish(launched))
        except BaseException:
            self.let_go(launched.flight)
            raise

    def keep(self, launched: Launched) -> bool:
        """Leaves a step to `finish_ended`, unless another thread has steps to finish, or many are left."""
        if not self._in_order.idle or len(self._kept) >= MOST_UNFINISHED:
            return False
        self._kept.append(launched)
        return True

    def finish_ended(self) -> bool:
        """Finishes the oldest step that is kept, where it has ended. Whether it did."""
        if not self._kept or not _over(self._kept[0].flight):
            return False
        launched = self._kept.popleft()
        try:
            self.finish(launched)
        except Exception:  # as in the thread of answers: it concerns no other step
            log.exception("step %d could not be finished", launched.header.number)
        return True

    def after(self, act: Callable[[], None], *, short: bool = False) -> None:
        """Has `act` done after all that was launched, of which it waits for no more than are more than
        MOST_RUNS. Raises TimeoutError where they do not end. short: after all acts that were, alone.
        """
        if short:
            self._short.put(act, MOST_RUNS)
            return
        self.hand_over()
        self._in_order.put(act, MOST_RUNS)

    def room(self, *, short: bool) -> bool:
        """Whether `after` waits for nothing."""
        return self._short.unfinished < MOST_RUNS if short else not self.full(MOST_RUNS)

    def beside(self, act: Callable[[], None]) -> None:
        """Has a small `act` done soon, from any thread; it waits for no step."""
        self._in_order.beside(act)

    def let_go(self, flight: InFlight) -> None:
        """Has what a step without an answer used be given back, once its copies have ended."""

        def end() -> None:
            flight.event.synchronize()
            flight.release()

        self.beside(end)

    def drain(self) -> None:
        """Waits until every launched step has ended, and its callers have their answers.

        Raises TimeoutError when that takes too long.
        """
        self.hand_over()
        self._in_order.drain()
        self._short.drain()

    def close(self) -> None:
        """Finishes what was launched, and nothing any more."""
        try:
            self.drain()
        except TimeoutError as late:
            log.error("the rank stops: %s", late)
        self._in_order.close()
        self._short.close()

    def hand_over(self) -> None:
        """What is kept is finished by the other thread, as this one may be away for long."""
        while self._kept:
            launched = self._kept.popleft()
            self._in_order.beside(lambda one=launched: self.finish(one))  # type: ignore[misc]

    def finish(self, launched: Launched) -> None:
        """Waits for a step's answer and gives it to the callers, unless it is no good."""
        header, generation = launched.header, launched.generation
        try:
            launched.flight.event.synchronize()
            ended = time.monotonic()
            late = self._rank.late(header.layer)
            if generation == self._broken:
                raise RuntimeError(f"step {header.number} has no answer, since one before it failed")
        except Exception as error:
            self._broken = generation
            self._fail(generation, error)
            return
        finally:
            launched.flight.release()
        self._rank.progress.end(header.number)
        # a large answer may be copied by this thread: the next step's header need not wait for it
        first = launched.callers > len(launched.parts) or _bytes_to_copy(launched) >= LARGE_BYTES
        told = first and self._done(launched)
        for output, (_, job) in zip(launched.flight.outputs, launched.parts, strict=True):
            if job is not None and output is not None:
                job.finish(output, launched.stamp)
                told = told or self._done(launched)  # the next step's header need not wait for all answers
        if not told:
            self._done(launched)
        self._note(launched, late, ended)

    def _done(self, launched: Launched) -> bool:
        """Tells the coordinator that the step has ended here."""
        try:
            number = launched.header.number
            self._send({"kind": "done", "generation": launched.generation, "step": number})
        except StreamClosed as closed:
            log.info("nobody is told of steps any more: %s", closed)
        except Exception:  # its callers are told all the same
            log.exception("the head could not be told that step %d has ended", launched.header.number)
        return True

    def _fail(self, generation: int, error: Exception) -> None:
        try:
            self.failed({"kind": "step", "generation": generation}, error)
        except StreamClosed as closed:
            log.info("nobody is told of a failed step any more: %s", closed)

    def _note(self, launched: Launched, late: tuple[int, ...], ended: float) -> None:
        """Tells of a step that was answered, and `ended` at a time of the monotonic clock."""
        header, phases, parts = launched.header, launched.phases, launched.parts
        began, reply = launched.started, time.monotonic() - ended
        if phases.on_device is not None:  # the host began to launch it while others were computed
            phases = self._measured(phases)
            if phases.timed:
                began = max(began, ended - phases.dispatch - phases.compute - phases.combine)
        wait = max((began - job.created for _, job in parts if job is not None), default=0.0)
        rows = sum(size for size, _ in parts)
        self._observe(
            StepRecord(
                header.number,
                header.layer,
                launched.callers,
                rows,
                wait,
                phases,
                late,
                launched.lasted,
                reply,
            )
        )

    def _measured(self, phases: Phases) -> Phases:
        """The phases by the device's clock; not timed where it cannot be read, which is logged once."""
        try:
            return phases.measured()
        except RuntimeError as error:
            if not self._untold:
                self._untold = True
                log.warning("the device's timestamps cannot be read, phases are not shown: %s", error)
            return replace(phases, timed=False, on_device=None)


def _over(flight: InFlight) -> bool:
    """Whether a step's answers are there, or never will be: who finishes it is told."""
    try:
        return flight.event.query()
    except RuntimeError:
        return True


def _bytes_to_copy(launched: Launched) -> int:
    """Bytes of a step's answers that do not lie where their callers want them yet."""
    answers = zip(launched.flight.outputs, launched.parts, strict=True)
    return sum(
        output.nbytes for output, (_, job) in answers if output is not None and not _placed(job, output)
    )


def _placed(job: Job | None, output: Tensor) -> bool:
    """Whether who replies has nothing to copy. Of a call's part nobody knows where the others lie."""
    lent = None if job is None else job.lent
    if output.is_meta:
        return True
    if lent is None or lent.home is None or not lent.whole:
        return False
    return output.data_ptr() == lent.home.data_ptr()


def _nobody_hears(entry: Message, error: Exception) -> None:
    """Logs a failure that nobody takes."""
    log.error("a step of generation %s failed", entry["generation"], exc_info=error)
