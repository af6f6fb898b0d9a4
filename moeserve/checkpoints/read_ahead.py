"""Asks the operating system for bytes of files before they are read: `read_ahead`.

A memory map brings a file's pages one small window at a time, which leaves a slow or remote disk idle between
them. Told early, the kernel reads a layer's experts from all shards while the layer before is prepared.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

GAP = 1 << 20
"""Bytes between two wanted ranges of a file that are asked for rather than skipped."""


@dataclass(frozen=True, order=True)
class Span:
    """A range of bytes of a file."""

    file: Path
    start: int
    stop: int


def merged(spans: Iterable[Span]) -> list[Span]:
    """Returns spans sorted, those of a file that overlap or lie within `GAP` bytes made one."""
    found: list[Span] = []
    for span in sorted(spans):
        last = found[-1] if found else None
        if last is not None and last.file == span.file and span.start - last.stop <= GAP:
            found[-1] = Span(span.file, last.start, max(last.stop, span.stop))
        else:
            found.append(span)
    return found


def read_ahead(spans: Iterable[Span], descriptor: Callable[[Path], int]) -> int:
    """Asks for the bytes of `spans` without waiting for them; returns how many bytes were asked for.

    descriptor: an open file. Where the system has no such call nothing is asked for. Raises what that raises.
    """
    advise = getattr(os, "posix_fadvise", None)
    if advise is None:
        return 0
    asked = 0
    for span in merged(spans):
        advise(descriptor(span.file), span.start, span.stop - span.start, os.POSIX_FADV_WILLNEED)
        asked += span.stop - span.start
    return asked
