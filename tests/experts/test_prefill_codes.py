"""Our CUDA C++ kernels on four-bit weights: what they read without a GPU, and their numbers on one."""

import itertools
from dataclasses import replace
from math import ceil, inf
from pathlib import Path

import pytest
import torch
from compiler import needs_nvrtc
from error_model import bound_of, settled_rows
from gemm_pieces import in_pieces
from made_experts import Arrival, activation_named, fresh_seed, make_scheme
from torch import Tensor

from moeserve.device.machine import this_machine
from moeserve.experts.batch import ExpertBatch, ExpertShape, Grouping
from moeserve.experts.kernel import KernelSpec
from moeserve.experts.kernels import KERNELS, cuda_fp4, cuda_w4a8
from moeserve.experts.kernels.cuda import prefill_codes, rounded
from moeserve.experts.kernels.cuda.prefill_codes import CodesPlan, CodesStep, PrefillCodesForm
from moeserve.experts.kernels.torch_reference import TorchReference
from moeserve.experts.kernels.triton_fp4 import TritonFp4
from moeserve.quant.format import Format, Packed, Scheme
from moeserve.quant.formats.floats import BF16
from moeserve.quant.formats.fp8 import FP8_GROUP
from moeserve.quant.formats.mx import MXFP4
from moeserve.quant.formats.nvfp4 import NVFP4, NVFP4_E4M3
from moeserve.runtime.rank.warm.kernels import rooms

W4A8 = Scheme(MXFP4, FP8_GROUP)
ROUNDED_W4A8 = Scheme(NVFP4_E4M3, FP8_GROUP)

pytestmark = pytest.mark.usefixtures("one_thread")


def four_bit(form: Format, *shape: int, spread: float = 1.0) -> Packed:
    """Weights whose blocks differ in scale by about 2^spread."""
    generator = torch.Generator().manual_seed(fresh_seed())
    blocks = torch.exp2(torch.randn(*shape[:-1], shape[-1] // 32, generator=generator) * spread)
    return form.quantize(torch.randn(shape, generator=generator) * blocks.repeat_interleave(32, -1))


def in_e4m3(tensors: dict[str, Tensor], n: int, k: int) -> Tensor:
    """What `prefill_codes.cu` makes of codes and scales for E4M3 rows, byte by byte: `[e, n, k]` float32."""
    e, across, deep, _ = tensors["codes"].shape
    words, scales = tensors["codes"].long().split((64 * 64, tensors["codes"].shape[-1] - 64 * 64), dim=-1)
    codes = words.reshape(e, across, deep, 4, 2, 8, 4, 4, 4)
    s = scales.reshape(e, across, deep, 4, 2, 8, 1, 4, -1)  # one of 32 of K, or two
    b = (s + ((s >> 7) * 0xFFFF << 16)) & 0xFFFFFFFF
    low, high = (b * 0x01010100 + 0x04FFF800, b * 0x01010101 + 0x150D1008)
    magnitudes = torch.stack([each >> 8 * i & 0xFF for each in (low, high) for i in range(4)], -1)
    nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    signs = torch.cat((nibbles[..., 1::2], nibbles[..., 0::2]), -1) >> 3
    both = magnitudes.expand(*codes.shape[:-1], -1, 8).repeat_interleave(2 // s.shape[-1], -2)
    picked = both.gather(-1, (nibbles & 7).unflatten(-1, (2, 4))).flatten(-2) ^ signs << 7
    values = picked.to(torch.uint8).view(torch.float8_e4m3fn).float()
    # warp, row 3, row 0-2, lane % 4, 32 of K, half, code
    held = values.view(e, across, deep, 4, 2, 8, 4, 4, 2, 4).permute(0, 1, 3, 4, 5, 2, 7, 8, 6, 9)
    return held.reshape(e, across * 64, deep * 128)[:, :n, :k] * tensors["row_scale"][..., None]


KEPT, REST = 0x81C081C0, 0x06030603


def turned(words: Tensor, bits: int) -> Tensor:
    """32-bit words (in int64) turned left."""
    return (words << bits | words >> 32 - bits) & 0xFFFFFFFF


def halves(words: Tensor) -> Tensor:
    """Two bf16 of each 32-bit word (in int64), the low one first: `[..., 2]` float64."""
    both = torch.stack((words & 0xFFFF, words >> 16 & 0xFFFF), -1)
    return torch.where(both >= 1 << 15, both - (1 << 16), both).to(torch.int16).view(torch.bfloat16).double()


def in_bf16(tensors: dict[str, Tensor], n: int, k: int) -> Tensor:
    """What `prefill_codes.cu` makes of codes and scales for bf16 rows, word by word: `[e, n, k]` float32."""
    e, across, deep = tensors["codes"].shape[:3]
    # column + 8, warp, row 0-2, lane % 4, row 3, half of K
    w = tensors["codes"].view(e, across, 2 * deep, 2, 4, 8, 4, 2, 2).long() & 0xFFFFFFFF
    first, second = w.unbind(-1)
    rest = (first & REST) | (second & ~REST)
    left = (first, 0), (first, 4), (first, 10), (rest, 8)
    right = (second, 2), (second, 6), (second, 12), (rest, 14)
    places = [torch.stack([turned(word, bits) & KEPT for word, bits in half], -1) for half in (left, right)]
    values = halves(torch.stack(places, -2))
    s = tensors["scale"].view(e, across, 2 * deep, 1, 4, 8, 1, 2, 2).long() & 0xFFFFFFFF
    even, odd = (s & 0x0FF00FF0) | 0x70007000, (turned(s, 24) & 0x0FF00FF0) | 0x70007000
    scales = torch.stack((halves(even), halves(odd)), -1).flatten(-2)
    scaled = values * scales[..., None]
    # warp, row 3, row 0-2, block of K, half of K, 16 of it, column + 8, lane % 4, side
    held = scaled.permute(0, 1, 4, 7, 5, 2, 8, 9, 3, 6, 10)
    matrix = held.reshape(e, across * 64, deep * 256)[:, :n, :k]
    return (matrix * tensors["row_scale"].double()[..., None]).float()


@pytest.mark.parametrize("form", [MXFP4, NVFP4_E4M3], ids=str)
@pytest.mark.parametrize(("n", "k"), [(128, 256), (200, 288), (64, 32), (16, 160)])
def test_codes_decode_to_the_weights_bit_for_bit(form: Format, n: int, k: int) -> None:
    packed = four_bit(form, 2, n, k)
    assert torch.equal(in_e4m3(cuda_w4a8.pack(packed), n, k), packed.dequantize())


@pytest.mark.parametrize("form", [NVFP4, MXFP4], ids=str)
def test_codes_for_bf16_rows_decode_to_the_weights_bit_for_bit(form: Format) -> None:
    generator = torch.Generator().manual_seed(fresh_seed())
    scheme, shape = Scheme(form, BF16), ExpertShape(160, 96, activation_named("silu"))
    weights = make_scheme(shape, 2, scheme, generator)
    held = TritonFp4(KernelSpec(scheme, shape, torch.bfloat16)).prepare(weights).per_slot
    for side, packed in (("gate_up", weights.gate_up), ("down", weights.down)):
        own = {name: held[f"{side}.{name}"] for name in ("codes", "scale", "row_scale")}
        assert torch.equal(in_bf16(own, *packed.shape[1:]), packed.dequantize().float())


@pytest.mark.parametrize("form", [MXFP4, NVFP4_E4M3], ids=str)
def test_blocks_far_below_their_rows_largest_read_as_zero_and_nan_stays(form: Format) -> None:
    x = torch.ones(2, 2, 96)
    x[0, 0] *= torch.exp2(torch.tensor([0.0, -10.0, -11.0])).repeat_interleave(32)
    x[0, 1] = 0
    x[1, 1, 40] = torch.nan
    packed = form.quantize(x)
    found, wanted = in_e4m3(cuda_w4a8.pack(packed), 2, 96), packed.dequantize()
    assert torch.equal(found[0, 0, :64], wanted[0, 0, :64]) and found[0, 0, 63] != 0
    assert found[0, 0, 64:].abs().max() == 0 and wanted[0, 0, 64] != 0
    assert found[0, 1].abs().max() == 0
    assert torch.equal(found[1, 0], wanted[1, 0])
    assert bool(found[1, 1].isnan().all())


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


PLANS = [plan for plans in prefill_codes.PLANS.values() for _, plan in plans]


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize(
    "counts", [(0,), (1,), (256, 257, 0, 64), (65,) * 9, (1000, 3, 255), (1,) * 40], ids=str
)
@pytest.mark.parametrize("spare", [0, 300])
def test_the_list_of_groups_has_room(plan: CodesPlan, counts: tuple[int, ...], spare: int) -> None:
    capacity = sum(counts) + spare
    tokens = BF16.empty((capacity, 128))
    batch = ExpertBatch(tokens, Grouping.RAGGED, torch.tensor(counts), torch.zeros(len(counts) + 1))
    assert sum(ceil(count / plan.most) for count in counts) <= CodesStep(batch, capacity, plan).limit


def test_a_blocks_memory_is_within_what_hopper_gives() -> None:
    assert all(plan.shared <= 227 << 10 for plan in PLANS)


@pytest.mark.parametrize("most", [176, 0])
def test_a_group_that_copies_do_not_fill_is_refused(most: int) -> None:
    with pytest.raises(ValueError, match=f"{most} rows: give a multiple of 64"):
        replace(PLANS[0], most=most)


@pytest.mark.parametrize("kind", prefill_codes.PLANS)
def test_warming_by_doubled_rooms_meets_every_plan(kind: str) -> None:
    """Where a slot count made it skip one, the first step of that size would wait seconds for a compiler."""
    plans = prefill_codes.PLANS[kind]
    wanted = [plan for _, plan in plans]
    for slots in range(1, 257):
        found = []
        for room in rooms(slots * 1024):
            counts = torch.empty(slots, dtype=torch.int32, device="meta")
            batch = ExpertBatch(BF16.empty((room, 128), "meta"), Grouping.RAGGED, counts, counts)
            found.append(prefill_codes.plan_for(kind, batch))
        assert list(dict.fromkeys(found)) == wanted, slots


def forms(plan: CodesPlan) -> list[PrefillCodesForm]:
    return [
        PrefillCodesForm(bias=bias, fused=fused, limited=limited, out=out, plan=plan)
        for bias, fused, limited, out in itertools.product(
            (False, True), (False, True), (False, True), prefill_codes.OUTS.values()
        )
        if (fused and out == 1) or (not fused and not limited)
    ]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_every_form_compiles(plan: CodesPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_nvrtc()
    from moeserve.device import nvrtc

    monkeypatch.setenv("MOESERVE_CACHE", str(tmp_path))
    for form in forms(plan):
        assert nvrtc.compiled(prefill_codes.source(plan), "sm_90a", form.options)
    options = (f"-DMOST={plan.most}", f"-DWIDE={int(not plan.eight)}")
    assert nvrtc.compiled(rounded.source(*rounded.SOURCES), "sm_90a", options)


SMALL, LARGE = (608, 192), (2048, 1024)
CASES = [
    (scheme, counts, sizes, activation, wire)
    for scheme in (W4A8, ROUNDED_W4A8, Scheme(NVFP4, BF16), Scheme(MXFP4, BF16), cuda_fp4.ROUNDED)
    for counts, sizes, activation, wire in (
        ((300, 0, 129, 1, 33, 600), SMALL, "silu", BF16),
        ((3, 0, 1, 9, 0), (160, 64), "swigluoai", FP8_GROUP),
        (tuple(range(1, 513, 51)), (736, 320), "swigluoai_uninterleave", FP8_GROUP),
        ((257, 70), LARGE, "silu", FP8_GROUP),
    )
]


@pytest.mark.gpu(1)
@pytest.mark.parametrize("grouping", list(Grouping))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_any_rows_agree_with_the_reference(
    case: tuple[Scheme, tuple[int, ...], tuple[int, int], str, Format],
    grouping: Grouping,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ragged segments that begin anywhere, slots without rows, sizes over a tile's edge, NaN all around."""
    if not torch.cuda.is_available() or this_machine().arch != "sm90":
        pytest.skip("needs a Hopper GPU: CUDA C++ has no interpreter")
    scheme, counts, sizes, activation, wire = case
    generator = torch.Generator().manual_seed(fresh_seed())
    plans = prefill_codes.PLANS
    sizes_of_groups = range(max(map(len, plans.values())))
    entry = KERNELS["cuda_w4a8" if scheme in cuda_w4a8.ENTRY.schemes else "cuda_fp4_many"]
    for bias in (False, True):
        shape = ExpertShape(*sizes, activation_named(activation), bias=bias)
        arrival = Arrival(counts, grouping, spare=3)
        weights = make_scheme(shape, len(counts), scheme, generator).to("cuda")
        rows = settled_rows(arrival.rows(shape.hidden, generator), scheme, wire, weights)
        batch = arrival.batch(rows, shape.hidden, wire)
        there = replace(
            batch, tokens=batch.tokens.to("cuda"), counts=batch.counts.cuda(), offsets=batch.offsets.cuda()
        )
        carried = arrival.segments(there.tokens.dequantize(), batch)
        reference = TorchReference(KernelSpec(scheme, shape, torch.float32))
        answer = reference.apply(reference.prepare(weights), there)
        wanted = torch.cat(arrival.segments(answer, batch))
        for dtype, size in itertools.product(prefill_codes.OUTS, sizes_of_groups):
            one = {kind: ((inf, each[min(size, len(each) - 1)][1]),) for kind, each in plans.items()}
            monkeypatch.setattr(prefill_codes, "PLANS", one)
            spec = KernelSpec(scheme, shape, dtype)
            kernel = entry.build(spec)
            answer = kernel.apply(kernel.prepare(weights), there)
            found = torch.cat(arrival.segments(answer.float(), batch))
            with in_pieces():
                answer = kernel.apply(kernel.prepare(weights), there)
            assert torch.equal(torch.cat(arrival.segments(answer.float(), batch)), found)
            bound = bound_of(entry, spec, weights, carried, wire)
            assert float((found - wanted).norm() / wanted.norm()) <= bound, (bias, dtype, size, bound)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("shape", [(777, 2848), (1, 8), (33, 7168)])
def test_rows_go_through_e4m3_as_the_format_rounds_them(shape: tuple[int, int]) -> None:
    if not torch.cuda.is_available() or this_machine().arch != "sm90":
        pytest.skip("needs a Hopper GPU: CUDA C++ has no interpreter")
    x = torch.randn(shape, generator=torch.Generator().manual_seed(fresh_seed())).cuda().bfloat16()
    packed = FP8_GROUP.quantize(x.float())
    assert torch.equal(rounded.widen(*packed.parts), packed.dequantize().bfloat16())
    rows = len(x)
    counts, offsets = torch.tensor([rows], dtype=torch.int32), torch.tensor([0, rows], dtype=torch.int32)
    batch = ExpertBatch(BF16.quantize(x), Grouping.RAGGED, counts.cuda(), offsets.cuda())
    plans = (prefill_codes.plan_for(kind, batch) for kind in ("fp8_16", "scaled"))
    made = [CodesStep(batch, rows, plan).round(x).values for plan in plans]
    assert torch.equal(made[0].bfloat16(), made[1])  # the same codes
    # Many quotients of bf16 lie halfway between two codes, and a scale's last bit decides.
    assert int((made[0].float() != packed.parts[0].float()).sum()) <= 1 + x.numel() // 100
