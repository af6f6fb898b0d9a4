"""Our CUDA C++ kernels: their weights' own form and their sources without a GPU, their numbers on one."""

import itertools
import re
from dataclasses import replace
from importlib.resources import files
from importlib.util import find_spec
from math import ceil
from pathlib import Path

import pytest
import torch
from made_experts import Arrival, activation_named, fresh_seed, make_scheme
from torch import Tensor

from moeserve.experts.batch import ExpertBatch, ExpertShape, Grouping
from moeserve.experts.kernel import KernelSpec
from moeserve.experts.kernels import cuda_fp8, cuda_w4a8
from moeserve.experts.kernels.device import prefill
from moeserve.experts.kernels.torch_reference import TorchReference
from moeserve.experts.machine import this_machine
from moeserve.quant.format import Format, Packed, Scheme
from moeserve.quant.formats.floats import BF16
from moeserve.quant.formats.fp8 import FP8_BLOCK, FP8_GROUP
from moeserve.quant.formats.mx import MXFP4

W4A8 = Scheme(MXFP4, FP8_GROUP)
FP8 = Scheme(FP8_BLOCK, FP8_GROUP)

pytestmark = pytest.mark.usefixtures("one_thread")


def mxfp4(*shape: int, spread: float = 1.0) -> Packed:
    """Weights whose blocks differ in scale by about 2^spread."""
    generator = torch.Generator().manual_seed(fresh_seed())
    blocks = torch.exp2(torch.randn(*shape[:-1], shape[-1] // 32, generator=generator) * spread)
    return MXFP4.quantize(torch.randn(shape, generator=generator) * blocks.repeat_interleave(32, -1))


def decoded(tensors: dict[str, Tensor], n: int, k: int) -> Tensor:
    """What the device makes of records and row scales, byte by byte: `[e, n, k]` float32."""
    records = tensors["records"]
    e, across, deep, _ = records.shape
    codes, scales = records.long().split((64 * 64, 64 * 8), dim=-1)
    b, odd = scales & 0x7F, scales >> 7
    steps = (0 * b, b - 8, b, b + 4 + odd, b + 8, b + 12 + odd, b + 16, b + 20 + odd)
    magnitudes = torch.stack(steps, -1).view(e, across, deep, 64, 8, 1, 8)
    nibbles = torch.stack((codes & 15, codes >> 4), -1).view(e, across, deep, 64, 8, 2, 8)
    signs = torch.cat((nibbles[..., 1::2], nibbles[..., 0::2]), -1) >> 3
    picked = magnitudes.expand(*nibbles.shape[:-1], 8).gather(-1, nibbles & 7) | signs << 7
    values = picked.to(torch.uint8).view(torch.float8_e4m3fn).float().view(e, across, deep, 64, 128)
    matrix = values.transpose(2, 3).reshape(e, across * 64, deep * 128)[:, :n, :k]
    return matrix * tensors["row_scale"][..., None]


@pytest.mark.parametrize(("n", "k"), [(128, 256), (200, 288), (64, 32), (16, 160)])
def test_records_decode_to_the_weights_bit_for_bit(n: int, k: int) -> None:
    packed = mxfp4(2, n, k)
    assert torch.equal(decoded(cuda_w4a8.pack(packed), n, k), packed.dequantize())


def test_blocks_far_below_their_rows_largest_read_as_zero_and_nan_stays() -> None:
    x = torch.ones(1, 2, 96)
    x[0, 0] *= torch.exp2(torch.tensor([0.0, -10.0, -11.0])).repeat_interleave(32)
    x[0, 1, 40] = torch.nan
    packed = MXFP4.quantize(x)
    found, wanted = decoded(cuda_w4a8.pack(packed), 2, 96), packed.dequantize()
    assert torch.equal(found[0, 0, :64], wanted[0, 0, :64])
    assert found[0, 0, 64:].abs().max() == 0
    assert bool(found[0, 1].isnan().all())


def test_an_expert_packed_alone_equals_its_slot_and_none_packs_to_the_same_shapes() -> None:
    shape = ExpertShape(160, 64, activation_named("silu"), bias=True)
    weights = make_scheme(shape, 3, W4A8, torch.Generator().manual_seed(fresh_seed()))
    kernel = cuda_w4a8.CudaW4A8(KernelSpec(W4A8, shape, torch.bfloat16))
    together, none = kernel.prepare(weights), kernel.prepare(weights.rows(slice(0, 0)))
    for slot in range(3):
        alone = kernel.prepare(weights.rows(torch.tensor([slot]))).slot(0)
        assert all(torch.equal(alone[name], t) for name, t in together.slot(slot).items())
    assert {n: t.shape[1:] for n, t in none.per_slot.items()} == {
        n: t.shape[1:] for n, t in together.per_slot.items()
    }


@pytest.mark.parametrize(
    "counts", [(0,), (1,), (256, 257, 0, 64), (65,) * 9, (1000, 3, 255), (1,) * 40], ids=str
)
@pytest.mark.parametrize("spare", [0, 300])
def test_the_list_of_groups_has_room(counts: tuple[int, ...], spare: int) -> None:
    """A slot's units of 64 rows stand in groups of at most four of them."""
    capacity = sum(counts) + spare
    tokens = FP8_GROUP.empty((capacity, 128))
    batch = ExpertBatch(tokens, Grouping.RAGGED, torch.tensor(counts), torch.zeros(len(counts) + 1))
    groups = sum(ceil(ceil(count / prefill.UNIT) / 4) for count in counts)
    assert groups <= prefill.Step(batch, capacity).limit


FORMS = [
    prefill.Form(kind, bias=bias, fused=fused, limited=limited, out=out)
    for kind, bias, fused, limited, out in itertools.product(
        prefill.THREADS, (False, True), (False, True), (False, True), prefill.OUTS.values()
    )
    if (fused and out == 0) or (not fused and not limited)
]


def test_sources_include_no_header() -> None:
    sources = [f for f in files(prefill.__package__).iterdir() if f.name.endswith(".cu")]
    assert sources
    assert not any(re.search(r"^\s*#\s*include", source.read_text(), re.MULTILINE) for source in sources)


@pytest.mark.parametrize("kind", prefill.THREADS)
def test_every_form_compiles(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec("cuda") is None or find_spec("cuda.bindings") is None or find_spec("nvidia") is None:
        pytest.skip("needs the packages cuda-bindings and nvidia-cuda-nvrtc")
    from moeserve.experts import nvrtc

    monkeypatch.setenv("MOESERVE_CACHE", str(tmp_path))
    for form in (form for form in FORMS if form.kind == kind):
        assert nvrtc.compiled(prefill.source("prefill.cu"), "sm_90a", prefill.options(form))
    assert nvrtc.compiled(prefill.source("prefill_rows.cu"), "sm_90a")


CASES = [
    (FP8, (300, 0, 129, 1, 33, 600), (608, 192), "silu", BF16),
    (FP8, (3, 0, 1, 9, 0), (144, 64), "swigluoai", FP8_GROUP),
    (FP8, (513, 65, 0, 640), (1440, 320), "swigluoai_uninterleave", FP8_GROUP),
    (FP8, (257, 70), (4096, 1024), "silu", FP8_GROUP),
    (W4A8, (300, 0, 129, 1, 33, 600), (608, 192), "silu", BF16),
    (W4A8, (513, 65, 0, 640), (1440, 320), "swigluoai_uninterleave", FP8_GROUP),
    (W4A8, (257, 70), (4096, 1024), "silu", FP8_GROUP),
]
KERNELS = {FP8: cuda_fp8.CudaFp8, W4A8: cuda_w4a8.CudaW4A8}


@pytest.mark.gpu(1)
@pytest.mark.parametrize("grouping", list(Grouping))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_many_rows_agree_with_the_reference(
    case: tuple[Scheme, tuple[int, ...], tuple[int, int], str, Format],
    grouping: Grouping,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ragged segments that begin anywhere, slots without rows, sizes over a tile's edge, NaN all around."""
    if not torch.cuda.is_available() or this_machine().arch != "sm90":
        pytest.skip("needs a Hopper GPU: CUDA C++ has no interpreter")
    monkeypatch.setattr(cuda_fp8, "MANY_ROWS", 0)
    scheme, counts, sizes, activation, wire = case
    generator = torch.Generator().manual_seed(fresh_seed())
    for bias, dtype in itertools.product((False, True), prefill.OUTS):
        shape = ExpertShape(*sizes, activation_named(activation), bias=bias)
        arrival = Arrival(counts, grouping, spare=3)
        batch = arrival.batch(arrival.rows(shape.hidden, generator), shape.hidden, wire)
        there = replace(
            batch, tokens=batch.tokens.to("cuda"), counts=batch.counts.cuda(), offsets=batch.offsets.cuda()
        )
        weights = make_scheme(shape, len(counts), scheme, generator).to("cuda")
        kernel = KERNELS[scheme](KernelSpec(scheme, shape, dtype))
        reference = TorchReference(KernelSpec(scheme, shape, torch.float32))
        found, wanted = (
            torch.cat(arrival.segments(k.apply(k.prepare(weights), there).float(), batch))
            for k in (kernel, reference)
        )
        assert float((found - wanted).norm() / wanted.norm()) <= 2e-2, (bias, dtype)
