"""A plan as text and as JSON: one section for layers that share it, and what `model.load_as` costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from moeserve.checkpoints.requantization import Loss, Requantization
from moeserve.cli.shown.units import human
from moeserve.device.machine import Machine
from moeserve.dispatch.costs.costs import Costs, table
from moeserve.runtime.doors.request import runs
from moeserve.runtime.planning.cover import CoverBytes, CoverPlan, cover_plan
from moeserve.runtime.planning.memory import DISPATCH, WORKSPACE, planned_bytes, reserved_bytes
from moeserve.runtime.planning.passes import PassBytes, pass_bytes
from moeserve.runtime.planning.plan import Plan
from moeserve.runtime.sections import BalanceConfig, PassesConfig
from moeserve.runtime.served import Served

GIB = 1 << 30


@dataclass(frozen=True)
class Planned:
    """What `moeserve plan` found, for all layers that are served."""

    served: Served
    machine: Machine
    plans: dict[int, Plan]
    load_as: str = ""
    changed: Requantization | None = None  # where there is a `load_as`
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    passes: PassesConfig = field(default_factory=PassesConfig)

    def by_costs(self, costs_of: Callable[[Plan], Costs | None]) -> Planned:
        """Returns a copy whose plans follow their measured costs, where they have some."""
        made: dict[int, Plan] = {}
        for plan in self.plans.values():
            costs = costs_of(plan)
            made.setdefault(id(plan), plan if costs is None else plan.by_cost(costs))
        return replace(self, plans={layer: made[id(plan)] for layer, plan in self.plans.items()})

    def text(self) -> str:
        """Sections, an empty line between."""
        mesh, machine = self.served.mesh, self.machine
        packages = ", ".join(sorted(machine.modules)) or "none"
        held = f"a 1/{mesh.slices} slice of every expert" if mesh.sliced else "whole experts"
        head = [
            f"machine  {machine.name} ({machine.arch}, {machine.memory / GIB:.0f} GiB), packages: {packages}",
            f"ranks    {mesh.ranks} (data parallel {mesh.dp}, tensor parallel {mesh.tp}), each with {held}",
        ]
        held_bytes = planned_bytes(self.served, self.plans, self.balance).items()
        head.append(f"memory   a rank: {', '.join(f'{what} {human(size)}' for what, size in held_bytes)}")
        head += self._passing() + self._reserved() + self._covered()
        if self.changed:
            head += _changed(self.load_as, self.changed)
        sections = ["\n".join(head)]
        for layers, plan in self._alike():
            problem, shape = plan.problem, plan.problem.shape
            size = f"{problem.experts} experts, top {problem.top_k}, H={shape.hidden}, I={shape.inner} a rank"
            lines = [f"layers {runs(layers)}: {size}", *(f"  {line}" for line in plan.lines())]
            if plan.costs is not None:
                lines.append("  microseconds of dispatch + combine, every lane bringing the same rows")
                lines += [f"  {line}" for line in table(plan.costs)]
            sections.append("\n".join(lines))
        return "\n\n".join(sections)

    def json(self) -> dict[str, Any]:
        """Returns what is printed as text as JSON, for programs."""
        mesh, machine = self.served.mesh, self.machine
        return {
            "machine": {
                "name": machine.name,
                "arch": machine.arch,
                "memory": machine.memory,
                "modules": sorted(machine.modules),
            },
            "mesh": {"dp": mesh.dp, "tp": mesh.tp, "ep": mesh.ep},
            "memory": planned_bytes(self.served, self.plans, self.balance),
            "passes": None if (taken := self._pass_bytes()) is None else asdict(taken),
            "reserved": self._reserve(),
            "cover": None if (cover := self._cover()) is None else asdict(cover),
            "load_as": {"name": self.load_as} | asdict(self.changed) if self.changed else None,
            "plans": [_plan(layers, plan) for layers, plan in self._alike()],
        }

    def _pass_bytes(self) -> PassBytes | None:
        return pass_bytes(self.served, self.plans, self.machine, self.balance, self.passes)

    def _passing(self) -> list[str]:
        """The line of what callers' GPUs may take, beside the line of memory."""
        if (taken := self._pass_bytes()) is None:
            return []
        lanes, each, steps = self.passes.lanes, self.passes.lane_bytes, self.passes.graph_steps
        return [
            f"passes   of callers' GPUs, a rank: up to {human(taken.mailboxes)} of mailboxes (passes.lanes = "
            f"{lanes} of passes.lane_bytes = {human(each)}), {human(taken.rooms)} of rows, "
            f"{human(taken.pool + taken.graphs)} of graphs (passes.graph_steps = {steps})"
        ]

    def _reserve(self) -> dict[str, Any]:
        """Places that no rank has, and what they cost a rank in bytes."""
        members, ranks = self.served.members, self.served.mesh.ranks
        nbytes = reserved_bytes(self.served, self.plans, self.balance)
        counts = {"lanes": members.max_lanes - ranks, "owners": members.max_owners - ranks}
        return counts | {what: nbytes[what] for what in (DISPATCH, WORKSPACE)}

    def _reserved(self) -> list[str]:
        """The line of reserved seats, where there are some."""
        found = self._reserve()
        if not (found["lanes"] or found["owners"]):
            return []
        return [
            f"reserved seats: +{found['lanes']} lanes, +{found['owners']} owners: "
            f"{human(found[DISPATCH])} of dispatch buffers, {human(found[WORKSPACE])} of workspace"
        ]

    def _cover(self) -> CoverPlan | None:
        return cover_plan(self.served, self.plans, self.balance)

    def _covered(self) -> list[str]:
        """What the loss of one rank takes: as it is configured, and the two ways to cover it."""
        if (cover := self._cover()) is None:
            return []
        now, kept = cover.configured, "kept" if self.balance.shadows else "off"
        enough = "enough for the loss of any one rank"
        if cover.missing:
            enough = f"{cover.missing} too few for the loss of one rank"

        def slots(way: CoverBytes) -> str:
            return f"{way.redundant} redundant slots, {human(way.slot_nbytes)} a rank"

        def shadows(way: CoverBytes) -> str:
            return f"up to {human(way.shadow_nbytes)} of host memory a rank"

        return [
            f"cover    {slots(now)}: {enough}",
            f"         shadows ({kept}): {shadows(now)}",
            f"         with second replicas of all: {slots(cover.by_replicas)}",
            f"         with shadows: {slots(cover.by_shadows)}; {shadows(cover.by_shadows)}",
        ]

    def _alike(self) -> list[tuple[tuple[int, ...], Plan]]:
        """Plans with the layers that share them: layers with one problem were given one plan."""
        groups: dict[int, tuple[list[int], Plan]] = {}
        for layer, plan in self.plans.items():
            groups.setdefault(id(plan), ([], plan))[0].append(layer)
        return [(tuple(layers), plan) for layers, plan in groups.values()]


def _changed(name: str, changed: Requantization) -> list[str]:
    read = f"experts {', '.join(map(str, changed.experts))} of layers {runs(changed.layers)}"
    return [
        f"load_as  {name}: {' and '.join(changed.stored)} -> {' and '.join(changed.loaded)}",
        f"  error  gate_up {_loss(changed.gate_up)}; down {_loss(changed.down)}",
        f"         relative to what is stored (Frobenius); read: {read}",
        f"  bytes  {human(changed.stored_nbytes)} stored -> {human(changed.loaded_nbytes)} loaded",
    ]


def _loss(loss: Loss) -> str:
    return f"{loss.mean:.3g} mean, {loss.max:.3g} max"


def _plan(layers: tuple[int, ...], plan: Plan) -> dict[str, Any]:
    return {
        "layers": layers,
        "scheme": str(plan.problem.scheme),
        "kernel": {"name": plan.kernel.name, "verified": plan.kernel.verified},
        "kernels": [
            {"up_to": span.up_to, "name": span.kernel.name, "verified": span.kernel.verified}
            for span in plan.kernels
        ],
        "dispatchers": [
            {
                "up_to": span.up_to,
                "name": span.dispatcher.name,
                "wire": str(span.wire),
                "verified": span.dispatcher.verified,
            }
            for span in plan.dispatchers
        ],
        "costs": plan.costs.json() if plan.costs else None,
        "refused": [{"name": name, "reason": reason} for name, reason in plan.refused],
    }
