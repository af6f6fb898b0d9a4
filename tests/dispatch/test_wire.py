"""Records: every row-wise format in bytes and back."""

import pytest
import torch

from moeserve.dispatch.libraries.travel import widened
from moeserve.dispatch.peers.wires import RowRecord
from moeserve.dispatch.permute import group_rows, take_rows, weigh_rows
from moeserve.dispatch.routing import Routing
from moeserve.dispatch.wire import ALIGN, ROW_WISE, WireRecord, row_bytes
from moeserve.quant.formats import FORMATS

ROUTING = Routing(
    torch.tensor([[5, -1, 2], [0, 1, 7]], dtype=torch.int32),
    torch.tensor([[0.5, float("nan"), 2], [1, 3, 4]]),
    (2,),
    1,
)


@pytest.mark.parametrize("hidden", [256, 200])
@pytest.mark.parametrize("name", sorted(ROW_WISE))
def test_a_record_comes_back_bit_for_bit(name: str, hidden: int) -> None:
    record = WireRecord(FORMATS[name], hidden, 3)
    rows = torch.randn(2, hidden, generator=torch.Generator().manual_seed(0))
    packed = record.pack(rows, ROUTING)
    assert packed.shape == (2, record.nbytes) and packed.dtype == torch.uint8 and record.nbytes % ALIGN == 0
    tokens, slots, weights = record.unpack(packed)
    assert torch.equal(slots, ROUTING.slots)
    assert torch.equal(weights.nan_to_num(-1), ROUTING.weights.nan_to_num(-1))
    for got, want in zip(tokens.parts, FORMATS[name].quantize(rows).parts, strict=True):
        assert got.dtype == want.dtype
        assert torch.equal(got.contiguous().view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize(
    ("name", "nbytes"),
    [("fp32", 28672 + 32 + 32), ("bf16", 14336 + 32 + 32), ("fp8_group128", 7168 + 224 + 32 + 32)],
)
def test_bytes_of_a_row(name: str, nbytes: int) -> None:
    assert WireRecord(FORMATS[name], 7168, 8).nbytes == nbytes


def test_only_row_wise_formats_travel() -> None:
    assert "fp8_group128" in ROW_WISE and "fp8_block128" not in ROW_WISE


STRIDES = {
    "dense": lambda rows, columns: (columns, 1),
    "by columns": lambda rows, columns: (1, max(rows, 1)),
    "every other": lambda rows, columns: (2 * columns, 2),
    "wide rows": lambda rows, columns: (3 * columns, 1),
    "last is 0": lambda rows, columns: (1, 0),
}
"""Strides of a table `[rows, columns]`; with 0, all columns of a row are one element."""


def _table(rows: int, columns: int, dtype: torch.dtype, strides: str) -> torch.Tensor:
    """Small numbers, all different, in a table of such strides."""
    layout = STRIDES[strides](rows, columns)
    room = torch.arange(3 * (rows + 1) * (columns + 1) + 1) % 120
    return room.to(dtype).as_strided((rows, columns), layout)


@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("columns", [1, 2, 8])
@pytest.mark.parametrize("rows", [0, 1, 3])
@pytest.mark.parametrize("dtype", [torch.int32, torch.bfloat16, torch.float8_e4m3fn])
def test_bytes_of_rows_whatever_their_strides(
    dtype: torch.dtype, rows: int, columns: int, strides: str
) -> None:
    table = _table(rows, columns, dtype, strides)
    raw = row_bytes(table)
    assert raw.shape == (rows, columns * dtype.itemsize) and raw.dtype == torch.uint8
    assert torch.equal(raw.view(dtype).float(), table.float())
    taken = take_rows(table, torch.arange(rows).flip(0))
    assert taken.dtype == dtype and torch.equal(taken.float(), table.float().flip(0))
    wide = widened(table, columns + 3)
    assert torch.equal(wide.float()[:, :columns], table.float()) and not wide.float()[:, columns:].any()


def test_bytes_of_dense_rows_are_not_copied() -> None:
    table = torch.zeros(3, 5)
    assert row_bytes(table).data_ptr() == table.data_ptr()


@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("rows", [0, 1, 2])
@pytest.mark.parametrize("name", sorted(ROW_WISE))
def test_a_lane_of_any_strides_is_packed(name: str, rows: int, top_k: int, strides: str) -> None:
    """H is one group of each format, so a row has one scale; a lane without rows has odd strides."""
    width = 128
    hidden = _table(rows, width, torch.float32, strides)
    slots, weights = (_table(rows, top_k, kind, strides) for kind in (torch.int32, torch.float32))
    record, wire = WireRecord(FORMATS[name], width, top_k), FORMATS[name]
    want = [row_bytes(part) for part in wire.quantize(hidden.clone()).parts]
    tokens, got_slots, got_weights = record.unpack(record.pack(hidden, Routing(slots, weights, (rows,), 1)))
    assert torch.equal(got_slots, slots) and torch.equal(got_weights, weights)
    alone = RowRecord(wire, width)
    for parts in (tokens.parts, alone.parts(alone.pack(hidden))):
        for part, raw in zip(parts, want, strict=True):
            assert torch.equal(row_bytes(part), raw)
    chosen = torch.zeros_like(slots).fill_(-1)
    chosen[:, 0] = 1
    batch, homes = group_rows(wire.quantize(hidden), chosen, weights, (2, 1))
    answer = weigh_rows(batch.tokens.dequantize(), homes)
    torch.testing.assert_close(answer, wire.quantize(hidden).dequantize() * weights[:, :1])
