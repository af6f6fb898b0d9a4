"""`moeserve plan`: shows which kernel, all2all backends and wires each layer gets, and why no others."""

from __future__ import annotations

import argparse
import json
import os
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from moeserve.cli.arguments.configured import add_config_flags, config_of, given
from moeserve.cli.arguments.names import named

if TYPE_CHECKING:
    from moeserve.cli.shown.plan_shown import Planned
    from moeserve.cli.vllm.reading import VllmSetting
    from moeserve.runtime.config import Config


MEASURE_SECONDS = 8.0
"""Seconds that `--measure` takes for all dispatchers of a problem together."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand `plan` and its arguments."""
    about = "show which kernel and all2all backend each layer gets, and why not the others; needs no GPU"
    parser = subparsers.add_parser("plan", help=about, description=about)
    add_config_flags(parser, serving=False)
    parser.add_argument(
        "--machine",
        type=named,
        metavar="NAME",
        help="plan for this machine, such as h200; this one by default",
    )
    parser.add_argument(
        "--from-vllm-env",
        action="store_true",
        help="say what vLLM's environment switches mean here, and plan with the keys that do the same",
    )
    parser.add_argument(
        "--moe-backend",
        metavar="NAME",
        default="",
        help="with --from-vllm-env: value of vLLM's flag --moe-backend",
    )
    parser.add_argument(
        "--table",
        type=named,
        metavar="NAME",
        help="print a table of the documentation; machines is the plan of every scheme",
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="time every all2all backend that fits, with one process for each rank on this machine; print "
        "the times and the plan that follows from them, and keep the times for services",
    )
    parser.add_argument(
        "--ranks",
        metavar="N",
        type=int,
        help="with --measure: number of ranks, instead of the mesh's",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Prints the plan. Raises ConfigError, CheckpointError, or NoPlan with every reason."""
    if args.table:
        from moeserve.cli.shown.tables import table

        print(table(args.table))
    elif args.from_vllm_env:
        _from_vllm(args)
    elif args.moe_backend:
        raise ValueError("--moe-backend is vLLM's name: add --from-vllm-env, or name a kernel by --kernel")
    else:
        if args.ranks is not None and not args.measure:
            raise ValueError("--ranks says how many ranks to measure with: add --measure")
        planned = _measured(args) if args.measure else _planned(args, config_of(args))
        print(json.dumps(planned.json(), indent=2) if args.json else planned.text())
    return 0


def _measured(args: argparse.Namespace) -> Planned:
    """Plans by costs that are measured now; plans alone where there are no dispatchers to choose from."""
    import socket

    from moeserve.runtime.launch.measuring import measured_here
    from moeserve.runtime.planning.costing import costing_of

    if args.machine:
        raise ValueError(f"--machine {args.machine} may be another one: leave out that or --measure")
    config = config_of(args)
    if args.ranks is not None:
        config = config.with_values({"parallel.data_parallel_size": _groups(args.ranks, config)}).checked()
    planned = _planned(args, config)
    if not any(plan.chooses for plan in planned.plans.values()):
        return planned
    if not any(costing_of(config).counts(plan) for plan in planned.plans.values()):
        print(f"services will not read these times: plan.measure = '{config.plan.measure}'", file=sys.stderr)
    found = {costs.setting: costs for costs in measured_here(config, MEASURE_SECONDS)}
    hosts = (socket.gethostname(),)
    return planned.by_costs(lambda plan: found.get(costing_of(config).setting(plan, hosts)))


def _groups(ranks: int, config: Config) -> int:
    """Returns the number of data-parallel groups that `ranks` make. Raises ConfigError."""
    from moeserve.runtime.sections import ConfigError

    tensor_parallel = config.parallel.tensor_parallel_size
    if ranks < 1 or ranks % tensor_parallel:
        raise ConfigError(f"--ranks {ranks} must be a multiple of tensor_parallel_size = {tensor_parallel}")
    return ranks // tensor_parallel


def _from_vllm(args: argparse.Namespace) -> None:
    """Prints the keys that vLLM's settings stand for and, for a checkpoint, the plan with them."""
    from moeserve.checkpoints.hub import pinned
    from moeserve.cli.vllm.reading import merged, text

    path = pinned(given(args).model.checkpoint, folders=False)
    findings = _findings(args, path)
    keys = merged(findings)
    if args.json:
        settings = [{"setting": f.said, "keys": dict(f.keys), "why": f.why} for f in findings]
        found: dict[str, Any] = {"vllm": {"settings": settings, "keys": keys}}
        print(json.dumps(found | (_planned(args, config_of(args, keys)).json() if path else {}), indent=2))
        return
    print(text(findings, keys), flush=True)
    if path:
        print(f"\n{_planned(args, config_of(args, keys)).text()}")


def _findings(args: argparse.Namespace, path: str) -> list[VllmSetting]:
    """Reads vLLM's settings, for the checkpoint's scheme where all its layers have the same."""
    from moeserve.checkpoints.checkpoint import Checkpoint
    from moeserve.cli.vllm.reading import read

    if not path:
        return read(os.environ, args.moe_backend, None)
    checkpoint = Checkpoint(path)
    schemes = {checkpoint.scheme(layer) for layer in checkpoint.layers}
    return read(os.environ, args.moe_backend, schemes.pop() if len(schemes) == 1 else None)


def _planned(args: argparse.Namespace, config: Config) -> Planned:
    from tqdm import tqdm

    from moeserve.checkpoints.checkpoint import Checkpoint
    from moeserve.checkpoints.requantization import requantization
    from moeserve.cli.shown.plan_shown import Planned
    from moeserve.device.machine import machine_named
    from moeserve.runtime.launch.environment import machine_for
    from moeserve.runtime.planning.costing import costing_of, recalled
    from moeserve.runtime.planning.layers import plans_for
    from moeserve.runtime.served import served_from

    served = served_from(config)
    machine = machine_named(args.machine) if args.machine else machine_for(config)
    plans = plans_for(served, machine, config.plan.wanted)
    if not (args.machine or args.measure):
        plans = recalled(plans, costing_of(config))
    if not config.model.load_as:
        return Planned(served, machine, plans, balance=config.balance, passes=config.passes)
    shown = partial(tqdm, desc="reading experts of each layer", unit="layer", disable=None, leave=False)
    stored = Checkpoint(config.model.checkpoint)
    changed = requantization(stored, served.checkpoint, served.layers, shown)
    return Planned(served, machine, plans, config.model.load_as, changed, config.balance, config.passes)
