"""Whether the machine is otherwise idle: what a time measured on it is worth."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")

ENOUGH = 0.75


def rounds(measure: Callable[[], T], count: int, patience: float) -> Iterator[T]:
    """What `measure` gives in `count` rounds before and after which nothing else ran.

    After `patience` seconds three quarters of them are enough; RuntimeError when there are fewer.
    """
    begun, found = time.monotonic(), 0
    while found < count:
        if time.monotonic() - begun > patience:
            if found >= ENOUGH * count:
                return
            text = f"{found} quiet rounds of {count} in {patience:.0f} s"
            raise RuntimeError(f"other processes keep the machine busy: {text}; give more --patience")
        if idle():
            result = measure()
            if idle():
                found += 1
                yield result


def idle(sample: float = 0.05, share: float = 0.15) -> bool:
    """Whether all cores together are busy for at most `share` of the next `sample` seconds."""
    time.sleep(0.005)
    before = _ticks()
    time.sleep(sample)
    busy, total = (now - then for now, then in zip(_ticks(), before, strict=True))
    return busy <= share * total


def _ticks() -> tuple[int, int]:
    """Busy ticks and all ticks of all cores since boot."""
    with open("/proc/stat") as lines:
        ticks = [int(field) for field in lines.readline().split()[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)  # without idle and waiting for disks
