"""What a step of any dispatcher must bring and answer, computed in one process."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from deepep_rounding import rounded_by_deepep
from torch import Tensor

from moeserve.dispatch.backends import DISPATCHERS
from moeserve.dispatch.wire import row_bytes
from moeserve.experts.batch import ExpertBatch
from moeserve.experts.placement import Placement
from moeserve.experts.routing.address_book import AddressBook
from moeserve.quant.format import Packed
from moeserve.quant.formats import FORMATS

TERMS = 4  # of an expert's sum; the slices of a sliced expert compute parts of them

Choice = Callable[[Tensor, int], Tensor]
"""Expert ids `[T, K]`, drawn at random, and the lane that has them -> those that its step chooses."""


def expert(index: int, rows: Tensor, terms: range) -> Tensor:
    """Terms of expert `index` for `rows [N, H]`, float32, element by element: bits do not depend on N."""
    total = torch.zeros_like(rows)
    for term in terms:
        scale = 0.25 + ((5 * index + 3 * term) % 7) / 8
        total += torch.roll(rows, 11 * index + term + 1, dims=1) * scale + (index - term) / 16
    return total


def terms_of(place: int, places: int) -> range:
    """The terms that one of so many slices of a sliced expert computes; together they are all of them."""
    return range(place * TERMS // places, (place + 1) * TERMS // places)


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

    @property
    def pairs(self) -> int:
        """Valid (row, choice) pairs of all lanes."""
        return sum(int((slots >= 0).sum()) for slots in self.slots)


@dataclass(frozen=True)
class Drawn:
    """What a step's inputs are drawn from."""

    rows: tuple[int, ...]  # by lane
    choose: Choice
    top_k: int
    hidden: int
    dtype: torch.dtype
    seed: int = 7


def draw(placement: Placement, given: Drawn, device: str) -> Lanes:
    """The same inputs in every process."""
    random = torch.Generator().manual_seed(given.seed)
    hidden, experts, weights = [], [], []
    for lane, rows in enumerate(given.rows):
        hidden.append(torch.randn(rows, given.hidden, generator=random).to(given.dtype))
        order = torch.rand(rows, placement.experts, generator=random).argsort(dim=1)
        experts.append(given.choose(order[:, : given.top_k].int(), lane))
        weight = torch.rand(rows, given.top_k, generator=random)
        weights.append(torch.where(experts[-1] < 0, float("nan"), weight))
    book = AddressBook(placement)
    slots = [book.resolve(0, e, torch.ones(e.shape[0], dtype=torch.bool)).int() for e in experts]
    return Lanes(*([t.to(device) for t in each] for each in (hidden, experts, weights, slots)))


def answer(step: Lanes, lane: int, rows: Tensor, slices: Collection[range]) -> tuple[Tensor, Tensor]:
    """The answer of a lane computed in one process, float64 `[T, H]`, and how far a dispatcher may be off.

    `rows` are the lane's, float32 and rounded to the wire; expert outputs are rounded to the hidden dtype, as
    on their owners. What is left is the order of sums in float32 and, for narrow dtypes, one rounding of each
    partial sum and one of the answer.
    """
    dtype = step.hidden[lane].dtype
    total = torch.zeros(rows.shape, dtype=torch.float64, device=rows.device)
    size = torch.zeros_like(total)
    for index in {int(found) for found in step.experts[lane].unique() if found >= 0}:
        chosen = step.experts[lane] == index
        weight = torch.where(chosen, step.weights[lane].double(), 0.0).sum(dim=1, keepdim=True)
        here = chosen.any(dim=1)
        for terms in slices:
            output = expert(index, rows[here], terms).to(dtype).double()
            total[here] += weight[here] * output
            size[here] += weight[here].abs() * output.abs()
    epsilon = 2.0**-21 if dtype == torch.float32 else torch.finfo(dtype).eps
    roundings = step.experts[lane].shape[1] * len(slices) + 1
    below = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps / 2  # of each, if subnormal
    return total, size * epsilon + roundings * below + 1e-12


def worst(found: Tensor, expected: tuple[Tensor, Tensor]) -> float:
    """The largest error over its bound; infinite where `found` is not a number."""
    total, bound = expected
    error = torch.nan_to_num((found.double() - total).abs() / bound, nan=float("inf"))
    return float(error.max()) if error.numel() else 0.0


def computed(batch: ExpertBatch, held: Sequence[int], terms: range, row_align: int) -> Tensor:
    """The experts `held` over a batch, float32; rows that no slot owns come back as NaN, to be left out."""
    rows = batch.tokens.dequantize().flatten(0, -2)  # PADDED slots one after the other, as offsets count
    outputs = torch.full_like(rows, float("nan"))
    for slot, index in enumerate(held):
        first = int(batch.offsets[slot])
        if first % row_align:
            raise AssertionError(f"segment {slot} starts at row {first}, not a multiple of {row_align}")
        here = slice(first, first + int(batch.counts[slot]))
        outputs[here] = expert(index, rows[here], terms)
    return outputs


def rounded(dispatcher: str, wire_name: str, rows: Tensor) -> Packed:
    """`rows [T, H]` as they arrive: rounded by the wire's own formula, or by the library that sends them."""
    wire = FORMATS[wire_name]
    if not DISPATCHERS[dispatcher].quantizes or len(wire.parts) == 1:
        return wire.quantize(rows)
    parts = rounded_by_deepep(rows.float(), power_of_two=wire_name.endswith("ue8m0"))
    return Packed(wire, rows.shape, parts)


def arrived_exactly(
    batch: ExpertBatch, step: Lanes, slots: range, round_to_wire: Callable[[Tensor], Packed], *, ordered: bool
) -> bool:
    """Whether the rows of `slots` are those of all lanes that chose them, bit for bit, and in the order of
    lanes and rows where the dispatcher is `ordered`.
    """
    for at, slot in enumerate(slots):
        chosen = [h[(s == slot).any(dim=1)] for h, s in zip(step.hidden, step.slots, strict=True)]
        expected = raw_rows(round_to_wire(torch.cat(chosen)).parts)
        first, count = int(batch.offsets[at]), int(batch.counts[at])
        flat = [part.flatten(0, -2) for part in batch.tokens.parts]
        got = raw_rows([part[first : first + count] for part in flat])
        if not ordered:
            got, expected = sorted(got), sorted(expected)
        if got != expected:
            return False
    return True


def raw_rows(parts: Sequence[Tensor]) -> list[bytes]:
    """Each row's bytes, part after part."""
    raw = torch.cat([row_bytes(part) for part in parts], dim=1).cpu()
    return [row.numpy().tobytes() for row in raw]


def digest(found: Tensor) -> str:
    """A hash of the bits of an answer; -0 is 0."""
    return hashlib.sha256((found + 0.0).view(torch.uint8).cpu().numpy().tobytes()).hexdigest()


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
