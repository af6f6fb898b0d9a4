"""Cases of the dispatcher law, and the worker that runs them all in one group of ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from deepep_rounding import rounded_by_deepep
from numpy.typing import NDArray
from torch import Tensor

from moeserve.dispatch.backends import DISPATCHERS
from moeserve.dispatch.dispatcher import (
    Dispatched,
    DispatchEntry,
    Dispatcher,
    DispatchSpec,
    Traffic,
)
from moeserve.dispatch.routing import Routing
from moeserve.dispatch.wire import row_bytes
from moeserve.experts.batch import ExpertBatch
from moeserve.experts.placement import EMPTY, Placement
from moeserve.experts.routing.address_book import AddressBook
from moeserve.quant.format import Packed
from moeserve.quant.formats import FORMATS
from moeserve.quant.formats.floats import FLOATS

RANKS = 4
HIDDEN = 256
TOP_K = 3
NARROW = 128  # one group of fp8_group128: a row has one scale
LANE_ROWS = 9
TERMS = 4  # of an expert's sum; the slices of a sliced expert compute equal parts of them


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


Step = tuple[tuple[int, ...], Callable[[Tensor, int], Tensor]]


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


def expert(index: int, rows: Tensor, terms: range) -> Tensor:
    """Terms of expert `index` for `rows [N, H]`, float32, element by element: bits do not depend on N."""
    total = torch.zeros_like(rows)
    for term in terms:
        scale = 0.25 + ((5 * index + 3 * term) % 7) / 8
        total += torch.roll(rows, 11 * index + term + 1, dims=1) * scale + (index - term) / 16
    return total


@dataclass(frozen=True, eq=False)
class Lanes:
    """Every lane's rows, choices and weights of a step."""

    hidden: list[Tensor]
    experts: list[Tensor]
    weights: list[Tensor]
    slots: list[Tensor]

    @property
    def rows(self) -> tuple[int, ...]:
        return tuple(h.shape[0] for h in self.hidden)


@cache
def lanes(case_inputs: Inputs, device: str) -> Lanes:
    """The same inputs in every process."""
    placement_name, _, dtype, step, ranks, top_k, width = case_inputs
    placement = placements(ranks)[placement_name]
    counts, choose = STEPS[step]
    counts = counts[-ranks:]
    random = torch.Generator().manual_seed(7)
    hidden, experts, weights = [], [], []
    for lane, rows in enumerate(counts):
        hidden.append(torch.randn(rows, width, generator=random).to(dtype))
        order = torch.rand(rows, placement.experts, generator=random).argsort(dim=1)
        experts.append(choose(order[:, :top_k].int(), lane))
        weight = torch.rand(rows, top_k, generator=random)
        weights.append(torch.where(experts[-1] < 0, float("nan"), weight))
    book = AddressBook(placement)
    slots = [book.resolve(0, e, torch.ones(e.shape[0], dtype=torch.bool)).int() for e in experts]
    return Lanes(*([t.to(device) for t in each] for each in (hidden, experts, weights, slots)))


def reference(case: Case, rank: int) -> tuple[Tensor, Tensor]:
    """The answer of lane `rank` computed in one process, float64 `[T, H]`, and how far a dispatcher may be
    off.

    Rows are rounded to the wire and expert outputs to the hidden dtype, as on the ranks. What is left is the
    order of sums in float32 and, for narrow dtypes, one rounding of each partial sum and one of the answer.
    """
    step = lanes(case.inputs, case.device)
    rows = rounded(case, step.hidden[rank]).dequantize()
    slices = {computed_by(case, other) for other in range(case.ranks)}
    total = torch.zeros(rows.shape, dtype=torch.float64, device=rows.device)
    size = torch.zeros(rows.shape, dtype=torch.float64, device=rows.device)
    for row, column in (step.experts[rank] >= 0).nonzero().tolist():
        index, weight = int(step.experts[rank][row, column]), float(step.weights[rank][row, column])
        for terms in slices:
            output = expert(index, rows[row : row + 1], terms).to(case.dtype).double()[0]
            total[row] += weight * output
            size[row] += abs(weight) * output.abs()
    epsilon = 2.0**-21 if case.dtype == torch.float32 else torch.finfo(case.dtype).eps
    return total, size * epsilon + 1e-12


def spec_of(case: Case, rank: int) -> DispatchSpec:
    """What the dispatcher of a case is built for."""
    placement = placements(case.ranks)[case.placement]
    return DispatchSpec(
        rank=rank,
        ranks=case.ranks,
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
    each = TERMS // case.ranks
    return range(rank * each, (rank + 1) * each) if case.placement == "sliced" else range(TERMS)


def compute(case: Case, rank: int, batch: ExpertBatch) -> Tensor:
    """This rank's experts over a batch; rows that no slot owns come back as NaN, to be left out."""
    placement = placements(case.ranks)[case.placement]
    held = placement.of_owner(0, 0 if case.placement == "sliced" else rank)
    terms = computed_by(case, rank)
    rows = batch.tokens.dequantize().flatten(0, -2)  # PADDED slots one after the other, as offsets count
    outputs = torch.full_like(rows, float("nan"))
    for slot, index in enumerate(held.tolist()):
        first = int(batch.offsets[slot])
        if first % case.row_align:
            raise AssertionError(f"segment {slot} starts at row {first}, not a multiple of {case.row_align}")
        here = slice(first, first + int(batch.counts[slot]))
        outputs[here] = expert(index, rows[here], terms)
    return outputs.to(case.dtype)


def rounded(case: Case, rows: Tensor) -> Packed:
    """`rows [T, H]` as they arrive: rounded by the wire's own formula, or by the library that sends them."""
    wire = FORMATS[case.wire]
    if not case.entry.quantizes or len(wire.parts) == 1:
        return wire.quantize(rows)
    parts = rounded_by_deepep(rows.float(), power_of_two=case.wire.endswith("ue8m0"))
    return Packed(wire, rows.shape, parts)


def arrived_exactly(case: Case, rank: int, batch: ExpertBatch) -> bool:
    """Whether a slot's rows are those of all lanes that chose it, bit for bit, and in order where the
    dispatcher
    keeps it."""
    step, spec = lanes(case.inputs, case.device), spec_of(case, rank)
    for slot in range(spec.slots):
        wanted = slot if spec.sliced else rank * spec.slots + slot
        chosen = [h[(s == wanted).any(dim=1)] for h, s in zip(step.hidden, step.slots, strict=True)]
        expected = _row_bytes(rounded(case, torch.cat(chosen)).parts)
        first, count = int(batch.offsets[slot]), int(batch.counts[slot])
        flat = [part.flatten(0, -2) for part in batch.tokens.parts]
        got = _row_bytes([part[first : first + count] for part in flat])
        if not case.entry.ordered:
            got, expected = sorted(got), sorted(expected)
        if got != expected:
            return False
    return True


def _row_bytes(parts: Sequence[Tensor]) -> list[bytes]:
    """Each row's bytes, part after part."""
    raw = torch.cat([row_bytes(part) for part in parts], dim=1).cpu()
    return [row.numpy().tobytes() for row in raw]


class Mutant:
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
    """Worker: every case once, and once more for its bits."""
    return [_run_case(rank, case) for case in cases]


def _run_case(rank: int, case: Case) -> Outcome:
    spec = spec_of(case, rank)
    dispatcher: Dispatcher = DISPATCHERS[case.dispatcher].build(spec)
    if case.mutation:
        dispatcher = Mutant(dispatcher, case.mutation, spec)
    step = lanes(case.inputs, case.device)
    rounded(case, torch.cat(step.hidden))  # formats put their tables on the device at first use
    routing = Routing(step.slots[rank], step.weights[rank], step.rows)
    answers = []
    free = DISPATCHERS[case.dispatcher].host_sync
    for _ in range(2):
        with no_host_waits(case.device == "cuda" and not free):
            arrived = dispatcher.dispatch(step.hidden[rank], routing)
        outputs = compute(case, rank, arrived.batch)
        with no_host_waits(case.device == "cuda" and not free):
            answers.append(dispatcher.combine(outputs, arrived.ticket))
    sent = dispatcher.traffic.dispatched + dispatcher.traffic.combined
    dispatcher.close()
    answer, (expected, bound) = answers[0], reference(case, rank)
    if answer.shape != expected.shape or answer.dtype != case.dtype:
        raise AssertionError(f"{case}: answer is {answer.dtype} {list(answer.shape)}")
    error = torch.nan_to_num((answer.double() - expected).abs() / bound, nan=float("inf"))
    return Outcome(
        worst=float(error.max()) if error.numel() else 0.0,
        repeats=torch.equal(answers[0].view(torch.uint8), answers[1].view(torch.uint8)),
        exact=arrived_exactly(case, rank, arrived.batch),
        digest=hashlib.sha256(
            (answer + 0.0).view(torch.uint8).cpu().numpy().tobytes()
        ).hexdigest(),  # -0 is 0
        received=int(arrived.batch.counts.sum()),
        pairs=sum(int((slots >= 0).sum()) for slots in step.slots),
        sent=sent,
    )


@contextmanager
def no_host_waits(active: bool) -> Iterator[None]:
    """While `active`, anything that makes the host wait for the GPU raises."""
    if active:
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if active:
            torch.cuda.set_sync_debug_mode("default")


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
