"""What serves each layer of a service: its plan, and what each rank builds the plan's dispatchers for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from moeserve.device.machine import Machine
from moeserve.dispatch.backends import DISPATCHERS
from moeserve.dispatch.dispatcher import DispatchSpec
from moeserve.dispatch.members import Members
from moeserve.experts.kernel import Problem
from moeserve.experts.kernels import KERNELS
from moeserve.runtime.epoch import Epoch
from moeserve.runtime.planning.plan import DispatchSpan, Plan, make_plan
from moeserve.runtime.sections import Wanted
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


@dataclass(frozen=True)
class Place:
    """Where in its group a member stands when its dispatchers are built."""

    members: Members
    seat: int
    slots: int  # numbers that each owner's place has
    held: int  # slots of them that this member has; 0 without an owner's place
    device: str

    @classmethod
    def at(cls, epoch: Epoch, seat: int, device: str) -> Place:
        """The place of `seat` in `epoch`. Raises ValueError for a vacant seat."""
        held = epoch.slots_of(epoch.members.at(seat))
        return cls(epoch.members, seat, epoch.placement.slots_per_owner, held, device)


def first_epoch(served: Served) -> Epoch:
    """The epoch that a service starts with: its ranks, and the places that it reserves.

    Where the loss of an owner is covered, spare slots hold second replicas from the start. Raises ValueError
    where redundant experts do not divide over the ranks.
    """
    experts = served.checkpoint.num_experts
    first = Epoch.first(served.mesh, len(served.layers), experts, served.redundant, served.members)
    return first.covered() if served.cover_owners else first


def why_whole(dispatchers: Iterable[str]) -> str:
    """Why a group that these dispatchers serve cannot go on without a member; empty where it can."""
    equal = sorted(name for name in set(dispatchers) if name in DISPATCHERS and not DISPATCHERS[name].unequal)
    return f"{', '.join(equal)} serves groups whose ranks are all there, and no others" if equal else ""


def dispatch_spec(served: Served, plan: Plan, span: DispatchSpan, place: Place) -> DispatchSpec:
    """What the member at `place` builds the dispatcher of `span` for."""
    problem = plan.problem
    return DispatchSpec(
        members=place.members,
        seat=place.seat,
        slots=place.slots,
        hidden=problem.shape.hidden,
        top_k=problem.top_k,
        lane_rows=span.up_to,
        dtype=served.dtype,
        wire=span.wire,
        sliced=problem.sliced,
        row_align=plan.kernel.row_align,
        device=place.device,
        patience=served.patience,
        on_late=served.on_late,
        held=place.held,
    )
