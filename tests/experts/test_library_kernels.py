"""Rows for libraries nobody has here: against stand-ins with the libraries' own signatures and arithmetic.

A stand-in reads the packed tensors it is handed by its own formulas, so a wrong layout, order or scale is a
wrong answer. What ran on hardware says so in its row; what is here shows that the calls are the right ones.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from made_experts import Arrival, activation_named, fresh_seed, make_scheme
from torch import Tensor

from moeserve.device.machine import machine_named
from moeserve.experts.activation import Activation
from moeserve.experts.batch import ExpertShape, ExpertWeights, Grouping
from moeserve.experts.kernel import KernelEntry, KernelSpec, Prepared, Problem
from moeserve.experts.kernels import KERNELS, deep_gemm
from moeserve.experts.kernels.support.library import LibraryStep, biases
from moeserve.quant.format import Format, Scheme
from moeserve.quant.formats.floats import BF16
from moeserve.quant.formats.mx import MXFP4, MXFP8
from moeserve.quant.schemes import scheme_named

pytestmark = pytest.mark.usefixtures("one_thread")

FAKES = Path(__file__).parents[1] / "support" / "fake_kernels"
LIBRARIES = (
    "torch_scaled_grouped_mm",
    "deep_gemm",
    "flashinfer_cutlass",
    "flashinfer_trtllm",
    "flashinfer_cutedsl",
    "triton_kernels",
    "aiter",
)
COUNTS = (3, 0, 1, 9, 0)
BOUND = 1e-2
"""RMS error relative to the RMS of what is expected: answers are bf16, and codes at an edge may turn."""

ONE_CODE = 6e-2
"""By how much of its row one large code that has turned may move that."""

BF16_BIASES = {"flashinfer_cutlass"}
"""Libraries that take biases in the answers' dtype."""


@pytest.fixture(autouse=True)
def libraries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The stand-ins, importable while a test runs; torch's own call replaced by one that runs on a CPU."""
    monkeypatch.syspath_prepend(str(FAKES))
    monkeypatch.setattr(F, "scaled_grouped_mm", scaled_grouped_mm)
    yield
    for name in list(sys.modules):
        if name.partition(".")[0] in {path.stem for path in FAKES.iterdir()}:
            del sys.modules[name]


def scaled_grouped_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    scale_a: Tensor,
    scale_recipe_a: F.ScalingType,
    scale_b: Tensor,
    scale_recipe_b: F.ScalingType,
    swizzle_a: object = None,
    swizzle_b: object = None,
    bias: Tensor | None = None,
    offs: Tensor | None = None,
    output_dtype: torch.dtype = torch.bfloat16,
    contraction_dim: tuple[int, ...] = (),
    use_fast_accum: bool = False,
) -> Tensor:
    """torch's row-wise kernel: its signature, and what it demands of operands and scales."""
    assert scale_recipe_a == scale_recipe_b == F.ScalingType.RowWise
    assert mat_a.dtype == mat_b.dtype == torch.float8_e4m3fn
    assert mat_b.stride(-2) == 1, "the second operand is column-major"
    assert bias is None and offs is not None and offs.dtype == torch.int32
    assert scale_a.shape == mat_a.shape[:1] and scale_b.shape == (mat_b.shape[0], mat_b.shape[2])
    out = torch.full((mat_a.shape[0], mat_b.shape[2]), torch.nan)
    start = 0
    for slot, end in enumerate(offs.tolist()):
        own = slice(start, end)
        out[own] = (mat_a[own].float() @ mat_b[slot].float()) * scale_a[own, None] * scale_b[slot]
        start = end
    return out.to(output_dtype)


def test_torch_takes_the_call_that_its_stand_in_takes() -> None:
    stand_in = inspect.signature(scaled_grouped_mm).parameters
    real = inspect.signature(REAL_SCALED_GROUPED_MM).parameters
    assert list(stand_in) == list(real)


REAL_SCALED_GROUPED_MM = F.scaled_grouped_mm


def shape_of(entry: KernelEntry, scheme: Scheme, activation: Activation, *, bias: bool) -> ExpertShape:
    """Sizes with more than one tile of everything, as small as the row allows."""
    h, i = entry.looser.get(scheme, entry.multiple_of)
    hidden, inner = (-(-size // by) * by for size, by in ((144, h), (96, i)))
    return ExpertShape(hidden, inner, activation, bias=bias)


def names_of(entry: KernelEntry, scheme: Scheme) -> list[str]:
    """A row's activations for a scheme: those that libraries compute; of ours, one of each kind."""
    names = entry.fewer_activations.get(scheme, entry.activations)
    few = {"silu", "swigluoai", "relu2_no_mul"}
    return sorted(names if len(names) < 6 else few)


def wire_of(entry: KernelEntry, scheme: Scheme) -> Format:
    """The scheme's own format where the row eats it."""
    return scheme.activations if scheme.activations in entry.eats else BF16


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def close(found: Tensor, expected: Tensor, weights: ExpertWeights) -> bool:
    """Whether they are alike, but for one large inner value that sums in another order put at the next code:
    the row is then off along one column of its expert's down, and along no other.
    """
    if error(found, expected) <= BOUND:
        return True
    off = found - expected
    row = int((off.norm(dim=1) / expected.norm(dim=1)).argmax())
    slot = int(torch.repeat_interleave(torch.tensor(COUNTS))[row])
    down = weights.rows(slice(slot, slot + 1)).down.dequantize()[0]
    along = off[row] @ down / down.norm(dim=0)
    turned = int(along.abs().argmax())
    own = down[:, turned] / down[:, turned].norm() * along[turned]
    if own.norm() > ONE_CODE * expected[row].norm():
        return False
    found = found.clone()
    found[row] -= own
    return error(found, expected) <= BOUND


def answers(
    entry: KernelEntry, scheme: Scheme, weights: ExpertWeights, shape: ExpertShape, grouping: Grouping
) -> tuple[Tensor, Tensor]:
    """A row's answers, and what is expected of the same rows, which bf16 holds exactly."""
    arrival = Arrival(COUNTS, grouping, entry.row_align, spare=2 * entry.row_align + 1)
    generator = torch.Generator().manual_seed(fresh_seed())
    rows = [own.bfloat16().float() for own in arrival.rows(shape.hidden, generator)]
    kernel = entry.build(KernelSpec(scheme, shape, torch.float32))
    batch = arrival.batch(rows, shape.hidden, wire_of(entry, scheme))
    outputs = kernel.apply(kernel.prepare(weights), batch)
    assert outputs.shape == batch.tokens.shape and outputs.dtype == torch.float32
    found = torch.cat(arrival.segments(outputs, batch))
    return found, torch.cat(
        [expected(entry, scheme, weights.rows(slice(i, i + 1)), shape, own) for i, own in enumerate(rows)]
    )


def expected(
    entry: KernelEntry, scheme: Scheme, expert: ExpertWeights, shape: ExpertShape, x: Tensor
) -> Tensor:
    """The definition, one expert at a time; the first GEMM's sums rounded to bf16 where the entry says so."""

    def rounded(values: Tensor, scale: Tensor | None) -> Tensor:
        form = scheme.activations
        if form.given is not None and scale is not None:
            form = form.given(scale)
        return form.quantize(values).dequantize()

    between = rounded(x, expert.input_scale) @ expert.gate_up.dequantize()[0].T
    between = between.bfloat16().float() if entry.bf16_sums else between
    if entry.name in BF16_BIASES:
        expert = replace(expert, **{name: bias.bfloat16().float() for name, bias in biases(expert).items()})
    if expert.gate_up_bias is not None:
        between = between + expert.gate_up_bias
    inner = rounded(shape.activation.apply(between), expert.inner_scale)
    y = inner @ expert.down.dequantize()[0].T
    return y if expert.down_bias is None else y + expert.down_bias


def made(entry: KernelEntry, scheme: Scheme, shape: ExpertShape) -> ExpertWeights:
    weights = make_scheme(shape, len(COUNTS), scheme, torch.Generator().manual_seed(fresh_seed()))
    if entry.name == "flashinfer_cutedsl" and weights.inner_scale is not None:
        return replace(weights, inner_scale=torch.full((len(COUNTS),), float(weights.inner_scale[0])))
    return weights


CASES = [
    pytest.param(KERNELS[name], scheme, id=f"{name}-{scheme.name}")
    for name in LIBRARIES
    for scheme in sorted(KERNELS[name].schemes, key=str)
]


@pytest.mark.parametrize(("entry", "scheme"), CASES)
def test_a_library_is_handed_what_it_computes_the_reference_from(entry: KernelEntry, scheme: Scheme) -> None:
    for name in names_of(entry, scheme):
        for bias in {False, scheme not in entry.unbiased}:
            shape = shape_of(entry, scheme, activation_named(name), bias=bias)
            weights = made(entry, scheme, shape)
            for grouping in entry.groupings:
                found, expected = answers(entry, scheme, weights, shape, grouping)
                assert close(found, expected, weights), (name, bias, grouping)


@pytest.mark.parametrize(("entry", "scheme"), CASES)
def test_an_expert_prepared_alone_equals_its_slot(entry: KernelEntry, scheme: Scheme) -> None:
    shape = shape_of(entry, scheme, Activation("silu"), bias=scheme not in entry.unbiased)
    weights = made(entry, scheme, shape)
    kernel = entry.build(KernelSpec(scheme, shape, torch.bfloat16))
    together, none = kernel.prepare(weights), kernel.prepare(weights.rows(slice(0, 0)))
    assert none.slots == 0
    for slot in range(len(COUNTS)):
        alone = kernel.prepare(weights.rows(torch.tensor([slot])))
        assert raw(alone, 0) == raw(together, slot)
        assert {name: part.shape[1:] for name, part in none.per_slot.items()} == {
            name: part.shape[1:] for name, part in together.per_slot.items()
        }


def raw(prepared: Prepared, slot: int) -> dict[str, bytes]:
    return {
        name: t.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for name, t in prepared.slot(slot).items()
    }


@pytest.mark.parametrize("name", LIBRARIES)
def test_no_slots_no_rows_and_slots_with_none(name: str) -> None:
    entry = KERNELS[name]
    scheme = min(entry.schemes, key=str)
    shape = shape_of(entry, scheme, Activation("silu"), bias=False)
    kernel = entry.build(KernelSpec(scheme, shape, torch.bfloat16))
    for counts in ((), (0, 0), (0, 4)):
        weights = made(entry, scheme, shape).rows(slice(0, len(counts)))
        for grouping in entry.groupings:
            arrival = Arrival(counts, grouping, entry.row_align)
            rows = arrival.rows(shape.hidden, torch.Generator().manual_seed(0))
            batch = arrival.batch(rows, shape.hidden, wire_of(entry, scheme))
            outputs = kernel.apply(kernel.prepare(weights), batch)
            assert outputs.shape == batch.tokens.shape and outputs.dtype == torch.bfloat16
            assert all(bool(own.isfinite().all()) for own in arrival.segments(outputs, batch))


@pytest.mark.parametrize(
    ("grouping", "align", "slots", "segments"),
    [
        (Grouping.RAGGED, 1, [0, 0, 2, -1], [0, 0, 2, -1]),
        (Grouping.RAGGED, 4, [0, 0, -1, -1, 2, -1, -1, -1, -1], [0, 0, 0, 0, 2, 2, 2, 2, -1]),
        (Grouping.PADDED, 1, [0, 0, -1, -1, -1, -1, 2, -1, -1], [0, 0, 0, 1, 1, 1, 2, 2, 2]),
    ],
    ids=["ragged", "aligned", "padded"],
)
def test_rows_know_their_slot_and_rows_without_one_are_not_computed(
    grouping: Grouping, align: int, slots: list[int], segments: list[int]
) -> None:
    arrival = Arrival((2, 0, 1), grouping, align, spare=1)
    rows = arrival.rows(8, torch.Generator().manual_seed(0))
    step = LibraryStep(arrival.batch(rows, 8, BF16))
    assert step.slots(-1).tolist() == slots and step.slots(-1).dtype == torch.int32
    assert step.segments(-1).tolist() == segments


def test_blackwell_gets_exponents_where_hopper_gets_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    entry, scheme = KERNELS["deep_gemm"], scheme_named("fp8_block128_ue8m0 x fp8_group128_ue8m0")
    monkeypatch.setattr(deep_gemm, "packs_scales", lambda device: True)
    shape = shape_of(entry, scheme, Activation("silu"), bias=False)
    weights = made(entry, scheme, shape)
    kernel = entry.build(KernelSpec(scheme, shape, torch.bfloat16))
    assert kernel.prepare(weights).per_slot["gate_up.scale"].dtype == torch.int32
    for grouping in entry.groupings:
        found, expected = answers(entry, scheme, weights, shape, grouping)
        assert error(found, expected) <= BOUND


def test_an_alignment_that_the_segments_do_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("deep_gemm"), "get_mk_alignment_for_contiguous_layout", lambda: 224)
    row, scheme = KERNELS["deep_gemm"], Scheme(BF16, BF16)
    shape = shape_of(row, scheme, Activation("silu"), bias=False)
    with pytest.raises(ValueError, match="aligns segments to 224 rows; set an alignment that divides 128"):
        answers(row, scheme, made(row, scheme, shape), shape, Grouping.RAGGED)


@pytest.mark.parametrize("name", ["flashinfer_cutlass", "flashinfer_trtllm"])
@pytest.mark.parametrize("activations", [BF16, MXFP8], ids=str)
def test_sizes_a_library_lacks_are_rounded_up_and_cropped(name: str, activations: Format) -> None:
    row, scheme = KERNELS[name], Scheme(MXFP4, activations)
    shape = ExpertShape(160, 96, Activation("swigluoai"), bias=True)
    found, expected = answers(row, scheme, made(row, scheme, shape), shape, Grouping.RAGGED)
    assert found.shape[1] == 160
    assert error(found, expected) <= BOUND


@pytest.mark.parametrize("name", ["flashinfer_cutlass", "flashinfer_trtllm", "flashinfer_cutedsl"])
def test_a_limit_reaches_the_library(name: str) -> None:
    row, scheme = KERNELS[name], scheme_named("mxfp4 x mxfp8")
    shape = shape_of(row, scheme, Activation("silu", limit=0.5), bias=False)
    weights = made(row, scheme, shape)
    found, expected = answers(row, scheme, weights, shape, Grouping.RAGGED)
    assert error(found, expected) <= BOUND


def test_cutedsl_takes_one_inner_scale_and_says_so() -> None:
    entry, scheme = KERNELS["flashinfer_cutedsl"], scheme_named("nvfp4 x nvfp4_static")
    shape = shape_of(entry, scheme, Activation("silu"), bias=False)
    weights = make_scheme(shape, len(COUNTS), scheme, torch.Generator().manual_seed(1))
    kernel = entry.build(KernelSpec(scheme, shape, torch.bfloat16))
    with pytest.raises(ValueError, match=r"one scale, and experts have .*; name flashinfer_trtllm"):
        kernel.prepare(weights)
    alone = [kernel.prepare(weights.rows(slice(i, i + 1))) for i in range(len(COUNTS))]
    moved = Prepared({name: torch.cat([p.per_slot[name] for p in alone]) for name in alone[0].per_slot})
    arrival = Arrival(COUNTS, Grouping.RAGGED)
    rows = arrival.rows(shape.hidden, torch.Generator().manual_seed(2))
    outputs = kernel.apply(moved, arrival.batch(rows, shape.hidden, BF16))
    assert all(
        bool(own.isnan().all()) for own in arrival.segments(outputs, arrival.batch(rows, shape.hidden, BF16))
    )


def refusal(name: str, machine: str, scheme: str, shape: ExpertShape, experts: int = 8) -> str | None:
    problem = Problem(
        scheme_named(scheme), BF16, shape, experts=experts, lanes=4, owners=4, top_k=2, lane_rows=64
    )
    return KERNELS[name].refuses(problem, machine_named(machine))


SILU = ExpertShape(7168, 2048, Activation("silu"))
LIMITED = replace(SILU, activation=Activation("silu", limit=7.0))
BIASED = replace(SILU, bias=True)
OAI = replace(SILU, activation=Activation("swigluoai"))

REFUSED = [
    ("deep_gemm", "h200", "mxfp4 x mxfp8", SILU, "computes .* on sm90, not mxfp4 x mxfp8"),
    ("deep_gemm", "b200", "fp8_block128 x fp8_group128", SILU, "computes .* on sm100, not fp8_block128 x"),
    (
        "deep_gemm",
        "h200",
        "bf16",
        replace(SILU, inner=2000),
        "I=2000 must be multiples of 128 and 128",
    ),
    ("deep_gemm", "mi300x", "bf16", SILU, "runs on sm100, sm103, sm90, not on gfx942"),
    ("torch_scaled_grouped_mm", "l40s", "fp8_channel x fp8_token", SILU, "not on sm89"),
    ("flashinfer_cutlass", "h200", "nvfp4 x nvfp4_static", SILU, "on sm90, not nvfp4 x nvfp4_static"),
    ("flashinfer_cutlass", "b200", "mxfp4 x bf16", SILU, "on sm100, not mxfp4 x bf16"),
    ("flashinfer_cutlass", "h200", "fp8_block128 x fp8_group128", BIASED, "adds no biases to fp8_block128 x"),
    ("flashinfer_cutlass", "b200", "mxfp4 x mxfp8", replace(SILU, hidden=7160), "multiples of 32 and 32"),
    ("flashinfer_trtllm", "h200", "bf16", SILU, "runs on sm100, sm103, not on sm90"),
    ("flashinfer_trtllm", "b200", "nvfp4 x nvfp4_static", LIMITED, "with fixed parameters, not Activation"),
    ("flashinfer_trtllm", "b200", "bf16", OAI, "has no activation swigluoai for bf16"),
    ("flashinfer_trtllm", "b200", "fp8_block128 x fp8_group128", BIASED, "adds no biases"),
    ("flashinfer_cutedsl", "b200", "nvfp4 x bf16", BIASED, "adds no biases"),
    ("aiter", "mi300x", "w_mxfp4_a_mxfp4", SILU, "on gfx942, not mxfp4"),
    ("aiter", "mi355x", "w_mxfp4_a_mxfp4", replace(SILU, inner=1920), "multiples of 256 and 256"),
    ("aiter", "mi300x", "bf16", LIMITED, "with fixed parameters"),
    ("aiter", "mi300x", "fp8_channel x fp8_token", BIASED, "adds no biases"),
    ("aiter", "mi300x", "fp8_channel x fp8_token", OAI, "has no activation swigluoai"),
    ("triton_kernels", "h200", "mxfp4 x mxfp8", SILU, "computes mxfp4 x bf16 on sm90"),
    ("triton_kernels", "a100", "mxfp4 x bf16", SILU, "not on sm80"),
]


@pytest.mark.parametrize(("name", "machine", "scheme", "shape", "reason"), REFUSED)
def test_limits_are_refused_by_name(
    name: str, machine: str, scheme: str, shape: ExpertShape, reason: str
) -> None:
    found = refusal(name, machine, scheme, shape)
    assert found is not None
    assert re.search(reason, found), found


def test_a_package_that_is_not_there_and_slots_that_are_too_many() -> None:
    entry = KERNELS["flashinfer_trtllm"]
    problem = Problem(Scheme(BF16, BF16), BF16, SILU, experts=8192, lanes=2, owners=2, top_k=2, lane_rows=64)
    assert entry.refuses(problem, machine_named("b200", ())) == "needs the package flashinfer"
    assert entry.refuses(problem, machine_named("b200")) == "holds at most 2044 experts a rank, not 4096"
    for name in LIBRARIES[1:]:
        assert KERNELS[name].modules, name
