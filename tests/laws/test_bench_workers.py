"""`bench/lib/gpu_worker.py`: what hangs, dies or raises in a worker is told, and it works on."""

import operator
import os
import time

import pytest

from bench.lib import gpu_worker


def test_a_worker_outlives_what_it_runs() -> None:
    worker = gpu_worker.Worker()
    assert worker.run(60, operator.add, 1, 2) == 3
    with pytest.raises(gpu_worker.Failed, match='ValueError: "invalid literal'):
        worker.run(60, int, "x")
    with pytest.raises(gpu_worker.Failed, match="ended with status 3"):
        worker.run(60, os._exit, 3)
    with pytest.raises(gpu_worker.Failed, match="no end in 1 s"):
        worker.run(1, time.sleep, 60)
    assert worker.run(60, operator.add, 3, 4) == 7
    worker.close()


def test_tasks_are_spread_and_failures_are_lines(capfd: pytest.CaptureFixture[str]) -> None:
    worker = gpu_worker.on_workers(int, [("1",), ("no",), ("3",)], 2, time.monotonic() + 60)
    assert worker.run(60, operator.add, 1, 1) == 2
    worker.close()
    assert capfd.readouterr().out.startswith("int no: ValueError")
