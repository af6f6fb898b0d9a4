"""`make_plan`: a join with reasons; what is pinned is served or refused, never replaced."""

from dataclasses import replace

import pytest

from moeserve.dispatch.backends import DISPATCHERS
from moeserve.experts.activation import Activation
from moeserve.experts.batch import ExpertShape
from moeserve.experts.kernel import Problem
from moeserve.experts.kernels import KERNELS
from moeserve.experts.machine import OPTIONAL_MODULES, Machine, machine_named
from moeserve.quant.format import Scheme
from moeserve.quant.formats import BF16, FP8_BLOCK, FP8_GROUP, FP32
from moeserve.runtime.plan import NoPlan, Wanted, make_plan

CPU = machine_named("cpu", ())


PLAIN = Scheme(BF16, BF16)


def problem(scheme: Scheme = PLAIN, **changes: object) -> Problem:
    shape = ExpertShape(256, 256, Activation("silu"))
    return replace(Problem(scheme, BF16, shape, experts=8, ranks=4, top_k=2, lane_rows=64), **changes)  # type: ignore[arg-type]


def plan(asked: Problem, machine: Machine = CPU, **wanted: str):
    return make_plan(asked, machine, KERNELS, DISPATCHERS, Wanted(**wanted))


def test_bf16_on_cpu_gets_the_grouped_kernel_and_the_plain_wire() -> None:
    made = plan(problem())
    assert (made.kernel.name, made.carrier.name, made.wire) == (
        "torch_grouped_mm",
        "allgather_reducescatter",
        BF16,
    )


def test_one_rank_needs_no_wire() -> None:
    assert plan(problem(ranks=1)).carrier.name == "local"


def test_fp8_blocks_travel_as_the_groups_they_are_rounded_to_anyway() -> None:
    made = plan(problem(Scheme(FP8_BLOCK, FP8_GROUP)))
    assert made.wire == FP8_GROUP


def test_a_wire_that_loses_more_must_be_named() -> None:
    assert plan(problem()).wire == BF16
    assert plan(problem(), wire="fp8_group128", kernel="torch_reference").wire == FP8_GROUP


def test_a_reference_wins_on_a_gpu_only_when_named() -> None:
    gpu = machine_named("h200", ())
    asked = problem(Scheme(FP32, FP32), model_format=FP32)
    with pytest.raises(NoPlan, match="torch_reference: a reference serves on a GPU only when named"):
        plan(asked, gpu, kernel="auto")
    assert plan(asked, gpu, kernel="torch_reference").kernel.name == "torch_reference"


def test_every_row_that_lost_says_why() -> None:
    made = plan(problem())
    told = dict(made.refused)
    others = (KERNELS.keys() | DISPATCHERS.keys()) - {made.kernel.name, made.carrier.name}
    assert others <= told.keys()
    assert all(told.values())


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"kernel": "marlin"}, "unknown kernel 'marlin'; known: "),
        ({"carrier": "pigeon"}, "unknown carrier 'pigeon'; known: "),
        ({"carrier": "local"}, "local: "),
        ({"wire": "fp8_block128"}, "wire fp8_block128 was named"),
    ],
)
def test_a_pinned_name_that_cannot_serve_is_no_plan(wanted: dict[str, str], message: str) -> None:
    with pytest.raises(NoPlan, match=message):
        plan(problem(), **wanted)


def test_no_plan_names_size_and_multiple() -> None:
    rows = {"picky": replace(KERNELS["torch_reference"], name="picky", multiple_of=(128, 100))}
    with pytest.raises(NoPlan, match="picky: H=256 and I=256 must be multiples of 128 and 100"):
        make_plan(problem(), CPU, rows, DISPATCHERS)


@pytest.mark.parametrize("row", [*KERNELS.values(), *DISPATCHERS.values()], ids=lambda row: row.name)
def test_rows_claim_only_architectures_they_run_on(row) -> None:
    assert set(row.verified) <= set(row.archs)


@pytest.mark.parametrize(
    ("name", "arch", "has"),
    [
        ("cpu", "cpu", set()),
        ("H200", "sm90", {"triton", "deep_gemm", "flashinfer"}),
        ("b200", "sm100", {"triton", "flashinfer"}),
        ("mi300x", "gfx942", {"triton", "aiter"}),
        ("mi355x", "gfx950", {"triton", "aiter"}),
    ],
)
def test_a_named_machine_has_the_packages_made_for_it(name: str, arch: str, has: set[str]) -> None:
    machine = machine_named(name)
    assert machine.arch == arch
    assert has <= machine.modules <= set(OPTIONAL_MODULES)
    assert ("aiter" in machine.modules) == arch.startswith("gfx")
    assert machine_named(name, ()).modules == frozenset()
