"""`moeserve reload`: brings another checkpoint's weights, of the same shapes, into a running service."""

from __future__ import annotations

import argparse
import os
from typing import Any

from moeserve.cli.arguments.remote import add_address, as_json, client_of
from moeserve.proto.client.patience import OPERATION_SECONDS

MIB = 1 << 20


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand `reload` and its arguments."""
    about = "bring a running service to the weights of another checkpoint of the same shapes, while it serves"
    parser = subparsers.add_parser("reload", help=about, description=about)
    add_address(parser, timeout=OPERATION_SECONDS)
    parser.add_argument(
        "checkpoint",
        help="folder of the checkpoint, at the same path on every host of the service, or "
        "org/name[@revision] in the hub cache there",
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Prints the outcome; returns 0, or 1 when the reload was abandoned."""
    with client_of(args) as client:
        reply = client.reload(asked(args.checkpoint), timeout=args.timeout)
    print(as_json(reply) if args.json else text(reply))
    return 0 if reply.outcome == "reloaded" else 1


def asked(named: str) -> str:
    """What to ask the service for: an absolute path, or `org/name` where there is no such folder here. Raises
    ValueError for an empty text, which would be the working directory.
    """
    if not named.strip():
        raise ValueError(f"{named!r} names no checkpoint; give its folder, or org/name[@revision]")
    path = os.path.abspath(named)
    of_hub = named.count("/") == 1 and not named.startswith((".", "/", "~")) and not named.endswith("/")
    return named if of_hub and not os.path.exists(path) else path


def text(reply: Any) -> str:
    """Formats a ReloadReply as text."""
    done = (
        f"{reply.epochs} layers, {reply.nbytes / MIB:.1f} MiB, in {reply.seconds:.2f} s; "
        f"weights version {reply.weights_version} and epoch {reply.epoch} are served"
    )
    if reply.outcome == "reloaded":
        return f"reloaded: {done}"
    stay = "; the layers that were reloaded stay so: reload again, or go back to the weights before"
    return f"{reply.outcome}: {reply.reason}: {done}{stay if reply.epochs else ''}"
