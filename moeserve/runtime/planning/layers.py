"""What serves each layer of a service: its plan, and what each rank builds the plan's dispatchers for."""

from __future__ import annotations

from moeserve.device.machine import Machine
from moeserve.dispatch.backends import DISPATCHERS
from moeserve.dispatch.dispatcher import DispatchSpec
from moeserve.experts.kernel import Problem
from moeserve.experts.kernels import KERNELS
from moeserve.runtime.config import Wanted
from moeserve.runtime.planning.plan import DispatchSpan, Plan, make_plan
from moeserve.runtime.served import Served


def plans_for(served: Served, machine: Machine, wanted: Wanted) -> dict[int, Plan]:
    """The plan of each layer by decoder index; layers with the same problem share one. Raises NoPlan."""
    made: dict[Problem, Plan] = {}
    plans: dict[int, Plan] = {}
    for layer in served.layers:
        problem = served.problem(layer)
        if problem not in made:
            made[problem] = make_plan(problem, machine, KERNELS, DISPATCHERS, wanted)
        plans[layer] = made[problem]
    return plans


def dispatch_spec(served: Served, plan: Plan, span: DispatchSpan, seat: tuple[int, int, str]) -> DispatchSpec:
    """What the rank of `seat`, (rank, slots, device), builds the dispatcher of `span` for."""
    problem, (rank, slots, device) = plan.problem, seat
    return DispatchSpec(
        rank=rank,
        ranks=problem.ranks,
        slots=slots,
        hidden=problem.shape.hidden,
        top_k=problem.top_k,
        lane_rows=span.up_to,
        dtype=served.dtype,
        wire=span.wire,
        sliced=problem.sliced,
        row_align=plan.kernel.row_align,
        device=device,
        patience=served.patience,
        on_late=served.on_late,
    )
