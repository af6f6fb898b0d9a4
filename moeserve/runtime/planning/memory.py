"""What a rank's device memory is for: planned from sizes alone, before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from moeserve.dispatch.permute import row_capacity
from moeserve.experts.batch import Grouping
from moeserve.runtime.epoch import Epoch
from moeserve.runtime.planning.layers import Place, dispatch_spec, first_epoch
from moeserve.runtime.planning.plan import DispatchSpan, Plan
from moeserve.runtime.sections import BalanceConfig
from moeserve.runtime.served import Served

WEIGHTS, STAGING, DISPATCH, KEPT, GRAPHS = "weights", "staging", "dispatch", "kept", "graphs"
WORKSPACE, CACHED, PASSES = "workspace", "cached", "passes"

PURPOSES = {
    WEIGHTS: "prepared experts in this rank's slots",
    STAGING: "experts that are being copied in for the next epoch",
    DISPATCH: "dispatchers' own buffers, as far as they are known without their libraries",
    KEPT: "dispatchers' buffers of a generation that has ended, which a lost process may still write to",
    GRAPHS: "memory pools of recorded steps, those of passes too",
    PASSES: "mailboxes of callers' GPUs, and where the rows of their steps lie",
    WORKSPACE: "what a step works in, and tables of routing and load",
    CACHED: "blocks that torch keeps for its next allocation",
}
"""What a rank's device memory is for."""


def planned_bytes(served: Served, plans: Mapping[int, Plan], balance: BalanceConfig) -> dict[str, int]:
    """Bytes of a rank by purpose: `weights`, `staging`, `dispatch`, `kept` and `workspace`.

    Weights are counted in the scheme's format, which a kernel may pack a few percent tighter or wider. The
    workspace is that of the largest step: its batch, what the first GEMM gives, and answers twice; it comes
    and goes with steps. What is kept is there after a loss, until another generation forms once that process
    has ended. Reserved places are counted. Raises ValueError where redundant experts do not divide
    over the ranks.
    """
    first = first_epoch(replace(served, redundant=balance.redundant_experts))
    slots = first.placement.slots_per_owner
    experts = {layer: expert_bytes(plan) for layer, plan in plans.items()}
    made = {id(plan): plan for plan in plans.values()}.values()
    steps = [step_bytes(plan, span, slots) for plan in made for span in plan.dispatchers]
    dispatch = dispatch_bytes(served, plans, first)
    outlives = len(first.members) > 1 and all(plan.outlives for plan in made)
    return {
        WEIGHTS: slots * sum(experts.values()),
        STAGING: balance.staging_slots * max(experts.values(), default=0),
        DISPATCH: dispatch,
        KEPT: dispatch if outlives else 0,
        WORKSPACE: max(steps, default=0),
    }


def expert_bytes(plan: Plan) -> int:
    """Bytes of one expert of a layer, or of a rank's slice of it, as the scheme stores it."""
    shape, weights = plan.problem.shape, plan.problem.scheme.weights
    biases = 4 * (shape.gate_up_rows + shape.hidden) if shape.bias else 0
    gate_up = weights.nbytes((shape.gate_up_rows, shape.hidden))
    return gate_up + weights.nbytes((shape.hidden, shape.inner)) + biases


def reserved_bytes(served: Served, plans: Mapping[int, Plan], balance: BalanceConfig) -> dict[str, int]:
    """How many of `planned_bytes` are for reserved lanes and owners' places, by purpose."""
    bare = replace(served, max_lanes=0, max_owners=0)
    made: dict[int, Plan] = {}
    for plan in plans.values():
        problem = plan.problem
        here = replace(
            problem,
            lanes=problem.lanes_here,
            owners=problem.owners_here,
            reserved_lanes=0,
            reserved_owners=0,
        )
        made.setdefault(id(plan), replace(plan, problem=here))
    without = planned_bytes(bare, {layer: made[id(plan)] for layer, plan in plans.items()}, balance)
    return {what: size - without[what] for what, size in planned_bytes(served, plans, balance).items()}


def dispatch_bytes(served: Served, plans: Mapping[int, Plan], epoch: Epoch) -> int:
    """Bytes of the buffers of all dispatchers that serve; layers of the same sizes share theirs.

    They are those of the first member in `epoch`, a rank.
    """
    built = {}
    for plan in {id(plan): plan for plan in plans.values()}.values():
        for span in plan.dispatchers:
            if span.dispatcher.buffer_bytes is not None:
                place = Place.at(epoch, epoch.members.seats[0], plan.machine.device)
                spec = dispatch_spec(served, plan, span, place)
                built[span.dispatcher.name, spec] = span.dispatcher.buffer_bytes(spec)
    return sum(built.values())


def step_bytes(plan: Plan, span: DispatchSpan, slots: int) -> int:
    """Bytes that a step of as many rows as `span` serves works in on one rank, about."""
    problem, shape = plan.problem, plan.problem.shape
    arrived = problem.lanes * span.up_to
    rows = slots * arrived
    if span.dispatcher.grouping is Grouping.RAGGED:
        rows = row_capacity(arrived, problem.top_k, slots, plan.kernel.row_align)
    plain = problem.model_format
    batch, answers = span.wire.nbytes((rows, shape.hidden)), 2 * plain.nbytes((rows, shape.hidden))
    inner = plain.nbytes((rows, shape.gate_up_rows)) + plain.nbytes((rows, shape.inner))
    return batch + answers + inner
