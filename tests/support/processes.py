"""Processes that a test started, and whether they have ended."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from pathlib import Path


def descendants_of(pid: int | str) -> list[str]:
    """Processes that any thread of `pid` has started, and what these have started, by id."""
    found: list[str] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it, or a thread of it, has ended
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in (thread / "children").read_text().split():
                found += [child, *descendants_of(child)]
    return found


def is_forkserver(pid: str) -> bool:
    """Whether it is what ranks are forked from, or a rank."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return "forkserver" in Path(f"/proc/{pid}/cmdline").read_text()
    return False


def gone(pids: Iterable[str], seconds: float) -> bool:
    """Whether all of these processes end within so many seconds."""
    deadline = time.monotonic() + seconds
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        if time.monotonic() > deadline:
            print(f"still there: {left}")
            return False
        time.sleep(0.05)
    return True
