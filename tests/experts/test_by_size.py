"""A kernel that is two by the rows of a slot gives each batch to the one that takes it."""

from __future__ import annotations

import pytest
import torch
from made_experts import activation_named
from torch import Tensor

from moeserve.experts.batch import ExpertBatch, ExpertShape, ExpertWeights, Grouping
from moeserve.experts.kernel import KernelSpec, Prepared
from moeserve.experts.kernels.hopper import BySize
from moeserve.quant.format import Scheme
from moeserve.quant.formats.floats import BF16

SPEC = KernelSpec(Scheme(BF16, BF16), ExpertShape(8, 16, activation_named("silu")), torch.bfloat16)


class Few:
    """Answers one."""

    def prepare(self, weights: ExpertWeights) -> Prepared:
        raise AssertionError("not asked here")

    def apply(self, prepared: Prepared, batch: ExpertBatch) -> Tensor:
        return torch.ones(batch.tokens.shape)


class Both(BySize):
    """Answers two from four rows a slot on."""

    def _is_for(self, batch: ExpertBatch) -> bool:
        return batch.rows_a_slot >= 4

    def _apply(self, prepared: Prepared, batch: ExpertBatch) -> Tensor:
        rows = batch.tokens.shape[:-1].numel()
        assert rows and batch.slots
        return torch.full((rows, 8), 2.0)


@pytest.mark.parametrize(
    ("counts", "rows", "answer"), [((2, 1), 3, 1.0), ((9, 3), 12, 2.0), ((0, 0), 0, 1.0), ((), 5, 1.0)]
)
def test_each_batch_goes_to_one_of_them(counts: tuple[int, ...], rows: int, answer: float) -> None:
    batch = ExpertBatch(
        BF16.empty((rows, 8)), Grouping.RAGGED, torch.tensor(counts), torch.zeros(len(counts) + 1)
    )
    found = Both(SPEC, Few()).apply(Prepared({}), batch)
    assert found.shape == (rows, 8)
    assert bool((found == answer).all())


def test_padded_rows_come_back_padded() -> None:
    batch = ExpertBatch(BF16.empty((2, 6, 8)), Grouping.PADDED, torch.tensor([6, 2]), torch.zeros(3))
    assert Both(SPEC, Few()).apply(Prepared({}), batch).shape == (2, 6, 8)
