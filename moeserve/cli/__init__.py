"""The `moeserve` command: one file a subcommand, imported only when it is the one that runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from moeserve import __version__

COMMANDS: dict[str, str] = {
    "serve": "serve a checkpoint's experts until told to stop",
    "plan": "show which kernel and dispatcher each layer gets, and why not the others",
    "record": "record how many tokens each expert gets, for simulate to plan from",
    "simulate": "plan placement from recorded loads: balance, moves, memory, time a step",
    "inspect": "show layers, experts, shapes, scheme, routing and bytes of a checkpoint",
    "quantize": "write a checkpoint with its experts in another format, as compressed-tensors stores it",
    "status": "show how a running service is doing",
    "health": "ask a running service whether it serves; the exit code tells",
    "rebalance": "move experts of a running service so that its ranks' loads are even",
    "reload": "bring a running service to the weights of another checkpoint of the same shapes",
    "bench": "drive a running service and time its answers",
    "version": "show the versions of moeserve and of what it uses",
}
"""Each is a module of this package with `add_parser(subparsers)`, which sets `func(args) -> exit code`."""

DONE, FAILED, BAD_INPUT = 0, 1, 2
"""Exit codes. What is wrong with the command line, the configuration or the checkpoint is bad input."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code. An error is one line on stderr, with `--debug` a traceback."""
    words = list(sys.argv[1:] if argv is None else argv)
    args = _parser(words).parse_args(words)
    try:
        return int(args.func(args))
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if args.debug:
            raise
        print(f"moeserve {args.command}: {explain(error)}", file=sys.stderr)
        return BAD_INPUT if isinstance(error, ValueError) else FAILED


def explain(error: Exception) -> str:
    """What went wrong, and for a missing package what installs it."""
    if isinstance(error, ModuleNotFoundError):
        extra = "cluster" if error.name == "ray" else "server"
        return f"this needs the package {error.name}; pip install 'moeserve[{extra}]' brings it"
    return str(error) or type(error).__name__


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """The parser; only the subcommand that `words` name is filled in, since some import torch."""
    parser = argparse.ArgumentParser(
        prog="moeserve", description="Serves the experts of mixture-of-experts models."
    )
    parser.add_argument("--version", action="version", version=f"moeserve {__version__}")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    subparsers = parser.add_subparsers(metavar="COMMAND", dest="command", required=True)
    wanted = next((word for word in words if not word.startswith("-")), None)
    for name, about in COMMANDS.items():
        if name == wanted:
            import_module(f"moeserve.cli.{name}").add_parser(subparsers)
            chosen = subparsers.choices[name]
            chosen.add_argument(
                "--debug", action="store_true", default=argparse.SUPPRESS, help="show tracebacks"
            )
        else:
            subparsers.add_parser(name, help=about)
    return parser
