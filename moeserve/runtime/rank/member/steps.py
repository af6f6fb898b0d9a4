"""`MemberSteps`: a member's steps, from the header of each to its callers' answers, and their counts."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch

from moeserve.runtime.control.stream import Message
from moeserve.runtime.epoch import Epoch
from moeserve.runtime.errors import GroupUnavailable, WrongVersion
from moeserve.runtime.rank.answers import on_host
from moeserve.runtime.rank.lanes.lane import Lane
from moeserve.runtime.rank.measured import RowsReading, since
from moeserve.runtime.rank.member.finishing import Finishing, Launched, Parts
from moeserve.runtime.rank.member.reports import Counted, Reports
from moeserve.runtime.rank.rank import Rank
from moeserve.runtime.rank.transfers.transfers import ASIDE_BYTES, InFlight
from moeserve.runtime.step import (
    Header,
    Job,
    LaneInput,
    Lent,
    Phases,
    Stamp,
    StepRecord,
    Upload,
    empty_input,
)

APART_STEPS = 8
"""Steps in a row that each came when the one before it was over: then the next one's caller is likely alone.
"""

REPORT_SECONDS = 1.0  # between reports of load to the coordinator

ATTENDED_SECONDS = 0.005
"""After a job of several callers was launched, or a step of one of their GPUs in its turn: for so long the
thread of the steps looks after lanes, too.
"""


class MemberSteps:
    """Runs steps of `rank` on the jobs of `lane`, None where it has none.

    The thread of the steps launches them and waits for no answer. Another one finishes them in their order
    (`Finishing`). To wake it takes as long as many a step, so the thread of the steps answers a single caller
    itself: on a CPU, where nothing is left to wait for, and on a device while no step comes before the one
    before it is over. And those of jobs of several callers, between two others: two threads that have much to
    do for each of many callers take the interpreter from each other, at several times what they do.
    """

    def __init__(
        self,
        rank: Rank,
        lane: Lane | None,
        send: Callable[[Message], None],
        observe: Callable[[StepRecord], None],
    ) -> None:
        self._rank, self._lane, self._observe = rank, lane, observe
        self.steps = self.expert_rows = 0  # since the start
        self.on_others: Callable[[], None] = _nothing  # other lanes bring rows to what is launched now
        self._counting = threading.Lock()  # two threads finish
        self.attends = False  # the thread of the steps calls `finish_ended`, while `attended`
        self.away: Callable[[], None] = _nothing  # that thread is about to wait for steps to end
        self.another: Callable[[], bool] = _always  # whether an entry waits for the thread of the steps
        self._apart = 0  # steps in a row that came when the one before was over
        self._attended_until = -math.inf
        # by layer, as the device has counted: rows of experts, and rows that were taken
        self.observe_rows: Callable[[int, int, int], None] = _nobody_counts
        self.observe_ran: Callable[[int, int], None] = _nobody_counts  # by layer, of runs of passes
        self._computed, self._brought = list[int](), list[int]()  # as last read
        self._finishing = Finishing(rank, send, self._count)
        self._reports = Reports(send)
        # generation, steps and rows of experts of the last report
        self._reported: tuple[int | None, int, int] = None, 0, 0
        self._reported_at = 0.0
        if lane is not None:
            lane.retire = self._retire

    def run(self, header: Header, generation: int, epoch: Epoch | None) -> None:
        """Launches one step; its callers are answered later. Raises RuntimeError for a header of another
        epoch, and TimeoutError where the steps before it do not end.
        """
        started = time.monotonic()
        if sum(header.lane_rows) > sum(rows for _, rows in header.jobs):
            self.on_others()
        self._apart = self._apart + 1 if self._finishing.idle else 0
        version = self._version(header, epoch)
        parts = self._taken(header, version)
        flight, phases = self._launch(header, parts)
        stamp, lasted = Stamp(header.epoch, version), time.monotonic() - started
        callers = sum(1 if job is None else job.callers for _, job in parts)
        launched = Launched(header, generation, stamp, parts, callers, flight, phases, started, lasted)
        if self._answers_itself(launched):
            self._finishing.finish(launched)
            if self._rank.device != "cpu" and self.another():
                self._apart = 0  # it came while this thread waited for the device
        elif not (self._keeps(launched) and self._finishing.keep(launched)):
            if self._finishing.full():
                self.away()
            self._finishing.put(launched)
        self.report_if_due(generation)

    def _keeps(self, launched: Launched) -> bool:
        """Whether the thread of the steps is to finish this one between others: there is nothing but jobs of
        several callers in it, or nothing of this member at all, and such jobs flow.
        """
        if not self.attends or self._rank.device == "cpu":
            return False
        jobs = [job for _, job in launched.parts if job is not None]
        if any(job.several is None for job in jobs):
            return False
        now = time.monotonic()
        if launched.callers > len(launched.parts):
            self._attended_until = now + ATTENDED_SECONDS
        return now < self._attended_until

    @property
    def attended(self) -> bool:
        """Whether jobs of several callers flow, or steps of their GPUs, and lanes are to be looked after."""
        return time.monotonic() < self._attended_until

    def attend(self) -> None:
        """The thread of the steps looks after lanes for a while: steps of several callers' GPUs flow."""
        if self.attends:
            self._attended_until = time.monotonic() + ATTENDED_SECONDS

    def hand_over(self) -> None:
        """Leaves what was kept for `finish_ended` to the thread of answers."""
        self._finishing.hand_over()

    def finish_ended(self) -> bool:
        """Answers the callers of the oldest step that was left for that, if it has ended; whether it has."""
        return self._finishing.finish_ended()

    @property
    def failed(self) -> Callable[[Message, Exception], None]:
        """Is told of a step that gave no answer."""
        return self._finishing.failed

    @failed.setter
    def failed(self, told: Callable[[Message, Exception], None]) -> None:
        self._finishing.failed = told

    def _count(self, record: StepRecord) -> None:
        """Counts a step that was answered."""
        with self._counting:
            self.steps += 1
        if (rows := record.phases.expert_rows) > 0:  # of a device another thread adds them
            self.expert_rows += rows
        self._observe(record)

    def _answers_itself(self, launched: Launched) -> bool:
        """Whether the thread of the steps finishes this one: nobody else's step waits for it meanwhile."""
        if len(launched.parts) > 1 or not self._finishing.idle:
            return False
        if self._rank.device == "cpu":
            return True
        callers = 0 if self._lane is None else max(self._lane.in_flight, launched.callers)
        return self._apart >= APART_STEPS and callers <= 1 and not self.another()

    def _taken(self, header: Header, version: int) -> Parts:
        """The header's jobs, without those that are gone or demand other weights."""
        if self._lane is None:
            return []
        parts: list[tuple[int, Job | None]] = []
        for (_, rows), job in zip(header.jobs, self._lane.take(header.jobs), strict=True):
            wanted = self._routed(wanted_in(job, version), version)
            if job is not None and wanted is None and job.upload is not None:
                self._retire(job.upload)
            parts.append((rows, wanted))
        return parts

    def _routed(self, job: Job | None, version: int) -> Job | None:
        """The job with experts that the correction bias of these weights has chosen, where any has: its layer
        may have been reloaded since. None where it has failed.
        """
        if job is None or job.routed is None:
            return job
        try:
            self._rank.experts.reroute(job, version)
        except (OSError, ValueError) as error:
            why = (
                f"layer {job.layer} was reloaded while this call waited, and its bias cannot be read: {error}"
            )
            job.fail(GroupUnavailable(why))
            return None
        return job

    def _launch(self, header: Header, parts: Parts) -> tuple[InFlight, Phases]:
        """Gathers the rows, launches the step, and has the answer brought home."""
        rank = self._rank
        transfers = None if self._lane is None else self._lane.transfers
        if transfers is None:
            return self._computed_here(header, parts)
        flight: InFlight | None = None
        try:
            room = rank.room(header.layer, header.lane_rows)
            kept = transfers.gather(room, parts)
            rows = room.first(sum(size for size, _ in parts))
            lent = rows.hidden.nbytes < ASIDE_BYTES
            answer, phases = rank.step(header.layer, rows, header.lane_rows, header.number, lent=lent)
            flight = transfers.fetch(answer, parts, kept, busy=not self._finishing.idle)
            rank.count()
        except BaseException:
            self._finishing.let_go(transfers.abandoned(parts) if flight is None else flight)
            raise
        return flight, phases

    def _computed_here(self, header: Header, parts: Parts) -> tuple[InFlight, Phases]:
        """Runs the step on the host, whose answer is there then."""
        rank, served = self._rank, self._rank.served
        problem, threads = rank.plans[header.layer].problem, rank.host_threads
        with nullcontext() if threads is None else threads.computing(problem, header.lane_rows):
            empty = empty_input(served.checkpoint.hidden, problem.top_k, served.dtype)
            rows = LaneInput.gather(header, [job for _, job in parts], empty)
            taken = _in_place(parts, served.dtype)
            try:
                place = None if taken is None else taken.home
                answer, phases = rank.step(header.layer, rows, header.lane_rows, header.number, place=place)
            finally:
                if taken is not None:
                    taken.memory.done()
        return InFlight.there(on_host(answer), parts), phases

    def _retire(self, upload: Upload) -> None:
        """Lets go of rows that were uploaded for no step, once their copy has ended."""

        def retire() -> None:
            upload.event.synchronize()
            upload.release()

        self._finishing.beside(retire)

    def report_if_due(self, generation: int | None) -> None:
        """Does `report`, unless it was done lately."""
        if time.monotonic() - self._reported_at > REPORT_SECONDS:
            self.report(generation)

    def ran(self, layers: Sequence[int]) -> None:
        """Counts steps that were launched by others on this member's device, by the layer of each. By any
        thread that finishes.
        """
        with self._counting:
            self.steps += len(layers)
        for layer, steps in Counter(layers).items():
            self.observe_ran(layer, steps)

    def finish_within(self, seconds: float) -> None:
        """Launched steps have to end within so many seconds; who waits for them is told by TimeoutError."""
        self._finishing.within(seconds)

    def after(self, act: Callable[[], None], *, short: bool = False) -> None:
        """Has `act` done after all that was launched; short: after all acts that were. Raises TimeoutError
        where that does not end.
        """
        if not self.room(short=short):
            self.away()
        self._finishing.after(act, short=short)

    def room(self, *, short: bool = False) -> bool:
        """Whether `after` waits for nothing."""
        return self._finishing.room(short=short)

    def drain(self) -> None:
        """Waits until every launched step has ended, and its callers have their answers.

        Raises TimeoutError when that takes too long.
        """
        self._finishing.drain()

    def report(self, generation: int | None) -> None:
        """Has what was counted reported, when it changed, and in each generation: its head may be another.
        None: no generation is live, and nothing is.
        """
        # a device's rows are read behind the report of their steps
        counted = generation, self.steps, self.expert_rows
        if counted == self._reported or generation is None:
            return
        self._reported, self._reported_at = counted, time.monotonic()
        if (computed := self._rank.rows_computed()) is not None:
            self._finishing.beside(lambda: self._take_rows(computed))
        if (meter := self._rank.meter) is not None:
            load = meter.snapshot(time.monotonic())
            self._reports.put(Counted(generation, self.steps, self.expert_rows, load))

    def _take_rows(self, computed: RowsReading) -> None:
        """Notes the rows that the device has counted."""
        now, taken = computed.read(), computed.taken()
        grown, self._computed = since(now, self._computed), now
        more, self._brought = since(taken, self._brought), taken
        for layer, rows, tokens in zip(self._rank.served.layers, grown, more, strict=True):
            self.expert_rows += rows
            self.observe_rows(layer, rows, tokens)

    def close(self) -> None:
        """Finishes what was launched, and reports nothing any more."""
        self._finishing.close()
        self._reports.close()

    def _version(self, header: Header, epoch: Epoch | None) -> int:
        """The version of the weights that the step's layer is at here."""
        if epoch is None or epoch.number != header.epoch:
            found = "none" if epoch is None else str(epoch.number)
            raise RuntimeError(f"step {header.number} is of epoch {header.epoch}; this rank holds {found}")
        return epoch.version(self._rank.served.layers.index(header.layer))


def _in_place(parts: Parts, dtype: torch.dtype) -> Lent | None:
    """The memory of a step's only caller, where the step may write the answer; `done` has to follow."""
    if len(parts) != 1:
        return None
    _, job = parts[0]
    lent = None if job is None else job.lent
    if lent is None or lent.home is None or lent.home.dtype != dtype or not lent.memory.use():
        return None
    return lent


def wanted_in(job: Job | None, version: int) -> Job | None:
    """The job, unless it demands other weights: then it fails, and its rows travel without experts."""
    if job is None or job.weights_version in (0, version):
        return job
    job.fail(
        WrongVersion(
            f"layer {job.layer} is served with weights version {version}, and {job.weights_version} is "
            "demanded; begin the pass again with the served one"
        )
    )
    return None


def _nothing() -> None:
    """Nobody does what the thread of the steps would do."""


def _always() -> bool:
    """Says that more is to be done, where nobody knows."""
    return True


def _nobody_counts(layer: int, many: int, taken: int = 0) -> None:
    """Does nothing with rows that were counted on the device, or with steps of runs."""
