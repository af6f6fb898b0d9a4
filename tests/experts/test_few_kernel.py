"""The kernel for few rows a slot: its forms without a GPU, its numbers on one."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from compiler import needs_nvrtc
from error_model import bound_of, settled_rows
from made_experts import Arrival, activation_named, fresh_seed, make_scheme

from moeserve.device.machine import this_machine
from moeserve.experts.batch import ExpertShape, Grouping
from moeserve.experts.kernel import KernelSpec
from moeserve.experts.kernels import KERNELS
from moeserve.experts.kernels.cuda import few
from moeserve.experts.kernels.support import hopper
from moeserve.experts.kernels.tiles import FewTile, few_tile_for
from moeserve.experts.kernels.torch_reference import TorchReference
from moeserve.quant.format import Format, Scheme
from moeserve.quant.formats.floats import BF16
from moeserve.quant.formats.fp8 import FP8_BLOCK, FP8_GROUP
from moeserve.quant.formats.mx import MXFP4
from moeserve.quant.formats.nvfp4 import NVFP4
from moeserve.runtime.rank.warm.kernels import rooms

pytestmark = pytest.mark.usefixtures("one_thread")

ENTRIES = {
    weights: KERNELS[name]
    for weights, name in (
        (NVFP4, "cuda_fp4_few"),
        (MXFP4, "cuda_fp4_few"),
        (FP8_BLOCK, "cuda_fp8_few"),
        (BF16, "cuda_bf16_few"),
    )
}
DEVICES = ("NVIDIA H200", "NVIDIA H100 80GB HBM3")


def tiles(kind: str) -> list[FewTile]:
    """Those of the table."""
    found = (few_tile_for(device, kind, rows) for device in DEVICES for rows in rooms(4096))
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("kind", few.KINDS)
def test_every_tile_fits_a_multiprocessor_and_its_ring_of_rows_the_shares_of_k(kind: str) -> None:
    """A place in the ring of rows is filled by one helper and, within a tile, read by one share of K."""
    assert tiles(kind)
    for tile in tiles(kind):
        assert few.FewForm(kind, tile).shared <= 227 << 10
        assert tile.pieces % few.HELPER_WARPS == 0
        assert tile.pieces % tile.workers == 0
        assert tile.stages >= 2
        assert tile.rows in (8, 16, 24, 32)
        assert tile.workers in (2, 4)


@pytest.mark.parametrize("kind", few.KINDS)
def test_a_rank_meets_every_tile_before_it_serves(kind: str) -> None:
    asked = {few_tile_for("NVIDIA H200", kind, rows) for rows in range(1, 4097)}
    assert asked == set(tiles(kind))


@pytest.mark.parametrize("kind", few.KINDS)
def test_every_form_compiles(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_nvrtc()
    from moeserve.device import nvrtc

    monkeypatch.setenv("MOESERVE_CACHE", str(tmp_path))
    for tile in tiles(kind):
        for bias, limited, out in ((False, False, torch.bfloat16), (True, True, torch.float32)):
            form = few.FewForm(kind, tile, bias=bias, limited=limited, out=out, rounds=kind == "fp8" and bias)
            assert nvrtc.compiled(few.source(*few.sources(kind)), "sm_90a", few.options(form))


Case = tuple[tuple[int, ...], tuple[int, int], str, Format]

CASES: list[Case] = [
    ((3, 0, 1, 9, 0), (160, 32), "silu", BF16),
    ((8, 33, 0, 16, 65, 1, 24), (608, 192), "swigluoai", BF16),
    ((0,) * 70 + (5, 0, 17) + (1,) * 40, (288, 96), "swigluoai_uninterleave", FP8_GROUP),
    ((2, 1), (2048, 512), "silu", FP8_GROUP),
    ((0,) * 70 + (5, 0, 17) + (1,) * 40, (288, 192), "swigluoai_uninterleave", FP8_GROUP),
    ((9, 2), (2560, 2304), "silu", FP8_GROUP),
    ((0, 0, 0), (256, 64), "silu", BF16),
]
MANY_TILES: Case = ((17, 9, 30, 1) * 16, (128, 1408), "silu", FP8_GROUP)
"""So many that the FP8 form rounds inner rows as it makes them."""


def named(given: Format | Case) -> str:
    return "-".join(map(str, (len(given[0]), *given[1:]))) if isinstance(given, tuple) else str(given)


FORMS = [
    (weights, case)
    for case in CASES
    for weights, entry in ENTRIES.items()
    if case[1][1] % entry.multiple_of[1] == 0
] + [(FP8_BLOCK, MANY_TILES)]


@pytest.mark.gpu(1)
@pytest.mark.parametrize(("weights", "case"), FORMS, ids=named)
def test_few_rows_agree_with_the_reference(
    weights: Format,
    case: Case,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Any count in any slot, more than a tile holds too; sizes over a piece's edge and over the ring's.

    All around is NaN.
    """
    if not torch.cuda.is_available() or this_machine().arch != "sm90":
        pytest.skip("needs a Hopper GPU: CUDA C++ has no interpreter")
    counts, sizes, activation, wire = case
    kind = {BF16: "bf16", FP8_BLOCK: "fp8"}.get(weights, "fp4")
    scheme = Scheme(weights, FP8_GROUP if weights == FP8_BLOCK else BF16)
    generator = torch.Generator().manual_seed(fresh_seed())
    used: list[FewTile] = []

    def given(tile: FewTile) -> FewTile:
        used.append(tile)
        return tile

    for bias, dtype in zip((False, True, True), few.OUTS, strict=True):
        shape = ExpertShape(*sizes, activation_named(activation), bias=bias)
        made = make_scheme(shape, len(counts), scheme, generator).to("cuda")
        spec = KernelSpec(scheme, shape, dtype)
        kernel = ENTRIES[weights].build(spec)
        prepared = kernel.prepare(made)
        reference = TorchReference(KernelSpec(scheme, shape, torch.float32))
        for grouping in Grouping:
            arrival = Arrival(counts, grouping, spare=3)
            rows = settled_rows(arrival.rows(shape.hidden, generator), scheme, wire, made)
            batch = arrival.batch(rows, shape.hidden, wire)
            there = replace(
                batch,
                tokens=batch.tokens.to("cuda"),
                counts=batch.counts.cuda(),
                offsets=batch.offsets.cuda(),
            )
            answer = reference.apply(reference.prepare(made), there)
            wanted = torch.cat(arrival.segments(answer, batch))
            carried = arrival.segments(there.tokens.dequantize(), batch)
            bound = bound_of(ENTRIES[weights], spec, made, carried, wire)
            for tile in tiles(kind):
                monkeypatch.setattr(hopper, "few_tile_for", lambda *_, tile=tile: given(tile))
                found = torch.cat(arrival.segments(kernel.apply(prepared, there).float(), batch))
                assert len(found) == sum(counts)
                assert float((found - wanted).norm()) <= bound * float(wanted.norm()), (tile, grouping, dtype)
    assert set(used) == set(tiles(kind))
