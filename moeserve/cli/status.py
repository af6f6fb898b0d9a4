"""`moeserve status`: shows what a running service reports of itself."""

from __future__ import annotations

import argparse
from typing import Any

from moeserve.cli.arguments.remote import add_address, as_json, client_of, table

MIB = 1 << 20


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand `status` and its arguments."""
    about = "show state, ranks and balance of a running service"
    parser = subparsers.add_parser("status", help=about, description=about)
    add_address(parser, timeout=10.0)
    parser.add_argument("--experts", action="store_true", help="show how many tokens each expert got, too")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Prints the status; returns 0 even when the service does not serve (ask `health` for that)."""
    with client_of(args) as client:
        status = client.status(experts=args.experts)
    print(as_json(status) if args.json else text(status))
    return 0


def _places(member: Any) -> tuple[object, object, int]:
    """A member's lane, its owner's place and its slots; "-" for a place that it has not."""
    lane = member.lane if member.HasField("lane") else "-"
    return lane, member.owner if member.HasField("owner") else "-", member.slots


def text(status: Any) -> str:
    """Formats a GetStatusReply as text."""
    head = [
        ("state", status.state + (f": {status.reason}" if status.reason else "")),
        ("group", f"generation {status.generation}, epoch {status.epoch}, moeserve {status.version}"),
        (
            "work",
            f"{status.jobs} jobs in {status.steps} steps; {status.queued} queued, {status.in_flight} running",
        ),
    ]
    ranks: list[tuple[object, ...]] = [
        ("rank", "lane", "owner", "slots", "up", "address", "pid", "steps", "expert rows", "weights MiB")
    ]
    ranks += [
        (
            *(r.rank, *_places(r.member), "yes" if r.up else "no"),
            *(r.address, r.pid, r.steps, r.tokens, round(r.weight_bytes / MIB, 1)),
        )
        for r in status.ranks
    ]
    losses: list[tuple[object, ...]] = [
        ("if lost", "replicas", "shadows", "disk", "waits", "bring in MiB", "shadows MiB")
    ]
    losses += [
        (
            *(r.rank, r.cover.replicas, r.cover.shadows, r.cover.disk, r.cover.waits),
            *(round(r.cover.bytes / MIB, 1), round(r.shadow_bytes / MIB, 1)),
        )
        for r in status.ranks
        if r.HasField("cover")
    ]
    layers: list[tuple[object, ...]] = [("layer", "balancedness")]
    layers += [(layer.layer, f"{layer.balancedness:.3f}") for layer in status.layers]
    experts = [
        f"layer {layer.layer}, tokens by expert: {' '.join(map(str, layer.tokens))}"
        for layer in status.layers
        if layer.tokens
    ]
    return "\n\n".join(
        [
            "\n".join(f"{name:<6} {value}" for name, value in head),
            *(table(each) for each in (ranks, losses, layers)),
            *experts,
        ]
    )
