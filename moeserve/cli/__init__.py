"""The `moeserve` command: one file a subcommand, imported only when it is the one that runs."""

from __future__ import annotations

import argparse
import os
import select
import sys
from collections.abc import Sequence
from importlib import import_module

from moeserve import __version__
from moeserve.cli.shown.errors import explain
from moeserve.cli.shown.lines import say

COMMANDS: dict[str, str] = {
    "serve": "serve a checkpoint's experts until told to stop",
    "plan": "show which kernel and all2all backend each layer gets, and why not the others",
    "record": "record how many tokens each expert gets, for simulate to plan from",
    "simulate": "plan placement from recorded loads: balance, moves, memory, time a step",
    "inspect": "show layers, experts, shapes, scheme, routing and bytes of a checkpoint",
    "quantize": "write a checkpoint with its experts in another format, as compressed-tensors stores it",
    "status": "show how a running service is doing",
    "health": "ask a running service whether it serves; the exit code tells",
    "rebalance": "move experts of a running service so that its ranks' loads are even",
    "reload": "bring a running service to the weights of another checkpoint of the same shapes",
    "scale": "add ranks to a running service, or take some away",
    "log-level": "set how much a running service logs, or show how much it does",
    "bench": "drive a running service and time its answers",
    "version": "show the versions of moeserve and of what it uses",
}
"""The table of subcommands. Each is a module of this package with `add_parser(subparsers)`, which sets
`func(args) -> exit code`. At its top a module imports only the base install: numpy, grpcio, protobuf.
"""

DONE, FAILED, BAD_INPUT = 0, 1, 2
"""Exit codes. What is wrong with the command line, the configuration or the checkpoint is bad input."""

INTERRUPTED, STDOUT_CLOSED = 130, 141
"""Exit codes of a shell for a command that SIGINT or SIGPIPE ended."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code. An error is one line on stderr, with `--debug` a traceback.

    A reader of stdout that has gone (`moeserve plan ... | head -1`) ends any command without a word.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            return _run(words)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # what is buffered meets a closed pipe here and not at exit
    except BrokenPipeError:
        if not stdout_is_closed():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the flush at exit fails as well
        return STDOUT_CLOSED


def stdout_is_closed() -> bool:
    """Whether nobody can read what is printed; other pipes and sockets may break while stdout is whole."""
    try:
        number = sys.stdout.fileno()
    except (AttributeError, OSError, ValueError):  # there is none, or it is an object of a test
        return False
    poll = select.poll()
    poll.register(number, 0)
    return any(events & (select.POLLERR | select.POLLHUP | select.POLLNVAL) for _, events in poll.poll(0))


def _run(words: Sequence[str]) -> int:
    # Before gRPC is imported, here and in ranks: its core writes a line for every stranger whom TLS refuses.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    command, debug = _command(words), "--debug" in words
    try:
        args = _parser(words).parse_args(words)
        return int(args.func(args))
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        if debug or (isinstance(error, BrokenPipeError) and stdout_is_closed()):
            raise
        say(sys.stderr, f"moeserve {command}: {explain(error)}")
        return BAD_INPUT if isinstance(error, ValueError) else FAILED


def _command(words: Sequence[str]) -> str | None:
    """Returns the subcommand that `words` name: the first of them that is no flag."""
    return next((word for word in words if not word.startswith("-")), None)


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """Makes the parser; only the subcommand that `words` name gets its arguments, as some import torch."""
    parser = argparse.ArgumentParser(
        prog="moeserve", description="Serves the experts of mixture-of-experts models."
    )
    parser.add_argument("--version", action="version", version=f"moeserve {__version__}")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    subparsers = parser.add_subparsers(metavar="COMMAND", dest="command", required=True)
    wanted = _command(words)
    for name, about in COMMANDS.items():
        if name == wanted:
            import_module(f"moeserve.cli.{name.replace('-', '_')}").add_parser(subparsers)
            chosen = subparsers.choices[name]
            chosen.add_argument(
                "--debug", action="store_true", default=argparse.SUPPRESS, help="show tracebacks"
            )
        else:
            subparsers.add_parser(name, help=about)
    return parser
