"""`moeserve health`: tells whether a service serves, by its exit code."""

from __future__ import annotations

import argparse
import json
import math
import time

from moeserve.cli.arguments.remote import add_address, client_of
from moeserve.proto.client import MoeClient
from moeserve.proto.errors import MoeError

ASK_SECONDS = 0.25  # between two questions while waiting


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand `health` and its arguments."""
    about = "ask a running service whether it serves (grpc.health.v1): exit code 0, else 1 with the reason"
    parser = subparsers.add_parser("health", help=about, description=about)
    add_address(parser, timeout=5.0)
    parser.add_argument(
        "--wait",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="longest wait until it serves; 0 by default, which asks once",
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Prints `SERVING` and returns 0, or prints the state and its reason and returns 1.

    Raises ValueError for a wait that is no length of time.
    """
    if not 0 <= args.wait < math.inf:
        raise ValueError(f"--wait={args.wait:g} must be 0 or more seconds")
    until = time.monotonic() + args.wait
    with client_of(args) as client:
        health, reason = ask(client)
        while health != "SERVING" and time.monotonic() < until:
            time.sleep(ASK_SECONDS)
            health, reason = ask(client)
    print(
        json.dumps({"health": health, "reason": reason})
        if args.json
        else f"{health}{reason and f': {reason}'}"
    )
    return 0 if health == "SERVING" else 1


def ask(client: MoeClient) -> tuple[str, str]:
    """Returns the service's health and the reason; `UNREACHABLE` when nobody answers."""
    try:
        health = client.health()
        return health, "" if health == "SERVING" else client.topology().reason
    except MoeError as failed:
        return "UNREACHABLE" if failed.code in (
            "UNAVAILABLE",
            "DEADLINE_EXCEEDED",
        ) else failed.code, failed.message
