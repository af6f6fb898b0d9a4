"""Kernels of a plan on one prepared form: each batch goes to the kernel that the plan printed for it."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from made_experts import activation_named
from torch import Tensor

from moeserve.experts.batch import ExpertBatch, ExpertShape, ExpertWeights, Grouping
from moeserve.experts.kernel import KernelSpec, Prepared
from moeserve.experts.kernels import KERNELS
from moeserve.experts.spans import KernelSpan, KernelSpans, SpannedKernel
from moeserve.quant.format import Scheme
from moeserve.quant.formats.floats import BF16, FP32

SPEC = KernelSpec(Scheme(BF16, BF16), ExpertShape(8, 16, activation_named("silu")), torch.bfloat16)


class Answering:
    """Answers its number."""

    def __init__(self, number: float) -> None:
        self._number = number

    def prepare(self, weights: ExpertWeights) -> Prepared:
        return Prepared({"number": torch.full((1,), self._number)})

    def apply(self, prepared: Prepared, batch: ExpertBatch) -> Tensor:
        return torch.full(batch.tokens.shape, self._number)


def entry(number: int, **changes: object):
    """An entry that answers its number."""
    named = replace(KERNELS["torch_grouped_mm"], name=f"answers_{number}", **changes)
    return replace(named, build=lambda _: Answering(number))


def spans(*ends: int, pairs_a_row: Fraction = Fraction(2)) -> KernelSpans:
    """Kernels that answer 1, 2, ... up to each of `ends`."""
    return KernelSpans(
        "answers", tuple(KernelSpan(end, entry(at)) for at, end in enumerate(ends, 1)), pairs_a_row
    )


def batch(rows: int, slots: int, likely: float | None = None) -> ExpertBatch:
    starts = torch.zeros(slots + 1)
    return ExpertBatch(BF16.empty((rows, 8)), Grouping.RAGGED, torch.zeros(slots), starts, likely)


@pytest.mark.parametrize(
    ("arrived", "answer"),
    [
        (batch(100, 4, likely=1.5), 1),  # 6 pairs: 3 rows of two each
        (batch(100, 4, likely=1.6), 2),
        (batch(100, 4, likely=5.0), 2),  # 20 pairs: 10 rows
        (batch(100, 4, likely=5.5), 3),
        (batch(100, 4, likely=1000.0), 3),  # no more than there is room for
        (batch(6, 4), 1),
        (batch(7, 4), 2),
        (batch(0, 4), 1),
        (batch(0, 0), 1),
        (batch(9, 0), 1),
    ],
)
def test_each_batch_goes_to_the_kernel_of_its_span(arrived: ExpertBatch, answer: int) -> None:
    kernel = spans(3, 10, 40).build(SPEC)
    found = kernel.apply(Prepared({}), arrived)
    assert found.shape == arrived.tokens.shape
    assert bool((found == answer).all())


@pytest.mark.parametrize("slots", [3, 7, 15, 60, 96])
@pytest.mark.parametrize("top_k", [1, 3, 6, 8])
def test_rows_are_told_exactly_from_what_a_slot_likely_has(slots: int, top_k: int) -> None:
    """What a rank divides by all slots comes back as the rows that the lanes brought."""
    ranks = 3
    found = KernelSpans(
        "rows", tuple(KernelSpan(end, entry(end)) for end in range(1, 400)), Fraction(top_k, ranks)
    )
    for rows in range(1, 400):
        likely = rows * top_k / (slots * ranks)
        assert found.span_of(batch(400 * top_k, slots, likely)).up_to == rows


def test_padded_rows_come_back_padded() -> None:
    arrived = ExpertBatch(BF16.empty((2, 6, 8)), Grouping.PADDED, torch.tensor([6, 2]), torch.zeros(3))
    assert spans(1, 100).build(SPEC).apply(Prepared({}), arrived).shape == (2, 6, 8)


def test_all_kernels_compute_on_what_the_first_prepares() -> None:
    kernel = spans(3, 10).build(SPEC)
    assert isinstance(kernel, SpannedKernel)
    weights = ExpertWeights(BF16.empty((1, 32, 8)), BF16.empty((1, 8, 16)))
    assert float(kernel.prepare(weights).per_slot["number"]) == 1


def test_together_they_take_what_each_of_them_takes() -> None:
    first = entry(1, eats=frozenset({BF16, FP32}), verified=("cpu", "sm90"), row_align=8)
    second = entry(2, groupings=frozenset(Grouping), eats=frozenset({BF16}), verified=("sm90",))
    both = KernelSpans("both", (KernelSpan(4, first), KernelSpan(9, second)), Fraction(1))
    assert both.names == "answers_1+answers_2"
    assert (both.eats, both.groupings) == (frozenset({BF16}), first.groupings & second.groupings)
    assert (both.row_align, both.verified, both.reference) == (8, ("sm90",), False)
    assert str(both.spans[0]) == "answers_1 up to 4 rows of all lanes (verified: cpu, sm90)"
