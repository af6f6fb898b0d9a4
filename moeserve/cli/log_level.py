"""`moeserve log-level`: sets how much the processes of a running service log, or shows how much they do."""

from __future__ import annotations

import argparse
from typing import Any

from moeserve.cli.arguments.names import named
from moeserve.cli.arguments.remote import add_address, as_json, client_of, table


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand `log-level` and its arguments."""
    about = "set how much a running service logs, head and ranks; without LEVEL, show how much it does"
    parser = subparsers.add_parser("log-level", help=about, description=about)
    add_address(parser, timeout=10.0)
    parser.add_argument(
        "level",
        type=named,
        nargs="?",
        metavar="LEVEL",
        help="level from which on to log: debug, info, warning or error",
    )
    parser.add_argument(
        "--logger",
        default="",
        metavar="NAME",
        help="whose lines: moeserve (the default), a module such as moeserve.runtime.head, or a library: "
        "grpc, ray, torch, asyncio",
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Sets the level and prints those that are set; returns 0."""
    with client_of(args) as client:
        reply = client.set_log_level(args.level or "", args.logger)
    print(as_json(reply) if args.json else text(reply))
    return 0


def text(reply: Any) -> str:
    """Formats a SetLogLevelReply as text."""
    return table([("logger", "level"), *((each.logger, each.level) for each in reply.levels)])
