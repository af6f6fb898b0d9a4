"""`bench/gpu_lane.py`: what hangs, dies or raises in a lane is told, and the lane works on."""

import importlib
import operator
import os
import time
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("gpu_lane")


def test_a_lane_outlives_what_it_runs(lanes: ModuleType) -> None:
    lane = lanes.Lane()
    assert lane.run(60, operator.add, 1, 2) == 3
    with pytest.raises(lanes.Failed, match='ValueError: "invalid literal'):
        lane.run(60, int, "x")
    with pytest.raises(lanes.Failed, match="ended with status 3"):
        lane.run(60, os._exit, 3)
    with pytest.raises(lanes.Failed, match="no end in 1 s"):
        lane.run(1, time.sleep, 60)
    assert lane.run(60, operator.add, 3, 4) == 7
    lane.close()


def test_tasks_are_spread_and_failures_are_lines(
    lanes: ModuleType, capfd: pytest.CaptureFixture[str]
) -> None:
    lane = lanes.in_lanes(int, [("1",), ("no",), ("3",)], 2, time.monotonic() + 60)
    assert lane.run(60, operator.add, 1, 1) == 2
    lane.close()
    assert capfd.readouterr().out.startswith("int no: ValueError")
