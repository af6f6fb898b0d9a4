"""`moeserve plan`: which kernel, carrier and wire each layer gets, and why not the others. Needs no GPU."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from moeserve.cli.configured import add_config_flags, config_of

if TYPE_CHECKING:
    from moeserve.experts.machine import Machine
    from moeserve.runtime.plan import Plan
    from moeserve.runtime.rank import Served

GIB = 1 << 30


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand."""
    about = "show which kernel and carrier each layer gets, and why not the others; needs no GPU"
    parser = subparsers.add_parser("plan", help=about, description=about)
    add_config_flags(parser, serving=False)
    parser.add_argument(
        "--machine", metavar="NAME", help="plan for this machine, such as h200; this one by default"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Prints the plan. Raises ConfigError, CheckpointError, or NoPlan with every reason."""
    from moeserve.experts.machine import machine_named
    from moeserve.runtime.rank_process import machine_for, served_from

    config = config_of(args)
    served = served_from(config)
    machine = machine_named(args.machine) if args.machine else machine_for(config)
    grouped = _alike(served.plans(machine, config.plan.wanted))
    print(_json(served, machine, grouped) if args.json else _text(served, machine, grouped))
    return 0


def _alike(plans: dict[int, Plan]) -> list[tuple[tuple[int, ...], Plan]]:
    """Plans with the layers that share them: layers with one problem were given one plan."""
    groups: dict[int, tuple[list[int], Plan]] = {}
    for layer, plan in plans.items():
        groups.setdefault(id(plan), ([], plan))[0].append(layer)
    return [(tuple(layers), plan) for layers, plan in groups.values()]


def _text(served: Served, machine: Machine, grouped: list[tuple[tuple[int, ...], Plan]]) -> str:
    from moeserve.runtime.request import runs

    mesh, found = served.mesh, ", ".join(sorted(machine.modules)) or "none"
    held = f"a 1/{mesh.slices} slice of every expert" if mesh.sliced else "whole experts"
    head = [
        f"machine  {machine.name} ({machine.arch}, {machine.memory / GIB:.0f} GiB), packages: {found}",
        f"ranks    {mesh.ranks} (data parallel {mesh.dp}, tensor parallel {mesh.tp}), each with {held}",
    ]
    sections = ["\n".join(head)]
    for layers, plan in grouped:
        problem, shape = plan.problem, plan.problem.shape
        size = f"{problem.experts} experts, top {problem.top_k}, H={shape.hidden}, I={shape.inner} a rank"
        sections.append(
            "\n".join([f"layers {runs(layers)}: {size}", *(f"  {line}" for line in plan.lines())])
        )
    return "\n\n".join(sections)


def _json(served: Served, machine: Machine, grouped: list[tuple[tuple[int, ...], Plan]]) -> str:
    mesh = served.mesh
    found = {
        "machine": {
            "name": machine.name,
            "arch": machine.arch,
            "memory": machine.memory,
            "modules": sorted(machine.modules),
        },
        "mesh": {"dp": mesh.dp, "tp": mesh.tp, "ep": mesh.ep},
        "plans": [_plan(layers, plan) for layers, plan in grouped],
    }
    return json.dumps(found, indent=2)


def _plan(layers: tuple[int, ...], plan: Plan) -> dict[str, Any]:
    return {
        "layers": layers,
        "scheme": str(plan.problem.scheme),
        "kernel": {"name": plan.kernel.name, "verified": plan.kernel.verified},
        "carrier": {"name": plan.carrier.name, "verified": plan.carrier.verified},
        "wire": str(plan.wire),
        "refused": [{"name": name, "reason": reason} for name, reason in plan.refused],
    }
