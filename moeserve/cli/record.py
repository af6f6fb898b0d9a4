"""`moeserve record`: writes the expert load of a running service, or of count files, as a trace."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from moeserve.cli.arguments.names import named
from moeserve.cli.arguments.remote import add_credentials, address, client_of
from moeserve.experts.load import (
    PHASES,
    TORCH,
    Load,
    LoadTrace,
    LoadWindow,
    head_line,
    is_trace,
    read_trace,
    window_line,
)
from moeserve.proto import moe_pb2
from moeserve.proto.errors import Unavailable

LONGEST_WINDOW = 365 * 24 * 3600.0  # seconds

EXPLAINED = """\
A trace has one line a window and phase: prefill where lanes bring many rows to a step, decode where few. The
file grows window by window, so it is whole whenever the recording ends; --append continues one.
`moeserve simulate` reads it, all of it or one phase.

Ranks report about once a second while they work, so counts may be a second late. A window in which the
group forms anew, or the head is away, is left out, because counts begin again; a line says so. So are those
after it until all ranks have reported. --windows does not count them. Of a window in which no expert got a
token nothing is written, and it counts.

--from takes count files of SGLang and DeepSeek (JSON or .pt) or traces instead of a service, and puts their
windows one after the other.
"""

AWAY_SECONDS = 60.0  # for which a service may answer nobody, as while its head starts again
REPORTED_SECONDS = 10.0  # within which all ranks have reported to a new head; who took no step does not
AGAIN_SECONDS = 0.5  # between two questions meanwhile


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand `record` and its arguments."""
    about = "record how many tokens each expert gets, of a running service or from others' count files"
    parser = subparsers.add_parser(
        "record",
        help=about,
        description=about,
        epilog=EXPLAINED,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("address", nargs="?", type=address, metavar="HOST:PORT", help="address of the service's front door")
    add(
        "--from",
        dest="files",
        nargs="+",
        type=named,
        metavar="FILE",
        help="read these files instead of a service",
    )
    add("--out", type=named, required=True, metavar="FILE", help="the trace to write")
    add("--append", action="store_true", help="append to a trace that exists")
    add("--window", type=float, default=10.0, metavar="SECONDS", help="length of a window; 10 by default")
    add(
        "--windows",
        type=int,
        default=0,
        metavar="N",
        help="number of windows, but for those left out; endless by default",
    )
    add("--timeout", type=float, default=10.0, metavar="SECONDS", help="wait for an answer; 10 by default")
    add_credentials(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Writes windows until there are enough or SIGINT comes; prints a line each. Raises ValueError."""
    if (args.address is None) == (args.files is None):
        raise ValueError("give the HOST:PORT of a service, or --from FILE, and not both")
    if not 1 <= args.window <= LONGEST_WINDOW or args.windows < 0:
        raise ValueError(
            f"--window={args.window:g} must be 1 second or more (ranks report about once a second), "
            f"and a year at most, and --windows={args.windows} 0 or more"
        )
    out = Path(args.out)
    if args.files is not None:
        traces = [read_trace(file) for file in args.files]
        return _write(out, ((trace.layers, trace.windows) for trace in traces), args)
    with client_of(args) as client:
        return _write(out, recorded(lambda: client.status(experts=True), args.window, args.windows), args)


Windows = tuple[tuple[int, ...], Iterable[LoadWindow]]
"""Decoder layers, and windows of the loads of these layers."""


def recorded(ask: Callable[[], moe_pb2.GetStatusReply], seconds: float, windows: int) -> Iterator[Windows]:
    """Yields each window of a service as it ends; an interruption ends the last one early."""
    recorder, number, interrupted = Recorder(ask(), time.time()), 0, False
    while not interrupted and (not windows or number < windows):
        try:
            time.sleep(seconds)
        except KeyboardInterrupt:
            interrupted = True
        status = ask() if interrupted else _answered(ask)
        yield recorder.layers, recorder.window(status, time.time())
        number += not recorder.left_out


def _answered(ask: Callable[[], moe_pb2.GetStatusReply]) -> moe_pb2.GetStatusReply:
    """The service's status, asked for again while nobody answers: a head may be starting again. Raises
    Unavailable after AWAY_SECONDS.
    """
    until = monotonic() + AWAY_SECONDS
    while True:
        try:
            return ask()
        except Unavailable:
            if monotonic() > until:
                raise
            time.sleep(AGAIN_SECONDS)


class Recorder:
    """Turns statuses, whose counts only grow, into windows. Raises ValueError where there are no counts."""

    def __init__(self, status: moe_pb2.GetStatusReply, now: float) -> None:
        self.layers = tuple(layer.layer for layer in status.layers)
        self._generation, self._counts, self._since = status.generation, _counts(status), now
        if not self._counts.size:
            raise ValueError("the service tells no layer's experts; is it moeserve of this version?")
        self.left_out = False  # whether the last window was
        # until when counts may lack what some ranks have yet to report, all that they ever counted
        partial = any(rank.steps for rank in status.ranks) and not _all_reported(status)
        self._partial_until = now + REPORTED_SECONDS if partial else now

    def window(self, status: moe_pb2.GetStatusReply, now: float) -> list[LoadWindow]:
        """Returns the load since the last status, a window for each phase with any; none after a restart."""
        counts, before, since = _counts(status), self._counts, self._since
        again = status.generation != self._generation or bool((counts < before).any())
        self._generation, self._counts, self._since = status.generation, counts, now
        if again:
            self._partial_until = now + REPORTED_SECONDS
        self.left_out = again or since < self._partial_until
        if self.left_out:
            if _all_reported(status):
                self._partial_until = now
            why = "the group formed anew" if again else "not all ranks have reported since"
            print(f"{why}: this window is left out", flush=True)
            return []
        grown = dict(zip(PHASES, counts - before, strict=True))
        if not any(tokens.any() for tokens in grown.values()):
            print("no expert got a token: nothing is written of this window", flush=True)
        return [
            LoadWindow(Load(tokens), since, now - since, phase)
            for phase, tokens in grown.items()
            if tokens.any()
        ]


def _all_reported(status: moe_pb2.GetStatusReply) -> bool:
    """Whether all ranks that are there have told this head what they counted."""
    return all(rank.steps for rank in status.ranks if rank.up)


def _counts(status: moe_pb2.GetStatusReply) -> NDArray[np.float64]:
    """Returns the tokens of each expert since the start, `[phases, L, E]`."""
    prefill = np.array([layer.prefill_tokens for layer in status.layers], dtype=np.float64)
    decode = np.array([layer.tokens for layer in status.layers], dtype=np.float64) - prefill
    return np.stack([{"decode": decode, "prefill": prefill}[phase] for phase in PHASES])


def _write(out: Path, found: Iterable[Windows], args: argparse.Namespace) -> int:
    """Appends windows to the trace as they come. Raises ValueError if it exists or is of another model."""
    known = read_head(out, args)
    count = 0
    for layers, windows in found:
        for window in windows:
            trace = LoadTrace(layers, (window,))
            if known is None:
                _begin(out)
                _put(out, head_line(trace))
                known = (trace.layers, trace.experts)
            if known != (trace.layers, trace.experts):
                raise ValueError(
                    f"{out} is of {len(known[0])} layers of {known[1]} experts, and what comes now of "
                    f"{len(layers)} of {trace.experts}; a trace is of one model"
                )
            _put(out, window_line(window))
            count += 1
            print(_said(count, window), flush=True)
    print(f"{count} windows in {out}" if count else "no expert got a token; nothing was written")
    return 0


def _begin(out: Path) -> None:
    """Makes the file of a trace. Raises ValueError where another recording has made it meanwhile."""
    try:
        out.touch(exist_ok=False)
    except FileExistsError as error:
        raise ValueError(there_already(out)) from error


def _put(out: Path, line: str) -> None:
    """Appends a line. Where that fails, as on a full disk, the file is as it was: a trace stays whole."""
    left = f"{line}\n".encode()
    with out.open("ab", buffering=0) as file:
        size = file.tell()
        try:
            while left:
                left = left[file.write(left) :]
        except OSError:
            file.truncate(size)
            if not size:  # it was made for this line
                out.unlink()
            raise


def read_head(out: Path, args: argparse.Namespace) -> tuple[tuple[int, ...], int] | None:
    """Returns layers and experts of the trace to append to; None where a new one begins, which can be
    written. Raises ValueError, also for a file that is no trace: lines at its end would damage it.
    """
    if out.suffix == TORCH:
        raise ValueError(
            f"--out {out} would be read as a file of torch: give the trace another ending than .pt"
        )
    if not out.exists():
        if not os.access(out.parent, os.W_OK | os.X_OK):
            raise ValueError(f"--out {out} cannot be written: {out.parent} is no folder to write in")
        return None
    if not args.append:
        raise ValueError(there_already(out))
    try:
        goes_on = is_trace(out)
    except OSError as error:
        raise ValueError(f"--out {out} cannot be read: {error.strerror}") from error
    if not goes_on:
        raise ValueError(
            f"--out {out} is no trace of moeserve, and --append goes on with nothing else; take another FILE "
            f"(--from {out} puts counts into a trace)"
        )
    trace = read_trace(out)
    return trace.layers, trace.experts


def there_already(out: Path) -> str:
    """What is said of a file that nobody said to go on with."""
    return f"{out} is there already; --append goes on with it, --out FILE takes another"


def _said(number: int, window: LoadWindow) -> str:
    tokens, hottest = window.load.tokens, window.load.tokens.max(axis=1)
    mean = tokens.mean(axis=1)
    factor = float((hottest[mean > 0] / mean[mean > 0]).mean())
    phase = f" of {window.phase}" if window.phase else ""
    return (
        f"window {number}: {window.seconds:.1f} s, {int(tokens.sum())} (token, expert) pairs{phase}; "
        f"a layer's hottest expert has {factor:.2f}x the mean"
    )
