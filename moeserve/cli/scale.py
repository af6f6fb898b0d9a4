"""`moeserve scale`: has a running service go on with more ranks, or with fewer."""

from __future__ import annotations

import argparse
from typing import Any

from moeserve.cli.arguments.remote import add_address, as_json, client_of
from moeserve.proto.client.patience import OPERATION_SECONDS

MIB = 1 << 20
DONE = ("scaled", "unchanged")
"""Outcomes of a scale that did what was asked."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand `scale` and its arguments."""
    about = "have a running service go on with RANKS ranks, while it serves"
    parser = subparsers.add_parser("scale", help=about, description=about)
    add_address(parser, timeout=OPERATION_SECONDS)
    parser.add_argument(
        "ranks",
        type=int,
        metavar="RANKS",
        help="how many there are to be: at most members.max_lanes and members.max_owners, and at least so "
        "many that their slots hold every expert",
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Prints the outcome; returns 0, or 1 when it was abandoned."""
    if args.ranks < 1:
        raise ValueError(f"RANKS={args.ranks} must be 1 or more; to end the service, stop `moeserve serve`")
    with client_of(args) as client:
        reply = client.scale(args.ranks, timeout=args.timeout)
    print(as_json(reply) if args.json else text(reply))
    return 0 if reply.outcome in DONE else 1


def text(reply: Any) -> str:
    """Formats a ScaleReply as text."""
    now = f"ranks {' '.join(map(str, reply.seats))} serve; epoch {reply.epoch}, generation {reply.generation}"
    done = [
        *([f"ranks {' '.join(map(str, reply.joined))} joined"] if reply.joined else []),
        *([f"ranks {' '.join(map(str, reply.left))} left"] if reply.left else []),
        f"{reply.moves} experts moved, {reply.nbytes / MIB:.1f} MiB in {reply.epochs} epochs",
        f"{reply.seconds:.2f} s",
    ]
    why = f": {reply.reason}" if reply.reason else ""
    return f"{reply.outcome}{why}: {', '.join(done)}; {now}"
