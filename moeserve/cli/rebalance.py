"""`moeserve rebalance`: moves experts of a running service so that its ranks' loads are even."""

from __future__ import annotations

import argparse
from typing import Any

from moeserve.cli.arguments.remote import add_address, as_json, client_of, table
from moeserve.proto.client.patience import OPERATION_SECONDS

MIB = 1 << 20
MOST_MOVES = (1 << 32) - 1  # that a request can say
DONE = ("planned", "moved", "even")
"""Outcomes of a rebalance that did what was asked."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand `rebalance` and its arguments."""
    about = "move experts of a running service so that its ranks' loads are even, while it serves"
    parser = subparsers.add_parser("rebalance", help=about, description=about)
    add_address(parser, timeout=OPERATION_SECONDS)
    parser.add_argument(
        "--dry-run", action="store_true", help="print the plan (moves, bytes, expected gain) and move nothing"
    )
    parser.add_argument(
        "--policy",
        default="",
        help="balancing policy: incremental, eplb, even, ...; by default the configured one",
    )
    parser.add_argument(
        "--max-moves",
        type=int,
        default=0,
        metavar="N",
        help="most moves over all layers; 0, the default, means as many as pay",
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Prints the plan and the outcome; returns 0, or 1 when it was abandoned or failed."""
    if not 0 <= args.max_moves <= MOST_MOVES:
        raise ValueError(f"--max-moves={args.max_moves} must be 0 to {MOST_MOVES}")
    with client_of(args) as client:
        reply = client.rebalance(
            policy=args.policy, max_moves=args.max_moves, dry_run=args.dry_run, timeout=args.timeout
        )
    print(as_json(reply) if args.json else text(reply))
    return 0 if reply.outcome in DONE else 1


def text(reply: Any) -> str:
    """Formats a RebalanceReply as text."""
    moves: list[tuple[object, ...]] = [("layer", "expert", "from rank", "slot", "to rank", "slot")]
    moves += [(m.layer, m.expert, m.from_rank, m.from_slot, m.to_rank, m.to_slot) for m in reply.moves]
    layers: list[tuple[object, ...]] = [("layer", "moves", "largest over mean load", "then")]
    layers += [(g.layer, g.moves, round(g.before, 3), round(g.after, 3)) for g in reply.layers]
    plan = (
        f"plan: {len(reply.moves)} moves, {reply.planned_bytes / MIB:.1f} MiB; "
        f"largest over mean load of a rank falls by {reply.gain:.3f}, mean over layers"
    )
    return "\n\n".join([*([table(moves), table(layers)] if reply.moves else []), f"{plan}\n{ended(reply)}"])


def ended(reply: Any) -> str:
    """Returns the outcome of a rebalance in one line."""
    if reply.outcome == "planned":
        return "dry run: nothing was moved"
    if reply.outcome == "even":
        return f"even: no move pays; epoch {reply.epoch} stays"
    done = (
        f"{reply.committed_moves} copies, {reply.moved_bytes / MIB:.1f} MiB, in {reply.epochs} epochs and "
        f"{reply.seconds:.2f} s; epoch {reply.epoch} is served"
    )
    corrupted = f"; {reply.corrupted} copies came corrupted and were fetched again" if reply.corrupted else ""
    return f"{reply.outcome}{reply.reason and f': {reply.reason}'}: {done}{corrupted}"
