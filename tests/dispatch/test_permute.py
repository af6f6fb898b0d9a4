"""Grouping by slot and weighing back, on worked examples and against plain loops."""

import pytest
import torch

from moeserve.dispatch.permute import (
    Homes,
    _grouped_by_operations,
    group_rows,
    row_capacity,
    take_rows,
    weigh_rows,
)
from moeserve.experts.batch import ExpertBatch, Grouping
from moeserve.quant.formats import FORMATS
from moeserve.quant.formats.floats import FP32

SLOTS = torch.tensor([[2, 0], [-1, 2], [-1, -1], [0, -1]], dtype=torch.int32)
WEIGHTS = torch.tensor([[1.0, 10.0], [float("nan"), 100.0], [float("nan"), 1.0], [1000.0, float("nan")]])
ROWS = torch.arange(4.0)[:, None] * torch.ones(1, 3)


def test_rows_stand_by_slot_in_order_of_arrival() -> None:
    batch, _ = group_rows(FP32.quantize(ROWS), SLOTS, WEIGHTS, (3, 1))
    assert batch.grouping is Grouping.RAGGED
    assert batch.counts.tolist() == [2, 0, 2] and batch.counts.dtype == torch.int32
    assert batch.offsets.tolist() == [0, 2, 2, 4] and batch.offsets.dtype == torch.int32
    assert batch.tokens.parts[0][:, 0].tolist() == [0, 3, 0, 1]


def test_segments_are_aligned() -> None:
    batch, homes = group_rows(FP32.quantize(ROWS), SLOTS, WEIGHTS, (3, 4))
    assert batch.counts.tolist() == [2, 0, 2]
    assert batch.offsets.tolist() == [0, 4, 4, 8]
    assert batch.tokens.shape == (8, 3) and homes.capacity == 8
    assert batch.tokens.parts[0][[0, 1, 4, 5], 0].tolist() == [0, 3, 0, 1]


@pytest.mark.parametrize("row_align", [1, 4])
def test_weighing_leaves_out_what_no_slot_owns(row_align: int) -> None:
    batch, homes = group_rows(FP32.quantize(ROWS), SLOTS, WEIGHTS, (3, row_align))
    outputs = torch.full((homes.capacity, 3), float("nan"))
    for slot, value in enumerate((5.0, 0.0, 7.0)):
        first = int(batch.offsets[slot])
        outputs[first : first + int(batch.counts[slot])] = value
    assert weigh_rows(outputs, homes)[:, 0].tolist() == [1 * 7 + 10 * 5, 100 * 7, 0, 1000 * 5]


@pytest.mark.parametrize("name", sorted(name for name, f in FORMATS.items() if f.row_wise))
@pytest.mark.parametrize("hidden", [256, 200])
def test_every_row_wise_format_is_grouped_bit_for_bit(name: str, hidden: int) -> None:
    random = torch.Generator().manual_seed(0)
    packed = FORMATS[name].quantize(torch.randn(6, hidden, generator=random))
    slots = torch.rand(6, 5, generator=random).argsort(dim=1)[:, :2].int()
    batch, _ = group_rows(packed, slots, torch.ones(6, 2), (5, 1))
    for slot in range(5):
        wanted = packed.rows((slots == slot).any(dim=1))
        first = int(batch.offsets[slot])
        for got, want in zip(batch.tokens.parts, wanted.parts, strict=True):
            assert torch.equal(got[first : first + want.shape[0]].view(torch.uint8), want.view(torch.uint8))


def test_no_rows_and_no_slots() -> None:
    batch, homes = group_rows(
        FP32.quantize(torch.empty(0, 8)), torch.empty(0, 2, dtype=torch.int32), torch.empty(0, 2), (3, 4)
    )
    assert batch.counts.tolist() == [0, 0, 0] and batch.tokens.shape == (0, 8)
    assert weigh_rows(torch.empty(0, 8), homes).shape == (0, 8)
    none = torch.empty(0, 8)
    assert weigh_rows(none, homes, place=none) is none
    nowhere = torch.full((4, 2), -1, dtype=torch.int32)
    batch, homes = group_rows(FP32.quantize(ROWS), nowhere, WEIGHTS, (0, 1))
    assert batch.offsets.tolist() == [0]
    assert weigh_rows(torch.empty(0, 3), homes).tolist() == torch.zeros(4, 3).tolist()
    place = torch.full((4, 3), 7.0)
    assert weigh_rows(torch.empty(0, 3), homes, place=place) is place and not place.any()


@pytest.mark.parametrize(
    ("rows", "top_k", "slots", "row_align"),
    [(1, 1, 1, 1), (7, 3, 5, 1), (13, 8, 6, 4), (40, 2, 64, 16), (5, 2, 9, 128), (3, 4, 70000, 1)],
)
def test_devices_without_kernels_of_ours_group_as_the_host_does(
    rows: int, top_k: int, slots: int, row_align: int
) -> None:
    draw = torch.Generator().manual_seed(rows)
    chosen = torch.rand(rows, max(slots, top_k) + 3, generator=draw).argsort(dim=1)[:, :top_k].int()
    chosen = torch.where(chosen < slots, chosen, -1)
    whole = torch.randint(1, 9, (rows, top_k + 8), generator=draw).float()  # their sums are exact
    weights = torch.where(chosen < 0, float("nan"), whole[:, 8:])
    packed, spec = FP32.quantize(whole[:, :8].contiguous()), (slots, row_align)
    on_host, by_operations = (
        made(packed, chosen, weights, spec) for made in (group_rows, _grouped_by_operations)
    )
    assert torch.equal(on_host[0].counts, by_operations[0].counts)
    assert torch.equal(on_host[0].offsets, by_operations[0].offsets)
    assert torch.equal(weighed(*on_host), weighed(*by_operations))


def weighed(batch: ExpertBatch, homes: Homes) -> torch.Tensor:
    """Each row by its own slots' numbers, as an expert's answer would be; rows of no slot are NaN."""
    outputs = torch.full((homes.capacity, 8), float("nan"))
    for slot, (first, count) in enumerate(zip(batch.offsets.tolist(), batch.counts.tolist(), strict=False)):
        outputs[first : first + count] = batch.tokens.parts[0][first : first + count] * (slot + 1)
    return weigh_rows(outputs, homes)


def test_weighing_names_a_wrong_row_count() -> None:
    _, homes = group_rows(FP32.quantize(ROWS), SLOTS, WEIGHTS, (3, 1))
    with pytest.raises(ValueError, match="outputs have 5 rows; the dispatched batch has 4"):
        weigh_rows(torch.zeros(5, 3), homes)


@pytest.mark.parametrize(
    ("rows", "top_k", "slots", "row_align"), [(7, 3, 2, 4), (1, 1, 8, 128), (16, 8, 64, 16), (5, 2, 9, 1)]
)
def test_capacity_holds_the_worst_routing(rows: int, top_k: int, slots: int, row_align: int) -> None:
    """The most wasteful routings: all rows to the same slots, and rows spread over as many as can be."""
    copies = min(top_k, slots)
    same = torch.arange(copies).expand(rows, copies)
    spread = (torch.arange(rows * copies) % slots).view(rows, copies)
    for chosen in (same, spread):
        counts = torch.bincount(chosen.flatten(), minlength=slots)
        needed = int((-(-counts // row_align) * row_align).sum())
        assert needed < row_capacity(rows, top_k, slots, row_align), "the last row must stay spare"
    assert row_capacity(rows, top_k, slots, row_align) % row_align == 0
    assert row_capacity(0, top_k, slots, row_align) == 0, "there is no row to fill a spare one from"


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float8_e4m3fn, torch.float32])
@pytest.mark.parametrize("columns", [1, 3, 16])
def test_rows_are_taken_from_strided_tables(dtype: torch.dtype, columns: int) -> None:
    table = torch.arange(4 * 64, dtype=torch.uint8).view(4, 64)[:, : columns * dtype.itemsize].view(dtype)
    index = torch.tensor([3, 0, 3])
    taken = take_rows(table, index)
    assert taken.is_contiguous() and taken.dtype == dtype
    assert torch.equal(taken.view(torch.uint8), table.view(torch.uint8)[index])
