"""Our CUDA C++ kernels: their weights' own form and their sources without a GPU, their numbers on one."""

import itertools
from dataclasses import replace
from math import ceil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from compiler import needs_nvrtc
from error_model import bound_of, settled_rows
from gemm_pieces import in_pieces
from made_experts import Arrival, activation_named, fresh_seed, make_scheme

from moeserve.device.machine import this_machine
from moeserve.experts.batch import ExpertBatch, ExpertShape, Grouping
from moeserve.experts.kernel import KernelSpec
from moeserve.experts.kernels import KERNELS
from moeserve.experts.kernels.cuda import prefill, prefill_wide, steps
from moeserve.experts.kernels.torch_reference import TorchReference
from moeserve.quant.format import Format, Scheme
from moeserve.quant.formats.floats import BF16
from moeserve.quant.formats.fp8 import FP8_BLOCK, FP8_GROUP
from moeserve.quant.layouts import panels

FP8 = Scheme(FP8_BLOCK, FP8_GROUP)
PLAIN = Scheme(BF16, BF16)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    "counts", [(0,), (1,), (256, 257, 0, 64), (65,) * 9, (1000, 3, 255), (1,) * 40], ids=str
)
@pytest.mark.parametrize("spare", [0, 300])
def test_the_list_of_groups_has_room(counts: tuple[int, ...], spare: int) -> None:
    """A slot's rows stand in groups of at most as many as a cluster takes."""
    capacity = sum(counts) + spare
    tokens = FP8_GROUP.empty((capacity, 128))
    batch = ExpertBatch(tokens, Grouping.RAGGED, torch.tensor(counts), torch.zeros(len(counts) + 1))
    wide = (
        prefill_wide.WidePrefillStep(batch, capacity, width)
        for width in (prefill_wide.WIDE, prefill_wide.NARROW)
    )
    for step in (prefill.PrefillStep(batch, capacity), *wide):
        assert sum(ceil(count / step.cut[1]) for count in counts) <= step.limit


FORMS: list[dict[str, Any]] = [
    {"bias": bias, "fused": fused, "limited": limited, "out": out}
    for bias, fused, limited, out in itertools.product(
        (False, True), (False, True), (False, True), steps.OUTS.values()
    )
    if (fused and out == 0) or (not fused and not limited)
]


@pytest.mark.parametrize("module", [prefill, prefill_wide], ids=["prefill", "prefill_wide"])
def test_every_form_compiles(module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_nvrtc()
    from moeserve.device import nvrtc

    monkeypatch.setenv("MOESERVE_CACHE", str(tmp_path))
    for form in FORMS:
        text = steps.source(*module.SOURCES)
        for rows in (prefill_wide.WIDE.rows, prefill_wide.NARROW.rows)[: 1 + (module is prefill_wide)]:
            options = (*steps.GemmForm(**form).options, *steps.defined({"MOST_ROWS": rows}))
            assert nvrtc.compiled(text, "sm_90a", options)
    assert nvrtc.compiled(steps.source(*steps.ROWS_SOURCES), "sm_90a")


CASES = [
    (FP8, (300, 0, 129, 1, 33, 600), (608, 192), "silu", BF16),
    (FP8, (3, 0, 1, 9, 0), (144, 64), "swigluoai", FP8_GROUP),
    (FP8, (513, 65, 0, 640), (1440, 320), "swigluoai_uninterleave", FP8_GROUP),
    (FP8, (257, 70), (4096, 1024), "silu", FP8_GROUP),
    (PLAIN, (300, 0, 129, 1, 33, 600), (608, 192), "silu", BF16),
    (PLAIN, (3, 0, 1, 9, 0), (136, 72), "swigluoai", BF16),
    (PLAIN, tuple(range(1, 513, 17)), (1448, 328), "swigluoai_uninterleave", BF16),
    (PLAIN, (257, 70), (4096, 1024), "silu", FP8_GROUP),
]
NAMES = {FP8: ("cuda_fp8_many",), PLAIN: ("cuda_bf16_some", "cuda_bf16_many")}


@pytest.mark.gpu(1)
@pytest.mark.parametrize("grouping", list(Grouping))
@pytest.mark.parametrize(
    ("case", "name"), [(case, name) for case in CASES for name in NAMES[case[0]]], ids=str
)
def test_any_rows_agree_with_the_reference(
    case: tuple[Scheme, tuple[int, ...], tuple[int, int], str, Format], name: str, grouping: Grouping
) -> None:
    """Ragged segments that begin anywhere, slots without rows, sizes over a tile's edge, NaN all around."""
    if not torch.cuda.is_available() or this_machine().arch != "sm90":
        pytest.skip("needs a Hopper GPU: CUDA C++ has no interpreter")
    scheme, counts, sizes, activation, wire = case
    generator = torch.Generator().manual_seed(fresh_seed())
    for bias, dtype in itertools.product((False, True), steps.OUTS):
        shape = ExpertShape(*sizes, activation_named(activation), bias=bias)
        arrival = Arrival(counts, grouping, spare=3)
        weights = make_scheme(shape, len(counts), scheme, generator).to("cuda")
        rows = settled_rows(arrival.rows(shape.hidden, generator), scheme, wire, weights)
        batch = arrival.batch(rows, shape.hidden, wire)
        there = replace(
            batch, tokens=batch.tokens.to("cuda"), counts=batch.counts.cuda(), offsets=batch.offsets.cuda()
        )
        spec = KernelSpec(scheme, shape, dtype)
        kernel = KERNELS[name].build(spec)
        reference = TorchReference(KernelSpec(scheme, shape, torch.float32))
        found, wanted = (
            torch.cat(arrival.segments(k.apply(k.prepare(weights), there).float(), batch))
            for k in (kernel, reference)
        )
        with in_pieces():
            again = kernel.apply(kernel.prepare(weights), there).float()
        assert torch.equal(torch.cat(arrival.segments(again, batch)), found)
        carried = arrival.segments(there.tokens.dequantize(), batch)
        bound = bound_of(KERNELS[name], spec, weights, carried, wire)
        assert float((found - wanted).norm() / wanted.norm()) <= bound, (bias, dtype, bound)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(("sides", "rows", "k"), [(2, 72, 136), (1, 128, 256), (2, 64, 192), (1, 8, 16)])
@pytest.mark.parametrize("slots", [0, 3])
def test_panels_hold_every_weight_and_zeros_past_the_edges(
    dtype: torch.dtype, sides: int, rows: int, k: int, slots: int
) -> None:
    weights = torch.randn(slots, sides * rows, k).to(dtype)
    packed = panels.Panels(sides).forward(weights)
    _, _, down, across, _, width = packed.shape
    whole = packed.transpose(3, 4).reshape(slots, sides, down * panels.ROWS, across * width)
    plain = weights.view(torch.uint8) if weights.itemsize == 1 else weights
    assert width * packed.itemsize == panels.BYTES
    assert torch.equal(whole[:, :, :rows, :k], plain.view(slots, sides, rows, k))
    assert whole.count_nonzero() == plain.count_nonzero()
