"""Formats numbers for people: bytes in units, and layers as ranges."""

from __future__ import annotations

from collections.abc import Sequence

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def human(nbytes: int) -> str:
    """Formats bytes in the largest unit that leaves a number of one or more: `1536` -> `1.5 KiB`."""
    size, unit = float(nbytes), UNITS[0]
    for unit in UNITS:
        if size < 1024 or unit == UNITS[-1]:
            break
        size /= 1024
    return f"{size:.0f} {unit}" if size == round(size) else f"{size:.1f} {unit}"


def ranges(numbers: Sequence[int]) -> str:
    """Formats ascending numbers as ranges: `[0, 1, 2, 5]` -> `0-2, 5`; `none` if empty."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs) or "none"
