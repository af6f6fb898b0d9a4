"""Cases of the dispatcher law, and the worker that runs them all in one group of ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial

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
from numpy.typing import NDArray
from parallel import group
from torch import Tensor

from moeserve.dispatch.backends import DISPATCHERS
from moeserve.dispatch.dispatcher import (
    Dispatched,
    DispatchEntry,
    Dispatcher,
    DispatchSpec,
    Traffic,
)
from moeserve.dispatch.members import Members
from moeserve.dispatch.routing import Routing
from moeserve.experts.batch import ExpertBatch
from moeserve.experts.placement import EMPTY, Placement
from moeserve.quant.formats import FORMATS
from moeserve.quant.formats.floats import FLOATS

RANKS = 4
HIDDEN = 256
TOP_K = 3
NARROW = 128  # one group of fp8_group128: a row has one scale
LANE_ROWS = 9


Inputs = tuple[str, str, torch.dtype, str, int, int, int]
"""Placement, wire, dtype, step, ranks, experts a row and elements a row of a case."""


@dataclass(frozen=True)
class Case:
    """One step of one dispatcher."""

    dispatcher: str
    placement: str
    wire: str
    dtype: torch.dtype
    step: str
    row_align: int
    mutation: str | None = None
    device: str = "cpu"  # or "cuda": GPU r for rank r
    ranks: int = RANKS
    top_k: int = TOP_K
    hidden: int = HIDDEN

    def __str__(self) -> str:
        parts = (
            self.dispatcher,
            self.placement,
            self.wire,
            str(self.dtype).removeprefix("torch."),
            self.step,
        )
        sizes = () if self.top_k == TOP_K else (f"top{self.top_k}", f"H{self.hidden}")
        return "-".join((*parts, *sizes, self.mutation or "true"))

    @property
    def inputs(self) -> Inputs:
        """What the step computes, whoever carries it."""
        sizes = (self.ranks, self.top_k, self.hidden)
        return (self.placement, self.wire, self.dtype, self.step, *sizes)

    @property
    def entry(self) -> DispatchEntry:
        """The dispatcher's row."""
        return DISPATCHERS[self.dispatcher]


@dataclass(frozen=True)
class Outcome:
    """What one rank saw of a case."""

    worst: float  # largest error over its bound; at most 1 when right
    repeats: bool  # a second run of the step gave the same bits
    exact: bool  # the rows that arrived are, bit for bit, those quantized where they came from
    digest: str  # of the answer's bits
    received: int  # (row, slot) pairs
    pairs: int  # valid (row, choice) pairs of all lanes
    sent: int  # bytes to other ranks


def _with_idle_rank(ranks: int) -> NDArray[np.int32]:
    """Slots of three experts on all ranks but the last."""
    slots = np.full((1, ranks * -(-3 // (ranks - 1))), EMPTY, dtype=np.int32)
    slots[0, :3] = range(3)
    return slots


@cache
def placements(ranks: int = RANKS) -> dict[str, Placement]:
    """Every way to place experts on so many ranks, two or four, that the law is held to."""
    return {
        "even": Placement.even(1, 8, ranks),
        "uneven": Placement.even(1, 2 * ranks + 2 if ranks > 2 else 5, ranks),
        "idle_rank": Placement(_with_idle_rank(ranks), ranks, 3),
        "replicas": Placement(torch.tensor([[0, 1, 2, 3, 4, 5, 0, 3, 0, EMPTY, 5, 0]]).numpy(), ranks, 6),
        "sliced": Placement.even(1, 5, 1),
    }


Step = tuple[tuple[int, ...], Choice]


def _random(ids: Tensor, lane: int) -> Tensor:
    return ids


def _one_expert(ids: Tensor, lane: int) -> Tensor:
    ids = torch.full_like(ids, EMPTY)
    ids[:, -1] = 1
    return ids


def _holes(ids: Tensor, lane: int) -> Tensor:
    ids = ids.clone()
    ids[0] = EMPTY
    ids[1:, lane % ids.shape[1]] = EMPTY
    return ids


STEPS: dict[str, Step] = {
    "uneven_lanes": ((5, 0, 9, 2), _random),
    "one_expert": ((3, 4, 1, 2), _one_expert),
    "holes": ((4, 4, 4, 4), _holes),
    "one_lane": ((0, 0, 0, 7), _random),
    "nobody": ((0, 0, 0, 0), _random),
}


@cache
def lanes(case_inputs: Inputs, device: str) -> Lanes:
    """The same inputs in every process."""
    placement_name, _, dtype, step, ranks, top_k, width = case_inputs
    counts, choose = STEPS[step]
    given = Drawn(counts[-ranks:], choose, top_k, width, dtype)
    return draw(placements(ranks)[placement_name], given, device)


def reference(case: Case, rank: int) -> tuple[Tensor, Tensor]:
    """The answer of lane `rank` computed in one process, and how far a dispatcher may be off."""
    step = lanes(case.inputs, case.device)
    rows = rounded(case.dispatcher, case.wire, step.hidden[rank]).dequantize()
    return answer(step, rank, rows, {computed_by(case, other) for other in range(case.ranks)})


def spec_of(case: Case, rank: int) -> DispatchSpec:
    """What the dispatcher of a case is built for."""
    placement = placements(case.ranks)[case.placement]
    return DispatchSpec(
        members=Members.of_ranks(case.ranks),
        seat=rank,
        slots=placement.slots_per_owner,
        hidden=case.hidden,
        top_k=case.top_k,
        lane_rows=LANE_ROWS,
        dtype=case.dtype,
        wire=FORMATS[case.wire],
        sliced=case.placement == "sliced",
        row_align=case.row_align,
        device=case.device,
    )


def computed_by(case: Case, rank: int) -> range:
    """The terms of an expert's sum that `rank` computes."""
    return terms_of(rank, case.ranks) if case.placement == "sliced" else range(TERMS)


def compute(case: Case, rank: int, batch: ExpertBatch) -> Tensor:
    """This rank's experts over a batch; rows that no slot owns come back as NaN, to be left out."""
    placement = placements(case.ranks)[case.placement]
    held = placement.of_owner(0, 0 if case.placement == "sliced" else rank).tolist()
    return computed(batch, held, computed_by(case, rank), case.row_align).to(case.dtype)


class Mutant(Dispatcher):
    """A dispatcher with one fault, for the law to find."""

    def __init__(self, dispatcher: Dispatcher, fault: str, spec: DispatchSpec) -> None:
        self._dispatcher, self._fault, self._spec = dispatcher, fault, spec

    def dispatch(self, hidden: Tensor, routing: Routing) -> Dispatched:
        if self._fault == "swapped_slots":
            slots = torch.where(routing.slots == 0, 1, torch.where(routing.slots == 1, 0, routing.slots))
            routing = replace(routing, slots=slots)
        if self._fault == "rolled_weights":
            routing = replace(routing, weights=torch.nan_to_num(routing.weights).roll(1, dims=1))
        if self._fault == "double_rounding":
            hidden = FORMATS["fp8_group128"].quantize(hidden).dequantize().to(hidden.dtype)
        return self._dispatcher.dispatch(hidden, routing)

    def combine(self, outputs: Tensor, ticket: object) -> Tensor:
        if self._fault == "lost_rank" and self._spec.rank == 1:
            outputs = torch.zeros_like(outputs)
        if self._fault == "swapped_rows" and outputs.shape[0] > 1:
            outputs = outputs.roll(1, dims=0)
        return self._dispatcher.combine(outputs, ticket)

    @property
    def traffic(self) -> Traffic:
        return self._dispatcher.traffic

    def close(self) -> None:
        self._dispatcher.close()


FAULTS = ("swapped_slots", "rolled_weights", "double_rounding", "lost_rank", "swapped_rows")


def run_cases(rank: int, world: int, cases: list[Case]) -> list[Outcome]:
    """Worker: every case once, and once more, into memory of the caller, for its bits."""
    return [_run_case(rank, case) for case in cases]


def _run_case(rank: int, case: Case) -> Outcome:
    spec, entry = spec_of(case, rank), case.entry
    dispatcher: Dispatcher = entry.build(spec, group())
    if case.mutation:
        dispatcher = Mutant(dispatcher, case.mutation, spec)
    step = lanes(case.inputs, case.device)
    round_to_wire = partial(rounded, case.dispatcher, case.wire)
    round_to_wire(torch.cat(step.hidden))  # formats put their tables on the device at first use
    answers = []
    watched = case.device == "cuda" and not entry.host_sync
    for number in (1, 2):
        routing = Routing(step.slots[rank], step.weights[rank], step.rows, number)
        with no_host_waits(watched):
            arrived = dispatcher.dispatch(step.hidden[rank], routing)
        outputs = compute(case, rank, arrived.batch)
        with no_host_waits(watched):
            if number == 1:
                answers.append(dispatcher.combine(outputs, arrived.ticket))
            else:
                place = torch.full_like(answers[0], float("nan"))
                answers.append(dispatcher.combine_into(outputs, arrived.ticket, place))
                if answers[1] is not place:
                    raise AssertionError(f"{case}: the answer is not where it is wanted")
    sent = dispatcher.traffic.dispatched + dispatcher.traffic.combined
    dispatcher.close()
    expected = reference(case, rank)
    if answers[0].shape != expected[0].shape or answers[0].dtype != case.dtype:
        raise AssertionError(f"{case}: answer is {answers[0].dtype} {list(answers[0].shape)}")
    first = spec.first_slot
    here = range(first, first + spec.slots)
    return Outcome(
        worst=worst(answers[0], expected),
        repeats=torch.equal(answers[0].view(torch.uint8), answers[1].view(torch.uint8)),
        exact=arrived_exactly(arrived.batch, step, here, round_to_wire, ordered=entry.ordered),
        digest=digest(answers[0]),
        received=int(arrived.batch.counts.sum()),
        pairs=step.pairs,
        sent=sent,
    )


TOP_1_PLACEMENTS = {"even", "idle_rank", "sliced"}
TOP_1_WIRES = {"fp32", "bf16", "fp8_group128"}
"""Placements and wires that a top-1 model's steps are held to, with idle lanes and without."""

USUAL_WIRES = {*(form.name for form in FLOATS.values()), "fp8_group128", "mxfp4"}
"""Wires that meet every placement; dispatchers see bytes, so the others meet one."""


def law_cases(arch: str = "cpu", ranks: int = RANKS) -> list[Case]:
    """Every case of every dispatcher that runs on `arch` by itself, from the tables."""
    entries = (entry for entry in DISPATCHERS.values() if arch in entry.archs and not entry.modules)
    device = "cpu" if arch == "cpu" else "cuda"
    return [case for entry in entries for case in cases_of(entry, device, ranks)]


def cases_of(entry: DispatchEntry, device: str = "cpu", ranks: int = RANKS) -> list[Case]:
    """Every case of one dispatcher: placement x wire x dtype x step, as far as its row goes."""
    if min(entry.max_lanes or ranks, entry.max_owners or ranks) < ranks:
        return []
    cases = []
    for placement in placements(ranks):
        if placement == "sliced" and not entry.sliced:
            continue
        for wire in sorted(entry.wires if placement == "even" else entry.wires & USUAL_WIRES):
            native = next((dtype for dtype, f in FLOATS.items() if f.name == wire), torch.bfloat16)
            for dtype in sorted({torch.float32, native}, key=str):
                if entry.limits.refuses(ranks, TOP_K, HIDDEN, FLOATS[dtype].name):
                    continue
                align = 1 if dtype == torch.float32 else 8
                cases += [
                    Case(entry.name, placement, wire, dtype, step, align, None, device, ranks)
                    for step in STEPS
                ]
    return cases + [one for case in cases if (one := _of_one_choice(case)) is not None]


def _of_one_choice(case: Case) -> Case | None:
    """The same step of a top-1 model, where it tells more: a row has one choice, one weight and one scale."""
    tells = case.placement in TOP_1_PLACEMENTS and case.wire in TOP_1_WIRES
    name = FLOATS[case.dtype].name
    if not tells or case.entry.limits.refuses(case.ranks, 1, NARROW, name):
        return None
    return replace(case, top_k=1, hidden=NARROW)


def fault_cases() -> list[Case]:
    """Each fault on each dispatcher, where it must show."""
    dispatchers = sorted({case.dispatcher for case in law_cases()})
    return [
        Case(dispatcher, "even", "fp32", torch.float32, "uneven_lanes", 1, fault)
        for dispatcher in dispatchers
        for fault in FAULTS
    ]
