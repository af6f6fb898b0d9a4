"""Cases of the law of members: steps in groups whose lanes and owners are not the same, absent lanes, numbers
that jump; and the worker that runs them all in one group.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from carried_steps import (
    TERMS,
    Choice,
    Drawn,
    Lanes,
    answer,
    arrived_exactly,
    computed,
    digest,
    draw,
    no_host_waits,
    rounded,
    terms_of,
    worst,
)
from parallel import group
from torch import Tensor

from moeserve.dispatch.backends import DISPATCHERS
from moeserve.dispatch.dispatcher import Dispatched, DispatchEntry, Dispatcher, DispatchSpec
from moeserve.dispatch.members import Member, Members
from moeserve.dispatch.peers import twin
from moeserve.dispatch.peers.sequence import LAST
from moeserve.dispatch.routing import Routing
from moeserve.experts.batch import ExpertBatch
from moeserve.experts.placement import EMPTY, Placement
from moeserve.quant.formats import FORMATS
from moeserve.quant.formats.floats import FLOATS

OURS = ("naive", "allgather_reducescatter", "all2allv", "nvlink_ll", "nvlink_ht")
"""Dispatchers whose lanes and owners may be different members."""

HIDDEN, TOP_K, LANE_ROWS, EXPERTS = 128, 3, 9, 5
STRIDE = 4
ROOMS = (4, 0, 3, 2)
"""Slots that the owners of placement `rooms` have, one after the other; one owner alone has three."""

PATIENCE = 30.0
"""Seconds that members wait for one another."""

ASLEEP = 30.0
"""Seconds in which the steps that do not name a sleeping lane must be over."""


@dataclass(frozen=True)
class Shape:
    """Members of a group, and which lanes ever bring rows."""

    members: Members
    bringing: tuple[int, ...] = ()  # all lanes that are present, where it is ()

    @property
    def lanes(self) -> tuple[int, ...]:
        """Lanes that bring rows in some step, ascending."""
        present = (member.lane for member in self.members.present if member.lane is not None)
        return self.bringing or tuple(sorted(present))

    @property
    def owners(self) -> tuple[int, ...]:
        """Owners' places that are taken, ascending."""
        return tuple(sorted(m.owner for m in self.members.present if m.owner is not None))


def _lanes_beside_one_owner(lanes: int) -> Members:
    """The last lane's member is an owner too, and one more is an owner alone."""
    alone = [Member(at, lane=at) for at in range(lanes - 1)]
    return Members((*alone, Member(lanes - 1, lanes - 1, 0), Member(lanes, owner=1)), lanes, 2)


SHAPES: dict[str, Shape] = {
    "1x3": Shape(Members.split(1, 3)),
    "3x1": Shape(Members.split(3, 1)),
    "2x3": Shape(Members.split(2, 3)),
    "2_of_4_have_lanes": Shape(
        Members((Member(0, 0, 0), Member(1, 1, 1), Member(2, owner=2), Member(3, owner=3)), 2, 4)
    ),
    "2_of_4_bring_rows": Shape(Members.of_ranks(4), (1, 3)),
    # lanes, owners and seats in different orders, most of the room vacant
    "reserved": Shape(
        Members((Member(0, lane=11, owner=4), Member(3, lane=7), Member(9, 1, 2), Member(12, owner=0)), 12, 6)
    ),
    "10_lanes": Shape(_lanes_beside_one_owner(10)),
}
"""Groups of processes of a CPU."""

GPU_SHAPES: dict[str, Shape] = {
    "1x1": Shape(Members.split(1, 1)),
    "both_and_lane": Shape(Members((Member(0, 0, 0), Member(1, lane=1)), 2, 1)),
    "both_and_owner": Shape(Members((Member(0, 0, 0), Member(1, owner=1)), 1, 2)),
    "reserved_pair": Shape(Members((Member(2, lane=9, owner=3), Member(5, lane=4)), 12, 4)),
}
"""Groups of two GPUs."""


def _random(ids: Tensor, lane: int) -> Tensor:
    return ids


def _one_expert(ids: Tensor, lane: int) -> Tensor:
    ids = torch.full_like(ids, EMPTY)
    ids[:, -1] = 1
    return ids


def _holes(ids: Tensor, lane: int) -> Tensor:
    ids = ids.clone()
    ids[:1] = EMPTY
    ids[1:, lane % ids.shape[1]] = EMPTY
    return ids


CHOICES: tuple[Choice, ...] = (_random, _holes, _random, _one_expert)

Rows = Callable[[int, int], int]
"""Which of so many bringing lanes, how many there are -> its rows."""

STEPS: tuple[Rows, ...] = (
    lambda lane, lanes: (5, 3, 9, 2)[lane % 4],
    lambda lane, lanes: 4 if lane == 0 else 0,
    lambda lane, lanes: 7 if lane == 0 else 0,
    lambda lane, lanes: 6 if lane == lanes - 1 else 0,
    lambda lane, lanes: 3,
    lambda lane, lanes: 0,
    lambda lane, lanes: 5 if lane else 0,
    lambda lane, lanes: LANE_ROWS,
    lambda lane, lanes: 2 if lane == lanes // 2 else 0,
    lambda lane, lanes: 0 if lane == lanes // 2 else 1,
)
"""Rows of each step. A lane without rows is absent from it."""

HALF_TURN = 2**31
"""A step that a member is still in and one that another has come to lie less than this apart, so that peer
memory tells the earlier from the later.
"""

JUMPS = (1, 1, 2, 3, None, 1, 2, 2, 1000, 1)
"""From the number of the step before to that of each step, odd and even amounts, steps one at a time; None:
to where the run says.
"""

PAIRS = (1, 1, 2, 3, HALF_TURN - 20_000, 1, 4, 999, None, 5)
"""The same, two steps under way: the numbers of a pair differ in parity, so they lie an odd amount apart."""

RUNS = {"one_at_a_time": JUMPS, "two_under_way": PAIRS}

SEED_TURNS = 3 * LAST - HALF_TURN // 2 + 100_000
"""What is added to the numbers of each further case over one dispatcher."""


def numbers(run: int) -> list[int]:
    """The numbers of a run's steps. The first run jumps to just before the turn of the sequence numbers and
    goes over it step by step; the second jumps over the next turn. No two have the same sequence number:
    a word of a whole turn ago looks like one of now.
    """
    starts = (HALF_TURN + 5000, LAST + HALF_TURN // 2 + 30_000)
    last, turn = starts[run], (LAST - 4, 2 * LAST + 20_001)[run]
    found = []
    for jump in list(RUNS.values())[run]:
        last = turn if jump is None else last + jump
        found.append(last)
    return found


@dataclass(frozen=True)
class MemberCase:
    """Steps of one dispatcher in one group, two runs of them."""

    dispatcher: str
    shape: str
    placement: str  # "full", "rooms" or "sliced"
    wire: str
    dtype: torch.dtype
    device: str = "cpu"
    seed: int = 0
    fault: str | None = None

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        parts = (self.dispatcher, self.shape, self.placement, self.wire, dtype, str(self.seed))
        return "-".join((*parts, self.fault or "true"))

    @property
    def group(self) -> Shape:
        return (SHAPES | GPU_SHAPES)[self.shape]

    @property
    def entry(self) -> DispatchEntry:
        return DISPATCHERS[self.dispatcher]

    @property
    def inputs(self) -> tuple[object, ...]:
        """What is computed, whoever carries it."""
        return self.shape, self.placement, self.wire, self.dtype, self.seed

    @property
    def built_for(self) -> tuple[object, ...]:
        """Cases that are alike in this may share a dispatcher, one after the other."""
        return self.dispatcher, self.shape, self.placement, self.wire, self.dtype, self.device, self.fault

    @property
    def row_align(self) -> int:
        return 1 if self.dtype == torch.float32 else 8

    @property
    def sliced(self) -> bool:
        return self.placement == "sliced"


@dataclass(frozen=True)
class StepSeen:
    """What one member saw of a step that it took part in."""

    worst: float  # largest error of its answer over its bound
    exact: bool  # what arrived is, bit for bit, what was quantized where it came from
    digest: str  # of the answer's bits
    received: int  # (row, slot) pairs
    pairs: int  # valid (row, choice) pairs of all lanes


@dataclass(frozen=True)
class Seen:
    """What one member saw of a case: by run, by step, None where it took no part."""

    runs: tuple[tuple[StepSeen | None, ...], ...]
    late: tuple[int, ...]


def placement_of(case: MemberCase) -> Placement:
    """Experts of a case in the slots of its owners; vacant places have no room."""
    shape = case.group
    if case.sliced:
        return Placement.even(1, EXPERTS, 1)
    room = [0] * shape.members.max_owners
    for at, owner in enumerate(shape.owners):
        some = ROOMS[at] if len(shape.owners) > 1 else STRIDE - 1
        room[owner] = STRIDE if case.placement == "full" else some
    experts = min(EXPERTS, max(TOP_K, sum(room) - 1))  # fewer than slots, so that some have replicas
    slots = np.full((len(room), STRIDE), EMPTY, dtype=np.int32)
    held = 0
    for owner, count in enumerate(room):
        slots[owner, :count] = np.arange(held, held + count) % experts
        held += count
    return Placement(slots.reshape(1, -1), len(room), experts, tuple(room))


@cache
def step_lanes(case: MemberCase, step: int) -> Lanes:
    """Every lane's rows of a step, the same in every process, by lane number; whoever carries them."""
    bringing = case.group.lanes
    rows = [0] * case.group.members.max_lanes
    for at, lane in enumerate(bringing):
        rows[lane] = STEPS[step](at, len(bringing))
    choose = CHOICES[(step + case.seed) % len(CHOICES)]
    seed = 1000 * case.seed + step
    return draw(placement_of(case), Drawn(tuple(rows), choose, TOP_K, HIDDEN, case.dtype, seed), case.device)


def spec_of(case: MemberCase, seat: int) -> DispatchSpec:
    """What the dispatcher of the member in `seat` is built for."""
    placement, members = placement_of(case), case.group.members
    owner = members.at(seat).owner
    return DispatchSpec(
        members=members,
        seat=seat,
        slots=placement.slots_per_owner,
        hidden=HIDDEN,
        top_k=TOP_K,
        lane_rows=LANE_ROWS,
        dtype=case.dtype,
        wire=FORMATS[case.wire],
        sliced=case.sliced,
        row_align=case.row_align,
        device=case.device,
        patience=2.0 if case.fault else PATIENCE,
        held=None if owner is None or case.sliced else placement.room[owner],
    )


def _slices(case: MemberCase) -> dict[int, range]:
    """The terms of an expert's sum that each owner computes."""
    owners = case.group.owners
    if not case.sliced:
        return dict.fromkeys(owners, range(TERMS))
    return {owner: terms_of(at, len(owners)) for at, owner in enumerate(owners)}


class Faulty:
    """A dispatcher with one fault, for the law to find."""

    def __init__(self, dispatcher: Dispatcher, case: MemberCase, spec: DispatchSpec) -> None:
        self._dispatcher, self._fault, self._spec = dispatcher, case.fault, spec
        self._first_owner = spec.member.owner == case.group.owners[0]
        self._last_lane = spec.member.lane == case.group.lanes[-1]
        self._tokens: list[Tensor] = []
        self._answer: Tensor | None = None

    def dispatch(self, hidden: Tensor, routing: Routing) -> Dispatched:
        if self._fault == "lane_lost" and self._last_lane:
            routing = replace(routing, slots=torch.full_like(routing.slots, EMPTY))
        arrived = self._dispatcher.dispatch(hidden, routing)
        parts = [part.view(torch.uint8).flatten(0, -2) for part in arrived.batch.tokens.parts]
        if self._fault == "rows_read_again":
            now = [part.clone() for part in parts]
            for part, before in zip(parts, self._tokens, strict=bool(self._tokens)):
                count = min(len(part), len(before))
                part[:count] = before[:count]
            self._tokens = now
        return arrived

    def combine(self, outputs: Tensor, ticket: object) -> Tensor:
        if self._fault == "owner_lost" and self._first_owner:
            outputs = torch.zeros_like(outputs)
        if self._fault == "sums_to_another_row" and len(outputs) > 1:
            outputs = outputs.roll(1, dims=0)
        answer = self._dispatcher.combine(outputs, ticket)
        if self._fault == "sums_read_again":
            now = answer.clone()
            if self._answer is not None:
                count = min(len(answer), len(self._answer))
                answer[:count] = self._answer[:count]
            self._answer = now
        return answer

    def late(self) -> tuple[int, ...]:
        return self._dispatcher.late()

    def close(self) -> None:
        self._dispatcher.close()


FAULTS = ("lane_lost", "owner_lost", "sums_to_another_row", "rows_read_again", "sums_read_again")

TWIN_FAULTS = ("any_word_will_do",)
"""Faults inside the twin of peer memory: it takes words of earlier steps."""


@contextmanager
def _inside(fault: str | None) -> Iterator[None]:
    """The twin with a fault."""
    with ExitStack() as held:
        if fault == "any_word_will_do":
            for name in ("_all_checked", "_all_arrived"):
                held.enter_context(mock.patch.object(twin, name, lambda *found: True))
        yield


@dataclass
class MemberRun:
    """One member's way through a case: its dispatcher, and where members tell each other what is over."""

    case: MemberCase
    seat: int
    dispatcher: Dispatcher
    told: Path  # a folder that all members share
    _under_way: dict[int, tuple[Lanes, Dispatched]] = field(default_factory=dict)

    def run(self, run: int, first: int) -> tuple[StepSeen | None, ...]:
        """All steps of a run that this member takes part in; their numbers lie above `first`."""
        found: list[StepSeen | None] = [None] * len(STEPS)
        given = [number + first for number in numbers(run)]
        for phase, step in self._phases(run):
            if phase == "dispatch":
                self._wait_or_run_ahead(run, step)
                self._dispatch(step, given[step])
            else:
                found[step] = self._combine(step)
                self._mark(run, step, self.seat).touch()
        return tuple(found)

    def _phases(self, run: int) -> list[tuple[str, int]]:
        """Both phases of all its steps, in the order that all members have: two under way where they may."""
        paired = run == 1 and self.case.entry.in_flight > 1
        width = 2 if paired else 1
        pairs = [range(at, at + width) for at in range(0, len(STEPS), width)]
        return [
            (phase, step)
            for pair in pairs
            for phase in ("dispatch", "combine")
            for step in pair
            if self._takes_part(step, self.seat)
        ]

    def _takes_part(self, step: int, seat: int) -> bool:
        return seat in self.case.group.members.in_step(self._lanes(step).rows)

    def _lanes(self, step: int) -> Lanes:
        return step_lanes(replace(self.case, dispatcher="", fault=None), step)

    def _wait_or_run_ahead(self, run: int, step: int) -> None:
        """A lane that was absent sleeps in the first run until the steps without it are over. In the second
        run it goes ahead, and owners dawdle.
        """
        if run == 0:
            missed = [before for before in range(step) if not self._takes_part(before, self.seat)]
            self._sleep_until_over(run, missed[-1:])
        elif self.case.group.members.at(self.seat).owner is not None and (step + self.seat) % 3 == 0:
            time.sleep(0.004)

    def _sleep_until_over(self, run: int, steps: list[int]) -> None:
        deadline = time.monotonic() + ASLEEP
        for step in steps:
            for seat in filter(partial(self._takes_part, step), self.case.group.members.seats):
                while not self._mark(run, step, seat).exists():
                    if time.monotonic() > deadline:
                        raise AssertionError(
                            f"{self.case}: seat {seat} has not ended step {step} without seat {self.seat}"
                        )
                    time.sleep(0.001)

    def _mark(self, run: int, step: int, seat: int) -> Path:
        """The file that says that a member has ended a step."""
        return self.told / f"{self.case}.{run}.{step}.{seat}"

    def _dispatch(self, step: int, number: int) -> None:
        given, lane = self._lanes(step), self.case.group.members.at(self.seat).lane
        if lane is None:
            hidden, slots, weights = (
                rows[0].new_empty((0, rows[0].shape[1]))
                for rows in (given.hidden, given.slots, given.weights)
            )
        else:
            hidden, slots, weights = given.hidden[lane], given.slots[lane], given.weights[lane]
        rounded(self.case.dispatcher, self.case.wire, hidden)  # formats' tables are on the device from now on
        if self.case.fault == "any_word_will_do" and lane is not None:
            time.sleep(0.02)  # so that owners look before the rows are there
        with self._no_host_waits():
            arrived = self.dispatcher.dispatch(hidden, Routing(slots, weights, given.rows, number))
        self._under_way[step] = given, arrived

    def _combine(self, step: int) -> StepSeen:
        given, arrived = self._under_way.pop(step)
        outputs = self._outputs(arrived.batch)
        with self._no_host_waits():
            found = self.dispatcher.combine(outputs, arrived.ticket)
        slots = self._slots()
        round_to_wire = partial(rounded, self.case.dispatcher, self.case.wire)
        return StepSeen(
            worst=self._worst(given, found),
            exact=arrived.batch.counts.shape[0] == len(slots)
            and arrived_exactly(arrived.batch, given, slots, round_to_wire, ordered=self.case.entry.ordered),
            digest=digest(found),
            received=int(arrived.batch.counts.sum()),
            pairs=given.pairs,
        )

    def _worst(self, given: Lanes, found: Tensor) -> float:
        lane = self.case.group.members.at(self.seat).lane
        if lane is None:
            return 0.0 if found.shape == (0, HIDDEN) else float("inf")
        rows = rounded(self.case.dispatcher, self.case.wire, given.hidden[lane]).dequantize()
        expected = answer(given, lane, rows, set(_slices(self.case).values()))
        if found.shape != expected[0].shape or found.dtype != self.case.dtype:
            raise AssertionError(f"{self.case}: answer is {found.dtype} {list(found.shape)}")
        return worst(found, expected)

    def _slots(self) -> range:
        """The numbers of this member's slots."""
        spec = spec_of(self.case, self.seat)
        return range(spec.first_slot, spec.first_slot + spec.slots_here)

    def _outputs(self, batch: ExpertBatch) -> Tensor:
        """This member's experts over a batch."""
        owner, placement = self.case.group.members.at(self.seat).owner, placement_of(self.case)
        held = [] if owner is None else placement.of_owner(0, 0 if self.case.sliced else owner).tolist()
        terms = range(TERMS) if owner is None else _slices(self.case)[owner]
        return computed(batch, held, terms, self.case.row_align).to(self.case.dtype)

    def _no_host_waits(self) -> AbstractContextManager[None]:
        return no_host_waits(self.case.device == "cuda" and not self.case.entry.host_sync)


def run_members(rank: int, world: int, cases: list[MemberCase], told: str) -> list[Seen]:
    """Worker: both runs of every case. Cases that follow each other share a dispatcher where they can."""
    seen: list[Seen] = []
    dispatcher, built_for, first = None, None, 0
    for case in cases:
        seat = case.group.members.seats[rank]
        with _inside(case.fault):
            if dispatcher is None or built_for != case.built_for:
                if dispatcher is not None:
                    dispatcher.close()
                spec = spec_of(case, seat)
                dispatcher = case.entry.build(spec, group())
                if case.fault in FAULTS:
                    dispatcher = Faulty(dispatcher, case, spec)
                built_for, first = case.built_for, 0
            going = MemberRun(case, seat, dispatcher, Path(told))
            runs = tuple(going.run(run, first) for run in range(len(RUNS)))
            first += SEED_TURNS
            seen.append(Seen(runs, dispatcher.late()))
    if dispatcher is not None:
        dispatcher.close()
    return seen


def broken(seen: list[Seen], case: MemberCase) -> list[str]:
    """Where the members of a case broke the law; empty where they kept it."""
    found = [f"seats {late} were late" for member in seen if (late := member.late)]
    copies = len(case.group.owners) if case.sliced else 1
    for run, name in enumerate(RUNS):
        for step in range(len(STEPS)):
            here = [member.runs[run][step] for member in seen]
            came = [one for one in here if one is not None]
            where = f"{name}, step {step}"
            if not came:
                continue  # no lane of the group is named: nobody was called
            if any(one.worst > 1.0 for one in came):
                found.append(f"{where}: error over its bound, by member: {[one.worst for one in came]}")
            if not all(one.exact for one in came):
                found.append(f"{where}: what arrived is not what was sent: {[one.exact for one in came]}")
            received, pairs = (
                sum(one.received for one in came),
                copies * max((one.pairs for one in came), default=0),
            )
            if received != pairs:
                found.append(f"{where}: {received} of {pairs} valid pairs arrived")
            again = [member.runs[0][step] for member in seen]
            if [one and one.digest for one in here] != [one and one.digest for one in again]:
                found.append(f"{where}: bits differ from one run to the other")
    return found


def digests(seen: list[Seen]) -> tuple[object, ...]:
    """The bits of every member's answers in the first run."""
    return tuple(one and one.digest for member in seen for one in member.runs[0])


VARIANTS = (
    ("full", "fp8_group128", torch.bfloat16),
    ("rooms", "bf16", torch.bfloat16),
    ("rooms", "fp32", torch.float32),
    ("sliced", "bf16", torch.bfloat16),
)
"""Placement, wire and dtype of the law on a CPU."""


def member_cases(shape: str) -> list[MemberCase]:
    """Every case of one group on a CPU."""
    variants = VARIANTS[1:2] if len(SHAPES[shape].members) > 5 else VARIANTS
    return [MemberCase(name, shape, *variant) for name in OURS for variant in variants]


def faulty_cases(shape: str) -> list[MemberCase]:
    """Each fault in each dispatcher, and those inside the twin."""
    ours = [(name, fault) for name in OURS for fault in FAULTS]
    inside = [(name, fault) for name in OURS[-2:] for fault in TWIN_FAULTS]
    return [
        MemberCase(name, shape, "full", "fp32", torch.float32, fault=fault) for name, fault in ours + inside
    ]


def gpu_member_cases(shape: str, seeds: int = 3) -> list[MemberCase]:
    """Cases of one group of two GPUs: over peer memory all wires and seeds, the others some of them."""
    cases = []
    for name in OURS:
        entry, peers = DISPATCHERS[name], name in OURS[-2:]
        for placement in ("full", "rooms", "sliced"):
            for wire in (
                sorted(entry.wires) if placement == "full" and peers else ("bf16", "fp8_group128", "fp32")
            ):
                native = next((dtype for dtype, form in FLOATS.items() if form.name == wire), torch.bfloat16)
                for dtype in sorted({torch.float32, native}, key=str):
                    cases += [
                        MemberCase(name, shape, placement, wire, dtype, "cuda", seed)
                        for seed in range(seeds if peers else 1)
                    ]
    return cases
