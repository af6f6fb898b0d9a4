"""`make_plan`: a join with reasons; what is pinned is served or refused, never replaced."""

import os
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import pytest

from moeserve.device.machine import NAMED, Machine, machine_named
from moeserve.dispatch.backends import DISPATCHERS
from moeserve.dispatch.costs.costs import Costs, DispatcherCost, Point
from moeserve.dispatch.dispatcher import DispatchEntry
from moeserve.experts.activation import Activation
from moeserve.experts.batch import ExpertShape, Grouping
from moeserve.experts.kernel import Problem
from moeserve.experts.kernels import KERNELS
from moeserve.quant.format import Scheme
from moeserve.quant.formats import BF16, FP8_BLOCK, FP8_GROUP, FP16, FP32
from moeserve.runtime.planning.costing import Costing
from moeserve.runtime.planning.passes import may_be_rounded, rows_wire
from moeserve.runtime.planning.plan import NoPlan, Plan, make_plan
from moeserve.runtime.sections import Wanted

CPU = machine_named("cpu", ())


PLAIN = Scheme(BF16, BF16)


def problem(scheme: Scheme = PLAIN, **changes: object) -> Problem:
    shape = ExpertShape(256, 256, Activation("silu"))
    usual = Problem(scheme, BF16, shape, experts=8, lanes=4, owners=4, top_k=2, lane_rows=64)
    return replace(usual, **changes)  # type: ignore[arg-type]


def plan(asked: Problem, machine: Machine = CPU, **wanted: str):
    return make_plan(asked, machine, KERNELS, DISPATCHERS, Wanted(**wanted))


def test_bf16_on_cpu_gets_the_grouped_kernel_and_the_plain_wire() -> None:
    made = plan(problem())
    assert (made.kernel.name, made.dispatcher_names, made.wire_names) == (
        "torch_grouped_mm",
        "allgather_reducescatter",
        "bf16",
    )
    assert [span.up_to for span in made.dispatchers] == [64]


def test_one_rank_needs_no_wire() -> None:
    assert plan(problem(lanes=1, owners=1)).dispatcher_names == "local"


def test_fp8_blocks_travel_as_the_groups_they_are_rounded_to_anyway() -> None:
    made = plan(problem(Scheme(FP8_BLOCK, FP8_GROUP)))
    assert made.dispatchers[0].wire == FP8_GROUP


def test_a_wire_that_loses_more_must_be_named() -> None:
    assert plan(problem()).dispatchers[0].wire == BF16
    assert plan(problem(), wire="fp8_group128", kernel="torch_reference").dispatchers[0].wire == FP8_GROUP


def test_a_reference_wins_on_a_gpu_only_when_named() -> None:
    gpu = machine_named("h200", ())
    asked = problem(Scheme(FP32, FP32), model_format=FP32)
    with pytest.raises(NoPlan, match="torch_reference: a reference serves on a GPU only when named"):
        plan(asked, gpu, kernel="auto")
    assert plan(asked, gpu, kernel="torch_reference").kernel.name == "torch_reference"


def test_every_row_that_lost_says_why() -> None:
    made = plan(problem())
    told = dict(made.refused)
    others = (KERNELS.keys() | DISPATCHERS.keys()) - {made.kernel.name, made.dispatchers[0].dispatcher.name}
    assert others <= told.keys()
    assert all(told.values())


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"kernel": "marlin"}, "unknown kernel 'marlin'; known: "),
        ({"dispatcher": "pigeon"}, "unknown dispatcher 'pigeon'; known: "),
        ({"dispatcher": "local"}, "local: "),
        ({"wire": "fp8_block128"}, "wire fp8_block128 was named"),
    ],
)
def test_a_pinned_name_that_cannot_serve_is_no_plan(wanted: dict[str, str], message: str) -> None:
    with pytest.raises(NoPlan, match=message):
        plan(problem(), **wanted)


def test_no_plan_names_size_and_multiple() -> None:
    entries = {"picky": replace(KERNELS["torch_reference"], name="picky", multiple_of=(128, 100))}
    asked, picky = (
        "nothing serves bf16 experts with H=256, I=256 and silu on ",
        "picky: H=256 and I=256 must be",
    )
    with pytest.raises(NoPlan, match=f"^{asked}(.|\\n)*{picky} multiples of 128 and 100"):
        make_plan(problem(), CPU, entries, DISPATCHERS)


@pytest.mark.parametrize("entry", [*KERNELS.values(), *DISPATCHERS.values()], ids=lambda entry: entry.name)
def test_entries_claim_only_architectures_they_run_on(entry) -> None:
    assert set(entry.verified) <= set(entry.archs)


@pytest.mark.parametrize("row", [*KERNELS.values(), *DISPATCHERS.values()], ids=lambda row: row.name)
def test_packages_that_rows_need_are_looked_up(row) -> None:
    """One that moeserve/device/machine.py does not list is installed nowhere, for a plan."""
    machines = [machine_named(name) for name in NAMED]
    assert any(machine.arch in row.archs and row.modules <= machine.modules for machine in machines)


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
    assert has <= machine.modules
    assert ("aiter" in machine.modules) == arch.startswith("gfx")
    assert machine_named(name, ()).modules == frozenset()


def test_a_cpu_has_the_memory_of_this_host() -> None:
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert abs(machine_named("cpu").memory - pages) < 0.01 * pages


LOW = replace(DISPATCHERS["all2allv"], name="low", grouping=Grouping.PADDED)
HIGH = replace(DISPATCHERS["all2allv"], name="high")
KERNELS_OF_BOTH = {"both": replace(KERNELS["torch_reference"], name="both", reference=False)}


def ranged(dispatchers: list[DispatchEntry], lane_rows: int = 4096, **wanted: str) -> Plan:
    """The plan of lanes of so many rows with these dispatchers in table order."""
    asked = problem(lane_rows=lane_rows)
    return make_plan(
        asked, CPU, KERNELS_OF_BOTH, {entry.name: entry for entry in dispatchers}, Wanted(**wanted)
    )


def spans(plan: Plan) -> list[tuple[str, int]]:
    return [(span.dispatcher.name, span.up_to) for span in plan.dispatchers]


def costs_of(plan: Plan, **per_row: float) -> Costs:
    """Made costs: so much a row, and 60 at once for a dispatcher that takes next to nothing a row."""
    dispatchers = []
    for name, slope in per_row.items():
        fixed = 60.0 if slope < 0.1 else 0.0
        points = (Point(rows, fixed + slope * rows, 0.0) for rows in (1, 64, plan.problem.lane_rows))
        dispatchers.append(DispatcherCost(name, "bf16", tuple(points)))
    return Costs(Costing().setting(plan, ("here", "there")), tuple(dispatchers))


def test_a_padded_dispatcher_serves_small_steps_and_the_next_the_rest() -> None:
    assert spans(ranged([LOW, HIGH])) == [("low", 256), ("high", 4096)]
    assert spans(ranged([LOW, HIGH], lane_rows=128)) == [("low", 128)]
    assert spans(ranged([HIGH, LOW])) == [("high", 4096)]
    assert spans(ranged([LOW])) == spans(ranged([LOW, HIGH], dispatcher="low")) == [("low", 4096)]


def test_a_step_goes_by_its_fullest_lane() -> None:
    made = ranged([LOW, HIGH])
    assert [made.span(rows).dispatcher.name for rows in (0, 256, 257, 4096)] == ["low", "low", "high", "high"]
    assert (made.dispatcher_names, made.wire_names) == ("low+high", "bf16")


def test_a_dispatcher_that_has_not_run_here_waits_until_it_is_named() -> None:
    untried = replace(HIGH, name="untried", verified=("sm90",))
    made = ranged([untried, HIGH])
    assert (
        spans(made) == [("high", 4096)]
        and "not run on cpu yet, and high has" in dict(made.refused)["untried"]
    )
    assert spans(ranged([untried, HIGH], dispatcher="untried")) == [("untried", 4096)]
    assert spans(ranged([untried])) == [("untried", 4096)]


def test_costs_decide_where_which_dispatcher_serves() -> None:
    other = replace(HIGH, name="other")
    made = ranged([LOW, other, HIGH])
    chosen = made.by_cost(costs_of(made, low=0.5, high=0.02, other=0.9))
    assert [name for name, _ in spans(chosen)] == ["low", "high"]
    assert spans(chosen)[0][1] == pytest.approx(60 / 0.48, abs=3) and spans(chosen)[1][1] == 4096
    assert dict(chosen.refused)["other"] == "low+high costs less"
    assert "cost     measured on here, there" in chosen.lines()
    assert any(line.startswith("dispatcher  low up to 1") for line in chosen.lines())


def test_a_padded_dispatcher_is_never_given_more_than_its_rows() -> None:
    made = ranged([HIGH, LOW])
    assert spans(made.by_cost(costs_of(made, high=0.9, low=0.2))) == [("low", 256), ("high", 4096)]


def test_without_costs_of_one_for_all_rows_the_order_stands() -> None:
    made = ranged([HIGH, LOW])
    assert spans(made.by_cost(costs_of(made, low=0.2))) == [("high", 4096)]


def test_what_could_not_be_built_is_refused_with_its_reason() -> None:
    made = ranged([LOW, HIGH])
    costs = replace(costs_of(made, high=0.9), refused=(("low", "bf16", "rank 2: no room"),))
    assert spans(made.by_cost(costs)) == [("high", 4096)]
    assert dict(made.by_cost(costs).refused)["low"] == "rank 2: no room"
    nothing = replace(costs, dispatchers=(), refused=tuple((n, "bf16", "gone") for n in ("low", "high")))
    with pytest.raises(NoPlan, match="no dispatcher can be built: low: gone; high: gone"):
        made.by_cost(nothing)


OWN = {"naive", "allgather_reducescatter", "all2allv", "nvlink_ll", "nvlink_ht"}
EQUAL = "serves groups in which every member has a lane and experts; here are"


def refusals(asked: Problem) -> dict[str, str | None]:
    """What each dispatcher says of a group, on a machine of its own with its packages."""
    machine = machine_named("h200")
    there = {"modules": frozenset[str](), "archs": frozenset((machine.arch,))}
    return {name: replace(entry, **there).refuses(asked, machine) for name, entry in DISPATCHERS.items()}


def test_our_own_dispatchers_alone_serve_lanes_and_owners_apart() -> None:
    assert {name for name, entry in DISPATCHERS.items() if entry.unequal} == OWN
    for changes, found in (
        ({"lanes": 2, "owners": 3}, "2 lanes and 3 owners"),
        ({"lanes": 3, "owners": 1}, "3 lanes and 1 owners"),
        ({"lanes": 2, "owners": 2, "split": True}, "2 lanes and 2 owners"),
        ({"lanes": 8, "reserved_lanes": 4}, "4 lanes and 0 owners reserved"),
        ({"reserved_lanes": 2, "reserved_owners": 1}, "2 lanes and 1 owners reserved"),
    ):
        asked = problem(**changes)
        assert not asked.equal
        reasons = refusals(asked)
        assert {name for name, reason in reasons.items() if reason is None} == OWN
        told = {name: reason for name, reason in reasons.items() if name not in OWN}
        assert set(told.values()) == {f"{EQUAL} {found}"}
    assert problem().equal


def test_peer_memory_says_how_many_lanes_and_owners_it_joins() -> None:
    assert refusals(problem(lanes=33, reserved_lanes=29))["nvlink_ll"] == "joins at most 32 lanes, not 33"
    assert refusals(problem(owners=9, reserved_owners=5))["nvlink_ht"] == "joins at most 8 owners, not 9"
    assert refusals(problem(lanes=9, owners=9))["nvlink_ll"] == "joins at most 8 ranks, not 9"


def test_sizes_of_a_problem_count_reserved_places_where_they_take_part() -> None:
    asked = problem(lanes=12, owners=6, reserved_lanes=8, reserved_owners=2, redundant=4)
    assert (asked.lanes_here, asked.owners_here) == (4, 4)
    assert asked.step_rows == 12 * 64  # reserved lanes may bring rows later
    assert (asked.slots, asked.pairs_a_row) == (3, Fraction(2, 4))  # reserved owners hold nothing yet
    with pytest.raises(ValueError, match="4 of 4 owners are reserved; at least one owner must be there"):
        problem(reserved_owners=4)


@pytest.mark.parametrize(
    ("scheme", "changes", "rows", "wire"),
    [
        (Scheme(FP8_BLOCK, FP8_GROUP), {}, 64, "fp8_group128"),
        (Scheme(FP8_BLOCK, FP8_GROUP), {"lanes": 1, "owners": 1}, 1, "fp8_group128"),
        (Scheme(FP8_BLOCK, FP8_GROUP), {"model_format": FP16}, 64, ""),
        (Scheme(FP8_BLOCK, FP8_GROUP), {"shape": ExpertShape(192, 256, Activation("silu"))}, 64, ""),
        (PLAIN, {}, 64, ""),
    ],
)
def test_rows_of_callers_gpus_come_in_the_wire_of_all_layers(
    scheme: Scheme, changes: dict[str, object], rows: int, wire: str
) -> None:
    made = plan(problem(scheme, **changes))
    assert rows_wire([made], rows) == wire
    assert may_be_rounded([made]) == bool(wire)
    assert rows_wire([made, plan(problem())], rows) == ""


def test_a_wire_of_larger_steps_than_a_callers_does_not_count() -> None:
    made = plan(problem(Scheme(FP8_BLOCK, FP8_GROUP)))
    first = made.dispatchers[0]
    both = SimpleNamespace(
        problem=made.problem, dispatchers=(replace(first, up_to=16), replace(first, wire=BF16))
    )
    assert (rows_wire([both], 16), rows_wire([both], 17)) == ("fp8_group128", "")  # type: ignore[list-item]
