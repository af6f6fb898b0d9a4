"""Records: every row-wise format in bytes and back."""

import pytest
import torch

from moeserve.dispatch.routing import Routing
from moeserve.dispatch.wire import ALIGN, ROW_WISE, Record
from moeserve.quant.formats import FORMATS

ROUTING = Routing(
    torch.tensor([[5, -1, 2], [0, 1, 7]], dtype=torch.int32),
    torch.tensor([[0.5, float("nan"), 2], [1, 3, 4]]),
    (2,),
)


@pytest.mark.parametrize("hidden", [256, 200])
@pytest.mark.parametrize("name", sorted(ROW_WISE))
def test_a_record_comes_back_bit_for_bit(name: str, hidden: int) -> None:
    record = Record(FORMATS[name], hidden, 3)
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
    assert Record(FORMATS[name], 7168, 8).nbytes == nbytes


def test_only_row_wise_formats_travel() -> None:
    assert "fp8_group128" in ROW_WISE and "fp8_block128" not in ROW_WISE
