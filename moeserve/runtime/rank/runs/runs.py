"""`PassRuns`: several steps of a pass, launched at once. Each waits on the device for its rows.

A run is recorded as one CUDA graph, so that a model's whole forward pass is one launch: a device takes about
a thousand launches at once, and whoever brings one more waits for the rows of the first. Graphs know no lane:
the state of the lane whose run it is, with the addresses of its memory, is copied to one place before, of the
track that the run is on.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from moeserve.device.streams import SPARED, sparing
from moeserve.dispatch.dispatcher import Living
from moeserve.dispatch.mail.kernels import MISFIT, OwnerKernels, Words, load, words
from moeserve.dispatch.mail.layout import STEPS, WORDS, MailLayout, Word
from moeserve.dispatch.peers.wires import RowRecord
from moeserve.experts.batch import Tally
from moeserve.quant.formats import FP8_GROUP
from moeserve.runtime.planning.passes import may_be_rounded
from moeserve.runtime.rank.memory import RunsHeld
from moeserve.runtime.rank.rank import Rank
from moeserve.runtime.rank.runs.run_graphs import RunGraphs, RunLanes
from moeserve.runtime.rank.runs.tracks import RunTrack, Tracks

READY_COPIES = 6
"""Of a lane's state, pinned, made with the lane: to pin memory may wait for what waits on the device."""

MOST_TOLD = 8
"""Runs that were launched and not read, above which the device is asked whether the oldest has ended."""

FEW_STEPS = 2
"""Of a run that is not recorded: it is launched kernel by kernel, and the steps behind these are left."""


@dataclass(eq=False)
class OwnerLane:
    """An owner's end of a caller's lane: where both have their memory, and how far its pass is.

    addresses: of the owner's memory and of the caller's, as this process has them mapped. abort: int32 `[1]`
    in pinned memory; not 0 ends the waits of its kernels. patience: seconds for the rows of a step.
    """

    layout: MailLayout
    addresses: tuple[int, int]
    abort: Tensor
    patience: float
    state: Tensor  # int64 [WORDS], on the device
    free: deque[Tensor] = field(default_factory=deque)  # pinned, int64 [WORDS]
    counted: int = 0  # steps of all stages of the pass, as the last run that was read left them

    def begun(self, number: int, steps: tuple[int, ...] = ()) -> Tensor:
        """The state in which pass `number` begins, pinned. steps: of each stage, that were not runs'."""
        made = self.take_pinned()
        made.zero_()
        made[STEPS : STEPS + len(steps)] = torch.tensor(steps, dtype=torch.int64)
        made[Word.MAILBOX], made[Word.ANSWERS] = self.addresses
        made[Word.NUMBER], made[Word.PATIENCE] = number, int(self.patience * 1e9)
        made[Word.ABORT], made[Word.OWN] = self.abort.data_ptr(), self.state.data_ptr()
        return made

    def take_pinned(self) -> Tensor:
        """Pinned memory for one copy of the state; it is given back to `free` when that is done."""
        return self.free.popleft() if self.free else torch.zeros(WORDS, dtype=torch.int64, pin_memory=True)


class Run(NamedTuple):
    """Steps of a lane's pass, in the order in which they are computed."""

    lane: OwnerLane
    steps: tuple[tuple[int, int], ...]  # layer, and stage
    rows: int  # room for each step's, padded
    kind: int  # CHOICE or LOGITS
    begins: int = 0  # the pass that begins with it; 0: it goes on with one
    again: bool = False  # steps before it were left, since their rows did not fit
    least: int = 0  # rows that its first step must have, where it is launched before they came; 0: any
    before: tuple[int, ...] = ()  # by stage, of the pass that begins: steps that were computed as calls
    short: bool = False  # it is on the track of steps of few rows; alike for all of a lane under way
    beside: bool = False  # runs of the other track come meanwhile: it leaves room for what they have
    flows: bool = False  # steps of other callers' GPUs do


class Told(NamedTuple):
    """How far a run has come."""

    ended: int  # a status, or MISFIT; 0: all its steps were answered
    steps: tuple[int, ...]  # of each stage, since the pass began
    answered: int = 0  # by this run, steps of all stages; none where the pass has ended


@dataclass(eq=False)
class Flight:
    """A run that was launched. `event` passes when it has ended; `read` may be called then, once."""

    event: torch.cuda.Event
    lane: OwnerLane
    begins: bool  # a pass
    pinned: list[Tensor]  # the last one holds the state
    first: int = 0  # steps of all stages before it, where a pass begins

    @property
    def over(self) -> bool:
        """Whether it was read."""
        return not self.pinned

    @property
    def ended(self) -> bool:
        """Whether the device is done with it."""
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def read(self) -> Told:
        """What has become of it. Flights of a lane are read in their order."""
        there, lane = self.pinned[-1].tolist(), self.lane
        lane.free.extend(self.pinned)
        self.pinned = []
        ended, steps = there[Word.ENDED], tuple(there[STEPS : STEPS + lane.layout.stages])
        before, lane.counted = self.first if self.begins else lane.counted, sum(steps)
        return Told(ended, steps, lane.counted - before if ended in (0, MISFIT) else 0)


class _Key(NamedTuple):
    layout: MailLayout
    steps: tuple[tuple[int, int], ...]
    rows: int
    kind: int
    short: bool = False
    beside: bool = False


class _Posts:
    """Queues the posts of a run. What one reads is held until the next is queued, since the kernels between
    them may run beside it: none of these is given memory that it reads.
    """

    def __init__(self, kernels: OwnerKernels) -> None:
        self._kernels = kernels
        self._read: tuple[Tensor, Tally | None] | None = None

    def of(
        self, stage: int, living: Living | None, took: int, *, last: bool
    ) -> Callable[[Tensor, Tally | None], None]:
        """What posts the answer of a step. took: steps of the run up to this one."""

        def post(answer: Tensor, tally: Tally | None) -> None:
            self._kernels.post(stage, answer, tally, living, took=took, early=True, last=last)
            self._read = answer, tally

        return post


def _key(run: Run) -> _Key:
    return _Key(run.lane.layout, run.steps, run.rows, run.kind, run.short, run.beside)


class PassRuns:
    """Launches runs of one rank's lanes; one thread uses it, but for `lane`, `known` and `recorded`.

    Runs follow one another on their track, and the rank's other steps follow all of them, once `join` says
    so. In a group of several owners the others launch the same steps, with the same numbers, as `BlankRuns`
    does; they have one track.
    """

    def __init__(self, rank: Rank, graphs: RunGraphs | None = None, short_rows: int = 0) -> None:
        """short_rows: of steps that have a track of their own; 0, and where the layers' kernels cannot run
        beside others: none has.
        """
        self._rank, self._device = rank, torch.device(rank.device)
        apart = all(plan.kernel.apart for plan in rank.plans.values())
        self._graphs = RunGraphs() if graphs is None else graphs
        self._stamps: dict[OwnerLane, tuple[int, int]] = {}
        self._lanes = Counter[MailLayout]()
        self._told = deque[Flight]()  # with host memory that a kernel is yet to write
        self._lock = threading.Lock()  # for lanes and kernels: lanes are made by other threads
        with torch.cuda.device(self._device):
            load()
            self._words = Words()
            self._tracks = Tracks(self._device, short_rows if apart else 0)
            if may_be_rounded(rank.plans.values()):
                load(RowRecord(FP8_GROUP, rank.served.checkpoint.hidden))

    def __len__(self) -> int:
        return len(self._graphs)

    @property
    def most_steps(self) -> int:
        """Of a run that is recorded; of a longer one the first steps alone are launched."""
        return self._graphs.most_steps

    @property
    def recorded_steps(self) -> int:
        """Of all recorded runs."""
        return self._graphs.steps

    @property
    def held(self) -> RunsHeld:
        """Device memory that is held for runs, by any thread."""
        return RunsHeld(self._graphs.pools, sum(track.rooms.nbytes for track in self._tracks))

    @property
    def short_rows(self) -> int:
        """Of a step of the track of its own, at most; 0: there is none."""
        return self._tracks.short_rows

    def join(self) -> bool:
        """What is launched from here on, and is no run, waits for all runs before, and goes before the next
        one. Whether runs of two tracks wait for each other so. By the thread that launches.
        """
        return self._tracks.join()

    def drop(self) -> None:
        """Drops all graphs: what they recorded is about to change."""
        self._graphs.drop()

    def known(self, run: Run) -> bool:
        """Whether each of its steps has run with as many rows: what they need is loaded. From any thread."""
        key = _key(run)
        return self._graphs.seen(key) or all(
            self._graphs.seen(key._replace(steps=(step,))) for step in dict.fromkeys(run.steps)
        )

    def recorded(self, run: Run) -> bool:
        """Whether it is replayed from its graph. From any thread."""
        return self._graphs.recorded(_key(run))

    def lane(self, layout: MailLayout, addresses: tuple[int, int], patience: float) -> OwnerLane:
        """An owner's end of a lane; see OwnerLane. Its kernels are loaded, which waits for the device."""
        with self._lock:
            for track in self._tracks:
                track.prepare(layout)
        abort = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        made = OwnerLane(layout, addresses, abort, patience, words(self._device))
        made.free.extend([made.take_pinned() for _ in range(READY_COPIES)])
        with self._lock:
            self._lanes[layout] += 1  # last: what could not be made is no lane, and none forgets it
        return made

    @torch.no_grad()
    def launch(self, run: Run, stamp: tuple[int, int], number: int = 0) -> Flight:
        """Queues a run on its track. stamp: the epoch, and the version of all its layers' weights.
        number: of its first step, in a group of several members; 0 in a group of one.

        Raises ValueError where a layer's dispatcher reads a count on the host.
        """
        if (meter := self._rank.meter) is not None:  # before what waits
            meter.tick(time.monotonic(), beside=self._tracks.short is not None)
        track = self._tracks.of(short=run.short)
        self._tracks.begins(track)
        with track.current(), sparing(SPARED if run.beside else 0):
            flight = self._launched(track, run, stamp, number)
        told = self._told
        while told and (told[0].over or (len(told) > MOST_TOLD and told[0].ended)):
            told.popleft()
        told.append(flight)
        return flight

    def _launched(self, track: RunTrack, run: Run, stamp: tuple[int, int], number: int) -> Flight:
        lane, pinned = run.lane, list[Tensor]()
        if run.begins:
            pinned.append(lane.begun(run.begins, run.before))
            lane.state.copy_(pinned[0], non_blocking=True)
        pinned.append(lane.take_pinned())  # now: more of it is had only when nothing waits on the device
        if run.begins or self._stamps.get(lane) != stamp:
            lane.state[Word.EPOCH].fill_(stamp[0])
            lane.state[Word.VERSION].fill_(stamp[1])
            self._stamps[lane] = stamp
        how = {"again": run.again, "holding": not number}  # in a group a run may be launched kernel by kernel
        self._words.begin(lane.state, track.now, pinned[-1], least=run.least, **how)
        self._work(track, _key(run), number)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(track.stream)
        return Flight(event, lane, bool(run.begins), pinned, sum(run.before))

    def forget(self, lane: OwnerLane) -> None:
        """No run of this lane comes any more, and none is under way: what was recorded for it alone goes."""
        self._stamps.pop(lane, None)
        with self._lock:
            self._lanes[lane.layout] -= 1
            if self._lanes[lane.layout] > 0:
                return
            del self._lanes[lane.layout]
            for track in self._tracks:
                track.forget(lane.layout)
        self._graphs.forget(lambda key: isinstance(key, _Key) and key.layout == lane.layout)
        with self._lock:
            if not self._lanes:
                for track in self._tracks:
                    track.rooms.clear()

    def _work(self, track: RunTrack, key: _Key, number: int) -> None:
        """Queues what computes the run: a graph, where it can be recorded. Else it is launched kernel by
        kernel; in a group of one its first steps, since nobody else waits for the others.
        """
        rank = self._rank

        def recorded() -> None:
            self._steps(track, key, self._lane_rows(key, number).recorded)

        replay = self._graphs.replay_of(key, len(key.steps), recorded, track.number)
        if replay is not None and not number:
            replay()
            return
        lanes = self._lane_rows(key, number)
        if not number:
            self._steps(track, key._replace(steps=key.steps[:FEW_STEPS]), lanes.launched)
            return
        steps = [(layer, key.rows) for layer, _ in key.steps]
        if replay is None:
            self._steps(track, key, lanes.launched, rank.numbers(steps, number))
        else:
            rank.expect(steps, number, lanes.absent)
            replay()

    def _lane_rows(self, key: _Key, number: int) -> RunLanes:
        """Rows of all lanes in the run's steps; number: as of `launch`."""
        members, lane = self._rank.epoch.members, self._rank.member.lane or 0
        if number:
            return RunLanes.of(members, lane, key.rows)
        alone = tuple(key.rows if at == lane else 0 for at in range(members.max_lanes))
        return RunLanes(alone, alone, ())

    def _steps(
        self, track: RunTrack, key: _Key, lane_rows: tuple[int, ...], numbers: Sequence[int] = ()
    ) -> None:
        """numbers: of the steps, where they run at once in a group of several members."""
        rank, kernels = self._rank, track.kernels_of(key.layout)
        before: int | None = None
        other, posts = False, _Posts(kernels)
        numbered = zip(key.steps, numbers or [0] * len(key.steps), strict=True)
        for at, ((layer, stage), number) in enumerate(numbered):
            early = 0 if before in (None, stage) else at  # its rows may be there while the other is posted
            other = bool(early) and not other
            room, given = track.room(key.layout, key.rows, key.kind, other=other)
            kernels.take(stage, layer, given, room.valid, early=early, lone=key.beside)
            post = posts.of(stage, rank.living(layer, key.rows), at + 1, last=at + 1 == len(key.steps))
            rank.record(layer, room, lane_rows, then=post, number=number)
            before = stage
