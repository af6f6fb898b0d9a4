"""The kernel for some rows a slot on four-bit weights: its forms without a GPU, its numbers on one."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compiler import needs_nvrtc
from error_model import bound_of
from made_experts import Arrival, activation_named, fresh_seed, make_scheme
from torch import Tensor

from moeserve.device.machine import this_machine
from moeserve.experts.batch import ExpertShape, Grouping
from moeserve.experts.kernel import KernelSpec
from moeserve.experts.kernels import KERNELS
from moeserve.experts.kernels.cuda import decode_codes
from moeserve.experts.kernels.cuda.decode_codes import DecodeForm
from moeserve.experts.kernels.cuda.steps import source
from moeserve.experts.kernels.torch_reference import TorchReference
from moeserve.quant.format import Format, Scheme
from moeserve.quant.formats.floats import BF16
from moeserve.quant.formats.fp8 import FP8_GROUP
from moeserve.quant.formats.mx import MXFP4
from moeserve.quant.formats.nvfp4 import NVFP4

pytestmark = pytest.mark.usefixtures("one_thread")

ALL_ROWS = sorted({8, 32} | {rows for _, rows in decode_codes.ROWS})


@pytest.mark.parametrize("rows", ALL_ROWS)
def test_every_form_fits_a_multiprocessor_and_has_a_ring(rows: int) -> None:
    form = DecodeForm(rows)
    assert form.shared <= decode_codes.MOST_SHARED
    assert form.stages >= 3


@pytest.mark.parametrize("rows", ALL_ROWS)
def test_every_form_compiles(rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_nvrtc()
    from moeserve.device import nvrtc

    monkeypatch.setenv("MOESERVE_CACHE", str(tmp_path))
    for bias, limited, out in ((False, False, torch.bfloat16), (True, True, torch.float32)):
        form = DecodeForm(rows, bias=bias, limited=limited, out=out)
        assert nvrtc.compiled(source(*decode_codes.SOURCES), "sm_90a", form.options)


CASES: list[tuple[tuple[int, ...], tuple[int, int], str, Format]] = [
    ((3, 0, 1, 9, 0), (160, 64), "silu", BF16),
    ((8, 33, 0, 16, 65, 1, 24), (608, 192), "swigluoai", BF16),
    ((0,) * 70 + (5, 0, 17) + (1,) * 40, (288, 64), "swigluoai_uninterleave", FP8_GROUP),
    ((2, 1), (2048, 512), "silu", FP8_GROUP),
    ((17, 9, 30, 1) * 16, (128, 1408), "silu", BF16),
    ((0, 0, 0), (256, 64), "silu", BF16),
]


@pytest.mark.gpu(1)
@pytest.mark.parametrize("weights", [NVFP4, MXFP4], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{len(case[0])}-{case[1]}-{case[2]}")
def test_some_rows_agree_with_the_reference(
    weights: Format,
    case: tuple[tuple[int, ...], tuple[int, int], str, Format],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Any count in any slot, more than a tile holds too; sizes over a stage's edge, NaN all around."""
    if not torch.cuda.is_available() or this_machine().arch != "sm90":
        pytest.skip("needs a Hopper GPU: CUDA C++ has no interpreter")
    counts, sizes, activation, wire = case
    scheme = Scheme(weights, BF16)
    generator = torch.Generator().manual_seed(fresh_seed())
    used: list[int] = []
    made_of: list[int] = []
    launched = decode_codes.step

    def step(form: DecodeForm, *given: Any) -> Tensor:
        made_of.append(form.rows)
        return launched(form, *given)

    monkeypatch.setattr(decode_codes, "step", step)
    for bias, dtype in ((False, torch.float32), (True, torch.bfloat16), (True, torch.float16)):
        shape = ExpertShape(*sizes, activation_named(activation), bias=bias)
        made = make_scheme(shape, len(counts), scheme, generator).to("cuda")
        spec = KernelSpec(scheme, shape, dtype)
        kernel = KERNELS["cuda_fp4_some"].build(spec)
        prepared = kernel.prepare(made)
        reference = TorchReference(KernelSpec(scheme, shape, torch.float32))
        for grouping in Grouping:
            arrival = Arrival(counts, grouping, spare=3)
            batch = arrival.batch(arrival.rows(shape.hidden, generator), shape.hidden, wire)
            there = replace(
                batch,
                tokens=batch.tokens.to("cuda"),
                counts=batch.counts.cuda(),
                offsets=batch.offsets.cuda(),
            )
            answer = reference.apply(reference.prepare(made), there)
            wanted = torch.cat(arrival.segments(answer, batch))
            carried = arrival.segments(there.tokens.dequantize(), batch)
            bound = bound_of(KERNELS["cuda_fp4_some"], spec, made, carried, wire)
            for rows in ALL_ROWS:
                monkeypatch.setattr(decode_codes, "ROWS", ((float("inf"), rows),))
                for _ in range(2):  # the counts that a launch keeps are cleared
                    found = torch.cat(arrival.segments(kernel.apply(prepared, there).float(), batch))
                    assert len(found) == sum(counts)
                    off = float((found - wanted).norm())
                    assert off <= bound * float(wanted.norm()), (rows, grouping, dtype)
                    used.append(rows)
    assert made_of == used
