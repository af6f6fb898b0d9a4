"""Where a service's processes come from: one that has imported everything and has done nothing.

A terminal's Ctrl-C and its end (SIGHUP), and a SIGTERM of systemd's or of `timeout`, reach every process of
the service. The one that was started stops the others, calls under way first: they leave these signals to it.
"""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.util  # before `atexit.register`: what is registered later is called first
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess

from moeserve.runtime.keys.sockets import check_room
from moeserve.runtime.launch import openmp

DEAF = "deaf"
"""Begins the names of processes that `hear_no_signals`: multiprocessing would wait for their end for ever."""


def warm_processes(imported: Sequence[str], *, heed_sigterm: bool = True) -> ForkServerContext:
    """Where a service's processes come from: one that has imported these modules, those that are installed.

    They have the environment of the first use here, and `openmp.environment`. heed_sigterm: False blocks
    SIGTERM and SIGHUP there and in all of them, until they `hear_no_signals`: for a program that has no other
    processes of this kind. Raises OSError.
    """
    check_room()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(imported))
    with openmp.for_ranks(), nullcontext() if heed_sigterm else _blocked(signal.SIGHUP, signal.SIGTERM):
        forkserver.ensure_running()
    return context


@contextmanager
def _blocked(*numbers: signal.Signals) -> Iterator[None]:
    """Processes that this thread starts meanwhile begin with the signals blocked. One that comes for this
    process is heard by another thread, or afterwards.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        resource_tracker.ensure_running()  # which unblocks SIGTERM where it starts
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def begin(process: BaseProcess) -> None:
    """Starts a process of a service. Raises OSError where this host starts none now."""
    try:
        process.start()
    except EOFError as error:
        why = "the forkserver ended meanwhile; it was killed, by the host's end of memory perhaps"
        raise OSError(f"a process of the service cannot be forked: {why}; start the service again") from error


def hear_no_signals() -> None:
    """Leaves SIGINT, SIGTERM and SIGHUP to the launcher: the calling process ends by its word, its end, or
    killed.

    The last two have a handler, since a compiler that this process starts would ignore them for ever, too.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGHUP})


def _kill_left() -> None:
    """Kills what a program that ends without a stop has left: multiprocessing sends SIGTERM, and waits."""
    for process in multiprocessing.active_children():
        if process.name.startswith(DEAF):
            process.kill()


atexit.register(_kill_left)
