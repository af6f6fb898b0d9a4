"""A signal whose handler raises in what the main thread waits for, as Ctrl-C and a job's time limit do."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


class Stop(Exception):
    """What a handler raises: of a job's time limit it is no BaseException."""


@contextmanager
def struck(kind: type[BaseException], seconds: float = 0.05) -> Iterator[None]:
    """Raises `kind` in the main thread after so many seconds, where that is still inside."""

    def strike(number: int, frame: object) -> None:
        raise kind("the time is over")

    before = signal.signal(signal.SIGALRM, strike)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
