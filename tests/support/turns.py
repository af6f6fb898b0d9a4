"""`Turns`: which tests of several workers (pytest-xdist) may run at once.

A test marked `timed` bounds how long something takes, and runs while no other test does. Tests marked `ray`
take turns: clusters on one machine hand out the same ports.
"""

from __future__ import annotations

import fcntl
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest


class Turns:
    """A plugin of one worker. Its locks are files in `folder`, which all workers of a run share."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Around a test with what is set up for it, and outside its timeout."""
        kind = fcntl.LOCK_EX if item.get_closest_marker("timed") else fcntl.LOCK_SH
        with ExitStack() as held:
            if item.get_closest_marker("ray"):
                held.enter_context(self._lock("ray", fcntl.LOCK_EX))
            with self._lock("door", fcntl.LOCK_EX):  # held by who waits to be alone, so that nobody overtakes
                held.enter_context(self._lock("room", kind))
            return (yield)

    @contextmanager
    def _lock(self, name: str, kind: int) -> Iterator[None]:
        with (self._folder / f"{name}.lock").open("a") as file:
            fcntl.flock(file, kind)
            yield
