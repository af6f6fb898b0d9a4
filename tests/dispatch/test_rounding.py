"""One kernel rounds rows to a wire, with the bits of the format's own rule."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from compiler import needs_nvrtc
from torch import Tensor

from moeserve.dispatch.dispatcher import DispatchSpec
from moeserve.dispatch.members import Members
from moeserve.dispatch.peers.rounding import program, rounding
from moeserve.dispatch.peers.wires import FUSED, wire_code
from moeserve.quant.format import Format
from moeserve.quant.formats import STATIC, WIRES

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def wire_of(name: str) -> Format:
    given = STATIC[name].given if name in STATIC else None
    return WIRES[name] if given is None else given(torch.tensor(0.25))


def spec(wire: str, dtype: torch.dtype, hidden: int, device: str) -> DispatchSpec:
    return DispatchSpec(
        members=Members.of_ranks(1),
        seat=0,
        slots=8,
        lane_rows=4096,
        hidden=hidden,
        top_k=2,
        wire=wire_of(wire),
        dtype=dtype,
        device=device,
    )


def rows(count: int, hidden: int, dtype: torch.dtype) -> Tensor:
    """Of all sizes, with zeros, and what is no number."""
    random = torch.Generator().manual_seed(count)
    made = torch.randn(count, hidden, generator=random)
    made *= torch.randn(count, hidden // 32, generator=random).mul(4).exp2().repeat_interleave(32, 1)
    made[0, : hidden // 2] = 0.0
    made[-1, 1], made[-1, -1] = torch.nan, torch.inf
    return made.to(dtype)


@pytest.mark.parametrize("wire", sorted(FUSED))
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_compiles(
    wire: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_nvrtc()
    from moeserve.device import nvrtc

    monkeypatch.setenv("MOESERVE_CACHE", str(tmp_path))
    made = program(wire_code(spec(wire, dtype, 7168, "cpu")))
    assert nvrtc.compiled(made.source, "sm_90a", made.options)


def test_a_cpu_rounds_by_the_formats_rule() -> None:
    made = spec("fp8_group128", torch.bfloat16, 256, "cpu")
    given = rows(3, 256, torch.bfloat16)
    for found, wanted in zip(rounding(made)(given).parts, made.wire.quantize(given).parts, strict=True):
        assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.gpu(1)
@pytest.mark.parametrize("wire", [*sorted(FUSED), "bf16", "mxfp4"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [128, 1024, 7168, 16384])
def test_rows_have_the_bits_of_the_formats_rule(wire: str, dtype: torch.dtype, hidden: int) -> None:
    made = spec(wire, dtype, hidden, "cuda")
    rounded = rounding(made)
    for count in (0, 1, 5, 300):
        given = rows(max(count, 1), hidden, dtype)[:count].cuda()
        for rows_ in (given, given[:, : hidden // 128 * 128].clone(), given.t().contiguous().t()):
            found, wanted = rounded(rows_), made.wire.quantize(rows_)
            assert found.shape == wanted.shape and found.format == wanted.format
            for one, other in zip(found.parts, wanted.parts, strict=True):
                assert one.dtype == other.dtype and one.shape == other.shape
                mine, right = (part.contiguous().view(torch.uint8) for part in (one, other))
                same = (mine == right).view(*one.shape, one.dtype.itemsize).all(-1)
                nan = one.float().isnan() & other.float().isnan()
                assert bool((same | nan).all()), (count, one.dtype)


@pytest.mark.gpu(1)
def test_a_wire_that_goes_by_anothers_name_is_rounded_by_its_own_rule() -> None:
    made = spec("fp8_group128", torch.bfloat16, 256, "cuda")
    other = replace(made.wire, encode=lambda x: WIRES["fp8_group128"].encode(x * 2))
    made = replace(made, wire=other)
    given = rows(3, 256, torch.bfloat16).cuda()[:2]
    assert torch.equal(rounding(made)(given).parts[1], other.quantize(given).parts[1])
