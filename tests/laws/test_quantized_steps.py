"""Laws of a quantized layer's step on the CPU: how often weights are decoded, and where rows are rounded."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from dispatcher_cases import law_cases
from made_experts import Arrival, fresh_seed, make_scheme
from torch import Tensor

from moeserve.device.machine import machine_named
from moeserve.dispatch.backends import DISPATCHERS, local
from moeserve.dispatch.dispatcher import DispatchSpec
from moeserve.dispatch.members import Members
from moeserve.dispatch.routing import Routing
from moeserve.experts.activation import Activation
from moeserve.experts.batch import ExpertShape, Grouping
from moeserve.experts.kernel import KernelSpec, Problem
from moeserve.experts.kernels import KERNELS
from moeserve.experts.kernels.torch_reference import TorchReference
from moeserve.quant.format import Format, Parts, Scheme
from moeserve.quant.formats import WIRES
from moeserve.quant.formats.floats import BF16, FLOATS, FP32
from moeserve.quant.schemes import SCHEMES
from moeserve.runtime.planning.plan import make_plan

SHAPE = ExpertShape(256, 128, Activation("silu"))
COUNTS = (40, 0, 1, 25, 0)
ACTIVE = sum(count > 0 for count in COUNTS)

QUANTIZED = {name: scheme for name, scheme in SCHEMES.items() if scheme.weights not in FLOATS.values()}
TRAVELLING = {name: scheme for name, scheme in QUANTIZED.items() if scheme.activations in WIRES.values()}
ROUNDED = {name: scheme for name, scheme in TRAVELLING.items() if scheme.activations not in FLOATS.values()}


pytestmark = pytest.mark.usefixtures("one_thread")
"""The tensors are small."""


def planned(scheme: Scheme, model: Format) -> tuple[Problem, str, Format]:
    """What an unpinned plan chooses on a CPU: problem, kernel and wire."""
    problem = Problem(scheme, model, SHAPE, experts=len(COUNTS), lanes=1, owners=1, top_k=2, lane_rows=64)
    plan = make_plan(problem, machine_named("cpu"), KERNELS, DISPATCHERS)
    return problem, plan.kernel.name, plan.dispatchers[0].wire


def counted(form: Format, calls: list[torch.Size]) -> Format:
    """The format, noting the shape of everything that it decodes."""

    def decode(parts: Parts, shape: torch.Size) -> Tensor:
        calls.append(shape)
        return form.decode(parts, shape)

    return replace(form, decode=decode)


@pytest.mark.parametrize("name", QUANTIZED)
def test_weights_are_decoded_once_for_each_active_expert(name: str) -> None:
    """By the reference, which serves a scheme on a CPU where no kernel computes on its codes."""
    scheme = QUANTIZED[name]
    _, _, wire = planned(scheme, BF16)
    generator, calls = torch.Generator().manual_seed(fresh_seed()), list[torch.Size]()
    noted = Scheme(counted(scheme.weights, calls), scheme.activations)
    kernel = TorchReference(KernelSpec(noted, SHAPE, torch.bfloat16))
    prepared = kernel.prepare(make_scheme(SHAPE, len(COUNTS), scheme, generator))
    assert not calls, "weights stay as they are stored"
    arrival = Arrival(COUNTS, Grouping.RAGGED)
    for step in (1, 2):
        kernel.apply(prepared, arrival.batch(arrival.rows(SHAPE.hidden, generator), SHAPE.hidden, wire))
        assert sorted(calls) == sorted(
            [torch.Size((SHAPE.gate_up_rows, SHAPE.hidden)), torch.Size((SHAPE.hidden, SHAPE.inner))]
            * (ACTIVE * step)
        )


@pytest.mark.parametrize("model", [FP32, BF16], ids=str)
@pytest.mark.parametrize("name", ROUNDED)
def test_rounding_before_dispatch_is_rounding_after(name: str, model: Format) -> None:
    """One step through dispatcher and kernel, rows rounded by the sender or by the kernel: the same bits."""
    scheme = ROUNDED[name]
    problem, kernel_name, wire = planned(scheme, model)
    assert wire == scheme.activations, "the plan sends what the scheme rounds to"
    generator = torch.Generator().manual_seed(fresh_seed())
    kernel = KERNELS[kernel_name].build(KernelSpec(scheme, SHAPE, model.dtype))
    prepared = kernel.prepare(make_scheme(SHAPE, len(COUNTS), scheme, generator))
    hidden = torch.randn(33, SHAPE.hidden, generator=generator).to(model.dtype)
    scores, slots = torch.rand(33, len(COUNTS), generator=generator).topk(problem.top_k)
    answers = []
    for carried in (wire, model):
        alone = Members.of_ranks(1)
        spec = DispatchSpec(alone, 0, len(COUNTS), SHAPE.hidden, problem.top_k, 64, model.dtype, carried)
        dispatcher = local.ENTRY.build(spec, None)
        arrived = dispatcher.dispatch(hidden, Routing(slots.int(), scores, (33,), 1))
        assert arrived.batch.tokens.format == carried
        answers.append(dispatcher.combine(kernel.apply(prepared, arrived.batch), arrived.ticket))
    assert torch.equal(*answers)
    assert answers[0].isfinite().all()
    assert answers[0].any()


@pytest.mark.parametrize("dispatcher", [entry.name for entry in DISPATCHERS.values() if "cpu" in entry.archs])
def test_every_dispatcher_is_held_to_its_law_with_every_wire_of_a_scheme(dispatcher: str) -> None:
    """What arrives is, bit for bit, what was rounded at home: `test_dispatchers` checks that."""
    wires = {scheme.activations.name for scheme in TRAVELLING.values()}
    assert wires <= DISPATCHERS[dispatcher].wires
    if (DISPATCHERS[dispatcher].max_owners or 2) > 1:
        assert wires <= {case.wire for case in law_cases() if case.dispatcher == dispatcher}
