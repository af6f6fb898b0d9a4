"""`moeserve plan`: which kernel, carrier and wire each layer gets, and why not the others. Needs no GPU."""

from __future__ import annotations

import argparse
import json
import os
from functools import partial
from typing import TYPE_CHECKING, Any

from moeserve.cli.configured import add_config_flags, config_of, given

if TYPE_CHECKING:
    from moeserve.cli.plan_shown import Planned
    from moeserve.cli.vllm.reading import Finding
    from moeserve.runtime.config import Config


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand."""
    about = "show which kernel and carrier each layer gets, and why not the others; needs no GPU"
    parser = subparsers.add_parser("plan", help=about, description=about)
    add_config_flags(parser, serving=False)
    parser.add_argument(
        "--machine", metavar="NAME", help="plan for this machine, such as h200; this one by default"
    )
    parser.add_argument(
        "--from-vllm-env",
        action="store_true",
        help="say what vLLM's environment switches mean here, and plan with the keys that do the same",
    )
    parser.add_argument(
        "--moe-backend", metavar="NAME", default="", help="with --from-vllm-env: vLLM's flag of that name"
    )
    parser.add_argument(
        "--table",
        metavar="NAME",
        help="print a table of the documents, such as machines: every scheme's plan",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Prints the plan. Raises ConfigError, CheckpointError, or NoPlan with every reason."""
    if args.table:
        from moeserve.cli.tables import table

        print(table(args.table))
    elif args.from_vllm_env:
        _from_vllm(args)
    elif args.moe_backend:
        raise ValueError("--moe-backend is vLLM's name: add --from-vllm-env, or name a kernel by --kernel")
    else:
        planned = _planned(args, config_of(args))
        print(json.dumps(planned.json(), indent=2) if args.json else planned.text())
    return 0


def _from_vllm(args: argparse.Namespace) -> None:
    """Prints what vLLM's settings come to, and where a checkpoint is given the plan under their keys."""
    from moeserve.cli.vllm.reading import merged, text

    path = given(args).model.checkpoint
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


def _findings(args: argparse.Namespace, path: str) -> list[Finding]:
    """What depends on the checkpoint's scheme is settled where all its layers have one."""
    from moeserve.cli.vllm.reading import read
    from moeserve.experts.checkpoint import Checkpoint

    if not path:
        return read(os.environ, args.moe_backend, None)
    checkpoint = Checkpoint(path)
    schemes = {checkpoint.scheme(layer) for layer in checkpoint.layers}
    return read(os.environ, args.moe_backend, schemes.pop() if len(schemes) == 1 else None)


def _planned(args: argparse.Namespace, config: Config) -> Planned:
    from tqdm import tqdm

    from moeserve.cli.plan_shown import Planned
    from moeserve.experts.checkpoint import Checkpoint
    from moeserve.experts.machine import machine_named
    from moeserve.experts.requantization import requantization
    from moeserve.runtime.rank_process import machine_for, served_from

    served = served_from(config)
    machine = machine_named(args.machine) if args.machine else machine_for(config)
    plans = served.plans(machine, config.plan.wanted)
    if not config.model.load_as:
        return Planned(served, machine, plans)
    shown = partial(tqdm, desc="reading experts of each layer", unit="layer", disable=None, leave=False)
    stored = Checkpoint(config.model.checkpoint)
    changed = requantization(stored, served.checkpoint, served.layers, shown)
    return Planned(served, machine, plans, config.model.load_as, changed)
