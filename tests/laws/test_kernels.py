"""Laws of expert kernels: whatever an entry claims, its kernel computes as the reference does."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import lcm
from typing import Any

import pytest
import torch
from error_model import bound_of, settled_rows
from made_experts import Arrival, activation_named, fresh_seed, make_scheme, make_weights
from torch import Tensor

from moeserve.device.machine import machine_named, this_machine
from moeserve.experts.batch import ExpertBatch, ExpertShape, ExpertWeights, Grouping
from moeserve.experts.kernel import Kernel, KernelEntry, KernelSpec, Prepared, Problem
from moeserve.experts.kernels import KERNELS
from moeserve.experts.kernels.torch_reference import TorchReference
from moeserve.quant.format import Format, Scheme
from moeserve.quant.formats import FORMATS
from moeserve.quant.formats.floats import BF16, FLOATS, FP32
from moeserve.quant.formats.fp8 import FP8_BLOCK, FP8_GROUP
from moeserve.quant.formats.nvfp4 import nvfp4_given
from moeserve.quant.schemes import scheme_named

COUNTS = (3, 0, 1, 9, 0)


pytestmark = pytest.mark.usefixtures("one_thread")
"""The tensors are small, and threads that wait for each other cost more than they save."""


def on_devices(entry: KernelEntry, *values: object, name: str) -> Iterator[Any]:
    """Parameters of a law of `entry`: these values, and each kind of device that it may run on."""
    if "cpu" in entry.archs:
        yield pytest.param(entry, *values, "cpu", id=f"{name}-cpu")
    if entry.archs - {"cpu"}:
        yield pytest.param(entry, *values, "cuda", id=f"{name}-cuda", marks=pytest.mark.gpu(1))


def computed(entry: KernelEntry, device: str, activation: str = "silu") -> list[Scheme]:
    """What an entry computes with an activation on the machine the tests run on."""
    machine = this_machine()
    arch = "cpu" if device == "cpu" else machine.arch
    if arch not in entry.archs:
        pytest.skip(f"{entry.name} does not run on {arch}")
    if missing := entry.modules - machine.modules:
        pytest.skip(f"{entry.name} needs {', '.join(sorted(missing))}")
    usual = activation_named(activation)
    return sorted(
        (
            scheme
            for scheme in entry.fewer_schemes.get(arch, entry.schemes)
            if activation in entry.fewer_activations.get(scheme, entry.activations)
            and usual in entry.settings.get(scheme, {usual})
        ),
        key=str,
    )


FEW = 12
"""Schemes that a test of something other than numbers takes of an entry that computes many."""


def some(schemes: list[Scheme]) -> list[Scheme]:
    """All of a few, else about `FEW` of them: the plain ones, and every so many of the others."""
    plain = [scheme for scheme in schemes if scheme.weights in FLOATS.values()]
    others = [scheme for scheme in schemes if scheme not in plain]
    return plain + others[:: max(1, len(others) // FEW)]


def biased(entry: KernelEntry, scheme: Scheme) -> bool:
    """Whether an entry adds biases to such experts."""
    return scheme not in entry.unbiased


def shape_for(entry: KernelEntry, activation: str = "silu", *, bias: bool = True) -> ExpertShape:
    """Odd sizes as far as the entry allows, H over the edge of a block of 128."""
    hidden, inner = (
        multiple * -(-size // multiple) for multiple, size in zip(entry.multiple_of, (133, 19), strict=True)
    )
    return ExpertShape(hidden, inner, activation_named(activation), bias=bias)


class Case:
    """Weights, rows and a kernel of one entry for one scheme, all from one printed seed."""

    def __init__(self, entry: KernelEntry, scheme: Scheme, shape: ExpertShape, device: str) -> None:
        self.entry, self.shape, self.device = entry, shape, device
        self.generator = torch.Generator().manual_seed(fresh_seed())
        self.spec = KernelSpec(scheme, shape, torch.float32)
        self.weights = make_scheme(shape, len(COUNTS), scheme, self.generator).to(device)

    def there(self, batch: ExpertBatch) -> ExpertBatch:
        """`batch` on the case's device."""
        tokens, counts, offsets = (t.to(self.device) for t in (batch.tokens, batch.counts, batch.offsets))
        return replace(batch, tokens=tokens, counts=counts, offsets=offsets)

    def run(self, arrival: Arrival, rows: list[Tensor], kernel: Kernel, wire: str) -> list[Tensor]:
        batch = arrival.batch(rows, self.shape.hidden, FORMATS[wire])
        outputs = kernel.apply(kernel.prepare(self.weights), self.there(batch))
        assert outputs.shape == batch.tokens.shape
        assert outputs.dtype == self.spec.out_dtype
        return arrival.segments(outputs.cpu(), batch)


def arrival_for(
    entry: KernelEntry,
    grouping: Grouping,
    poison: float = float("nan"),
    counts: tuple[int, ...] = COUNTS,
) -> Arrival:
    return Arrival(counts, grouping, entry.row_align, spare=2 * entry.row_align + 1, poison=poison)


def error(found: list[Tensor], expected: list[Tensor]) -> float:
    """RMS of the difference relative to the RMS of `expected`."""
    difference = torch.cat(found).double() - torch.cat(expected).double()
    return float(difference.square().mean().sqrt() / torch.cat(expected).double().square().mean().sqrt())


def wire_of(scheme: Scheme) -> Format:
    """The scheme's activation format, or float32 where its scale is the expert's and cannot travel."""
    return scheme.activations if scheme.activations.given is None else FP32


def drawn(case: Case, arrival: Arrival, wire: Format) -> list[Tensor]:
    """Rows of each slot that kernel and reference can only round to the same codes."""
    rows = arrival.rows(case.shape.hidden, case.generator)
    return settled_rows(rows, case.spec.scheme, wire, case.weights)


def allowed(case: Case, rows: list[Tensor], wire: Format) -> float:
    """What the error of a case may be, whose rows travel as `wire`."""
    carried = [wire.quantize(own).dequantize() for own in rows]
    return bound_of(case.entry, case.spec, case.weights, carried, wire)


CLAIMS = [
    case
    for entry in KERNELS.values()
    for grouping in sorted(entry.groupings, key=lambda g: g.value)
    for activation in sorted(entry.activations)
    for case in on_devices(entry, grouping, activation, name=f"{entry.name}-{grouping.value}-{activation}")
]


@pytest.mark.parametrize(("entry", "grouping", "activation", "device"), CLAIMS)
def test_kernel_computes_what_its_entry_claims(
    entry: KernelEntry, grouping: Grouping, activation: str, device: str
) -> None:
    schemes = computed(entry, device, activation)
    for scheme, bias in product(schemes if activation == "silu" else some(schemes), (False, True)):
        if bias and not biased(entry, scheme):
            continue
        case = Case(entry, scheme, shape_for(entry, activation, bias=bias), device)
        arrival = arrival_for(entry, grouping)
        rows = drawn(case, arrival, wire_of(scheme))
        found = case.run(arrival, rows, entry.build(case.spec), wire_of(scheme).name)
        expected = expected_of(case, arrival, rows)
        assert error(found, expected) <= allowed(case, rows, wire_of(scheme)), (scheme, bias)


MANY_COUNTS = (300, 0, 129, 1, 33)
"""More rows of a slot than a tile of any kernel for few or some rows holds."""


SHARING = [case for entry in KERNELS.values() if entry.form for case in on_devices(entry, name=entry.name)]


@pytest.mark.parametrize(("entry", "device"), SHARING)
def test_kernels_that_share_a_form_compute_any_number_of_rows(entry: KernelEntry, device: str) -> None:
    """A plan gives each the rows it is the fastest with; a pinned one gets all, and answers as rightly."""
    for scheme, grouping in product(computed(entry, device), entry.groupings):
        case = Case(entry, scheme, shape_for(entry), device)
        arrival = arrival_for(entry, grouping, counts=MANY_COUNTS)
        rows = drawn(case, arrival, wire_of(scheme))
        found = case.run(arrival, rows, entry.build(case.spec), wire_of(scheme).name)
        expected = expected_of(case, arrival, rows)
        assert error(found, expected) <= allowed(case, rows, wire_of(scheme)), (scheme, grouping)


FORMS = {
    form: [entry for entry in KERNELS.values() if entry.form == form]
    for form in {entry.form for entry in KERNELS.values() if entry.form}
}


@pytest.mark.parametrize("form", sorted(FORMS))
def test_kernels_of_one_form_prepare_the_same_tensors(form: str) -> None:
    """So that each computes on what any of them prepared, and a plan may change from one to the other."""
    entries = FORMS[form]
    assert len(entries) > 1
    schemes = {scheme for entry in entries for scheme in entry.schemes}
    hidden, inner = (lcm(*(entry.multiple_of[at] for entry in entries)) for at in (0, 1))
    shape = ExpertShape(3 * hidden, 5 * inner, activation_named("silu"), bias=True)
    for scheme in sorted(schemes, key=str):
        spec = KernelSpec(scheme, shape, torch.bfloat16)
        weights = make_scheme(shape, 3, scheme, torch.Generator().manual_seed(fresh_seed()))
        able = [entry for entry in entries if scheme in entry.schemes]
        first, *others = [raw_bytes(dict(entry.build(spec).prepare(weights).per_slot)) for entry in able]
        assert all(other == first for other in others), scheme


def expected_of(case: Case, arrival: Arrival, rows: list[Tensor]) -> list[Tensor]:
    """The reference's answer; for the reference itself, the definition's."""
    if case.entry.reference:
        return truth(case, rows)
    return case.run(arrival, rows, TorchReference(case.spec), "fp32")


def truth(case: Case, rows: list[Tensor]) -> list[Tensor]:
    """What the reference itself is held to: one row at a time, in float64, from the definition."""
    scheme, weights, shape = case.spec.scheme, case.weights, case.shape
    gate_up, down = weights.gate_up.dequantize().double().cpu(), weights.down.dequantize().double().cpu()
    answers = []
    for slot, own in enumerate(rows):
        answer = torch.empty(own.shape, dtype=torch.float64)
        before, inside = scheme.activations, scheme.activations
        if scheme.activations.given and weights.input_scale is not None and weights.inner_scale is not None:
            before, inside = (
                scheme.activations.given(scale[slot].cpu())
                for scale in (weights.input_scale, weights.inner_scale)
            )
        for i, row in enumerate(own):
            x = before.quantize(row[None]).dequantize().double()
            between = x @ gate_up[slot].T
            if weights.gate_up_bias is not None:
                between += weights.gate_up_bias[slot].cpu()
            inner = shape.activation.apply(between.float())
            y = inside.quantize(inner).dequantize().double() @ down[slot].T
            answer[i] = y[0] if weights.down_bias is None else y[0] + weights.down_bias[slot].cpu()
        answers.append(answer)
    return answers


WIRES = [
    case
    for entry in KERNELS.values()
    for wire in sorted(entry.eats, key=str)
    for case in on_devices(entry, wire.name, name=f"{entry.name}-{wire.name}")
]


@pytest.mark.parametrize(("entry", "wire", "device"), WIRES)
def test_kernel_eats_every_wire_of_its_entry(entry: KernelEntry, wire: str, device: str) -> None:
    """A wire narrower than the scheme costs what the wire rounds away, and nothing more."""
    for scheme, grouping in product(some(computed(entry, device)), entry.groupings):
        case = Case(entry, scheme, shape_for(entry, bias=biased(entry, scheme)), device)
        arrival = arrival_for(entry, grouping)
        rows = drawn(case, arrival, FORMATS[wire])
        carried = [FORMATS[wire].quantize(own).dequantize() for own in rows]
        found = case.run(arrival, rows, entry.build(case.spec), wire)
        expected = expected_of(case, arrival, carried)
        assert error(found, expected) <= allowed(case, carried, FORMATS[wire]), (scheme, grouping)


ENTRIES = [pytest.param(entry, id=entry.name) for entry in KERNELS.values()]
EVERYWHERE = [case for entry in KERNELS.values() for case in on_devices(entry, name=entry.name)]


@pytest.mark.parametrize(("entry", "device"), EVERYWHERE)
def test_rows_outside_the_segments_never_leak(entry: KernelEntry, device: str) -> None:
    for scheme, grouping in product(computed(entry, device), entry.groupings):
        case = Case(entry, scheme, shape_for(entry, bias=biased(entry, scheme)), device)
        rows = arrival_for(entry, grouping).rows(case.shape.hidden, case.generator)
        clean, poisoned = (
            case.run(arrival_for(entry, grouping, poison), rows, entry.build(case.spec), wire_of(scheme).name)
            for poison in (0.0, float("nan"))
        )
        assert torch.equal(torch.cat(clean), torch.cat(poisoned)), (scheme, grouping)


@pytest.mark.parametrize(("entry", "device"), EVERYWHERE)
@pytest.mark.parametrize("counts", [(), (0, 0, 0), (0, 4)], ids=str)
def test_no_slots_no_rows_and_slots_with_none(
    entry: KernelEntry, counts: tuple[int, ...], device: str
) -> None:
    for scheme, grouping in product(computed(entry, device), entry.groupings):
        shape = shape_for(entry, bias=biased(entry, scheme))
        generator = torch.Generator().manual_seed(fresh_seed())
        weights = make_scheme(shape, len(counts), scheme, generator).to(device)
        kernel = entry.build(KernelSpec(scheme, shape, torch.bfloat16))
        arrival = Arrival(counts, grouping, entry.row_align)
        batch = arrival.batch(arrival.rows(shape.hidden, generator), shape.hidden, wire_of(scheme))
        there = ExpertBatch(
            batch.tokens.to(device), grouping, batch.counts.to(device), batch.offsets.to(device)
        )
        outputs = kernel.apply(kernel.prepare(weights), there)
        assert outputs.shape == batch.tokens.shape
        assert outputs.dtype == torch.bfloat16
        assert all(bool(own.isfinite().all()) for own in arrival.segments(outputs.cpu(), batch))


@pytest.mark.parametrize(("entry", "device"), EVERYWHERE)
def test_an_expert_prepared_alone_equals_its_slot(entry: KernelEntry, device: str) -> None:
    for scheme, bias in product(computed(entry, device), (False, True)):
        case = Case(entry, scheme, shape_for(entry, bias=bias and biased(entry, scheme)), device)
        kernel = entry.build(case.spec)
        together = kernel.prepare(case.weights)
        for slot in range(len(COUNTS)):
            alone = kernel.prepare(case.weights.rows(torch.tensor([slot], device=device))).slot(0)
            assert raw_bytes(alone) == raw_bytes(together.slot(slot)), (scheme, slot)


@pytest.mark.parametrize(("entry", "device"), EVERYWHERE)
def test_zero_experts_prepare_to_the_shapes_of_some(entry: KernelEntry, device: str) -> None:
    for scheme in computed(entry, device):
        case = Case(entry, scheme, shape_for(entry, bias=biased(entry, scheme)), device)
        kernel = entry.build(case.spec)
        none, some = kernel.prepare(case.weights.rows(slice(0, 0))), kernel.prepare(case.weights)
        assert (none.slots, some.slots) == (0, len(COUNTS))
        assert slot_shapes(none) == slot_shapes(some)


@pytest.mark.gpu(1)
@pytest.mark.parametrize(
    "entry", [entry for entry in KERNELS.values() if not entry.reference], ids=lambda entry: entry.name
)
def test_nothing_is_read_on_the_host(entry: KernelEntry) -> None:
    """The step is captured as a CUDA graph and replayed over other rows."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    for scheme, grouping in product(computed(entry, "cuda"), entry.groupings):
        case = Case(entry, scheme, shape_for(entry, bias=biased(entry, scheme)), "cuda")
        kernel, arrival = entry.build(case.spec), arrival_for(entry, grouping, poison=0.0)
        first, second = (arrival.rows(case.shape.hidden, case.generator) for _ in range(2))
        static, other = (
            case.there(arrival.batch(own, case.shape.hidden, wire_of(scheme))) for own in (first, second)
        )
        prepared = kernel.prepare(case.weights)
        expected = kernel.apply(prepared, other).clone()
        kernel.apply(prepared, static)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = kernel.apply(prepared, static)
        for into, part in zip(static.tokens.parts, other.tokens.parts, strict=True):
            into.copy_(part)
        graph.replay()
        found, wanted = (torch.cat(arrival.segments(y.cpu(), static)) for y in (outputs, expected))
        assert torch.equal(found, wanted), (scheme, grouping)


def raw_bytes(tensors: dict[str, Tensor]) -> dict[str, bytes]:
    return {
        name: t.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes() for name, t in tensors.items()
    }


def slot_shapes(prepared: Prepared) -> dict[str, tuple[torch.dtype, torch.Size]]:
    return {name: (tensor.dtype, tensor.shape[1:]) for name, tensor in prepared.per_slot.items()}


def test_plain_weights_are_served_in_the_dtype_asked_for() -> None:
    entry = KERNELS["torch_grouped_mm"]
    shape = shape_for(entry)
    weights = make_weights(shape, 2, BF16, torch.Generator().manual_seed(fresh_seed()))
    prepared = entry.build(KernelSpec(Scheme(FP32, FP32), shape, torch.float32)).prepare(weights)
    assert prepared.per_slot["gate_up"].dtype == torch.float32
    assert torch.equal(prepared.per_slot["gate_up"], weights.gate_up.parts[0].float())


def misfits(shape: ExpertShape, weights: ExpertWeights) -> dict[str, ExpertWeights]:
    """Weights that do not fit, by the message that says so."""
    other = FP8_BLOCK.quantize(weights.gate_up.dequantize())
    rows = shape.gate_up_rows
    return {
        rf"gate_up must be \[e, {rows}, {shape.hidden}\]; found": replace(weights, gate_up=weights.down),
        "gate_up is stored as fp8_block128; scheme bf16 needs bf16": replace(weights, gate_up=other),
        "down_bias is missing, and the expert's shape says bias=True": replace(weights, down_bias=None),
        "static activation scales were given": replace(weights, input_scale=torch.ones(2)),
    }


@pytest.mark.parametrize("entry", ENTRIES)
def test_weights_that_do_not_fit_are_named(entry: KernelEntry) -> None:
    shape = shape_for(entry)
    weights = make_weights(shape, 2, BF16, torch.Generator().manual_seed(0))
    kernel = entry.build(KernelSpec(Scheme(BF16, BF16), shape, torch.bfloat16))
    for message, misfit in misfits(shape, weights).items():
        with pytest.raises(ValueError, match=message):
            kernel.prepare(misfit)


def test_static_schemes_need_their_scales() -> None:
    scheme = scheme_named("nvfp4 x nvfp4_static")
    shape = shape_for(KERNELS["torch_reference"], bias=False)
    weights = make_scheme(shape, 2, scheme, torch.Generator().manual_seed(0))
    kernel = TorchReference(KernelSpec(scheme, shape, torch.bfloat16))
    with pytest.raises(ValueError, match=r"nvfp4_static activations need inner_scale \[2\]; it is missing"):
        kernel.prepare(replace(weights, inner_scale=None))
    with pytest.raises(ValueError, match=r"need input_scale \[2\]; it is of shape \[1\]"):
        kernel.prepare(replace(weights, input_scale=torch.ones(1)))
    assert kernel.prepare(weights).per_slot["input_scale"].shape == (2,)


def test_nvfp4_activations_are_rounded_with_the_scale_of_their_expert() -> None:
    """The emulation contract, spelled out: fake-quantize, a plain expert, fake-quantize, a plain expert."""
    scheme = scheme_named("nvfp4 x nvfp4_static")
    shape = ExpertShape(64, 32, activation_named("silu"))
    weights = make_scheme(shape, 1, scheme, torch.Generator().manual_seed(1))
    weights = replace(weights, input_scale=torch.tensor([0.002]), inner_scale=torch.tensor([0.003]))
    kernel = TorchReference(KernelSpec(scheme, shape, torch.float32))
    arrival = Arrival((5,), Grouping.RAGGED)
    rows = arrival.rows(64, torch.Generator().manual_seed(2))
    found = kernel.apply(kernel.prepare(weights), arrival.batch(rows, 64, FP32))
    x = nvfp4_given(torch.tensor(0.002)).quantize(rows[0]).dequantize()
    inner = shape.activation.apply(x @ weights.gate_up.dequantize()[0].T)
    inner = nvfp4_given(torch.tensor(0.003)).quantize(inner).dequantize()
    assert torch.equal(found, inner @ weights.down.dequantize()[0].T)


def problem(scheme: Scheme, shape: ExpertShape) -> Problem:
    return Problem(scheme, BF16, shape, experts=8, lanes=4, owners=4, top_k=2, lane_rows=64)


def test_refusals_name_the_value_and_the_way_out() -> None:
    entry, h200 = KERNELS["torch_grouped_mm"], machine_named("h200")
    plain = ExpertShape(7168, 2001, activation_named("silu"))
    refused = entry.refuses(problem(Scheme(BF16, BF16), plain), machine_named("cpu"))
    assert refused == "H=7168 and I=2001 must be multiples of 8 and 8"
    shape = shape_for(entry)
    assert entry.refuses(problem(Scheme(FP32, FP32), shape), h200) == "computes bf16 on sm90, not fp32"
    assert entry.refuses(problem(Scheme(BF16, BF16), shape), h200) is None
    fp8 = entry.refuses(problem(Scheme(FP8_BLOCK, FP8_GROUP), shape), machine_named("cpu"))
    assert fp8 == "computes bf16, fp16, fp32 on cpu, not fp8_block128 x fp8_group128"
    assert entry.refuses(problem(Scheme(BF16, BF16), shape), machine_named("mi300x")) == (
        "runs on cpu, sm100, sm103, sm90, not on gfx942"
    )


def test_the_reference_computes_every_pair_of_formats() -> None:
    entry = KERNELS["torch_reference"]
    assert entry.reference
    assert {Scheme(form, form) for form in FLOATS.values()} <= entry.schemes
    assert Scheme(FP8_BLOCK, FP8_GROUP) in entry.schemes
    assert {scheme.weights for scheme in entry.schemes} == set(FORMATS.values())
