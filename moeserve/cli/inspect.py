"""`moeserve inspect CHECKPOINT`: shows what a checkpoint holds, by its config and headers.

Weights are read only to compare them with another checkpoint's, `--against`.
"""

from __future__ import annotations

import argparse
import json

from moeserve.cli.arguments.configured import one_checkpoint
from moeserve.cli.arguments.names import named

MOST_RANKS = 1 << 16
"""As many as a model has experts at most: further ranks would hold none."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand; its `func` is `run`."""
    about = "show layers, experts, shapes, scheme, excluded modules, routing and bytes of a checkpoint"
    parser = subparsers.add_parser("inspect", help=about, description=about)
    parser.add_argument(
        "words",
        nargs="*",
        type=named,
        metavar="CHECKPOINT",
        help="folder with config.json and safetensors, or org/name",
    )
    parser.add_argument("--checkpoint", type=named, metavar="CHECKPOINT", help="the same as the first word")
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="spread whole experts over N ranks")
    parser.add_argument(
        "--against",
        type=named,
        metavar="REFERENCE",
        help="the same model unquantized: relative error of each layer's experts; reads all their weights",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Prints the checkpoint's summary. Raises CheckpointError and ValueError if it cannot be served."""
    from moeserve.checkpoints.checkpoint import Checkpoint
    from moeserve.checkpoints.hub import pinned
    from moeserve.cli.shown.inspect_against import errors_against, errors_json, errors_rows
    from moeserve.cli.shown.inspected import Inspected, columns

    if not 0 < args.ranks <= MOST_RANKS:
        raise ValueError(f"--ranks={args.ranks} must be 1 to {MOST_RANKS}")
    checkpoint = Checkpoint(pinned(one_checkpoint(args.words, args.checkpoint)))
    found = Inspected.of(checkpoint, args.ranks)
    errors = errors_against(checkpoint, args.against) if args.against else []
    if args.json:
        against = {"against": errors_json(args.against, errors)} if errors else {}
        print(json.dumps(found.json() | against, indent=2))
        return 0
    print(found.text())
    if errors:
        print(f"\nrelative error against {args.against}\n{columns(errors_rows(errors))}")
    return 0
