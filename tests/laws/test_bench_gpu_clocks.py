"""The clocks that a record names are what nvidia-smi wrote while it was measured."""

from __future__ import annotations

import sys
import time

import pytest

from bench.lib.gpu_clocks import GpuClocks, command

LINES = ("1980, 310.55", "[N/A], 300.00", "1500, 690.00", "1980, 400.00")


def written(*lines: str) -> GpuClocks:
    """Of what writes these lines, and then nothing until it is ended."""
    text = f"print({chr(10).join(lines)!r}, flush=True); import time; time.sleep(60)"
    return GpuClocks([sys.executable, "-c", text])


def test_the_lowest_and_the_median_are_told() -> None:
    with written(*LINES) as clocks:
        until = time.monotonic() + 20
        while clocks.told.get("W") != 400.0:  # of all three
            assert time.monotonic() < until
            time.sleep(0.01)
    assert clocks.told == {"SM MHz": 1980.0, "lowest SM MHz": 1500.0, "W": 400.0}


@pytest.mark.parametrize(
    "clocks", [GpuClocks(["/nowhere/nvidia-smi"]), GpuClocks([sys.executable, "-c", "print('No devices')"])]
)
def test_where_nothing_is_read_nothing_is_told(clocks: GpuClocks) -> None:
    with clocks:
        until = time.monotonic() + 20
        while not clocks.why_not:
            assert time.monotonic() < until
            time.sleep(0.01)
    assert clocks.told == {} and ("nowhere" in clocks.why_not or clocks.why_not == "No devices")


def test_a_gpu_is_named_by_its_uuid() -> None:
    assert command("12-ab", 20)[1:] == command("GPU-12-ab", 20)[1:]
    assert "--id=GPU-12-ab" in command("12-ab") and "--loop-ms=50" in command("12-ab")
