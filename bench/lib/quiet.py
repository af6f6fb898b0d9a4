"""Whether the machine is otherwise idle: what a time measured on it is worth."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from typing import TypeVar

T = TypeVar("T")

ENOUGH = 0.75


def rounds(measure: Callable[[], T], count: int, patience: float, cores: Collection[int] = ()) -> Iterator[T]:
    """What `measure` gives in `count` rounds before and after which nothing else ran on `cores`, none: any.

    After `patience` seconds three quarters of them are enough; RuntimeError when there are fewer.
    """
    begun, found = time.monotonic(), 0
    while found < count:
        if time.monotonic() - begun > patience:
            if found >= ENOUGH * count:
                return
            text = f"{found} quiet rounds of {count} in {patience:.0f} s"
            raise RuntimeError(f"other processes keep the machine busy: {text}; give more --patience")
        if idle(cores=cores):
            result = measure()
            if idle(cores=cores):
                found += 1
                yield result


def idle(sample: float = 0.05, share: float = 0.15, cores: Collection[int] = ()) -> bool:
    """Whether `cores`, all where none is named, are together busy for at most `share` of the next `sample`
    seconds.
    """
    time.sleep(0.005)
    before = _ticks(cores)
    time.sleep(sample)
    busy, total = (now - then for now, then in zip(_ticks(cores), before, strict=True))
    return busy <= share * total


def _ticks(cores: Collection[int]) -> tuple[int, int]:
    """Busy ticks and all ticks of these cores since boot, of all where none is named."""
    names = {f"cpu{core}" for core in cores} or {"cpu"}
    busy = total = 0
    with open("/proc/stat") as lines:
        for line in lines:
            name, *fields = line.split()
            if name in names:
                ticks = [int(field) for field in fields[:8]]
                total += sum(ticks)
                busy += sum(ticks) - ticks[3] - ticks[4]  # without idle and waiting for disks
    return busy, total
