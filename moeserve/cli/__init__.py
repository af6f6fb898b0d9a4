"""The `moeserve` command: one file a subcommand; heavy packages are imported when a subcommand runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from moeserve import __version__
from moeserve.cli import inspect, serve

COMMANDS = (serve, inspect)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code: 0 done, 1 failed, 2 bad input."""
    parser = argparse.ArgumentParser(prog="moeserve", description="Serves the experts of mixture-of-experts models.")
    parser.add_argument("--version", action="version", version=f"moeserve {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(subparsers)
    args = parser.parse_args(argv)
    try:
        return int(args.func(args))
    except (ValueError, OSError, RuntimeError) as error:
        print(f"moeserve: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
