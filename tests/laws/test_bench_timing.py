"""What benches compare by turns: the median of differences with its interval, and cores shared out."""

from __future__ import annotations

import os
import random

import pytest

from bench.lib.cores import Cores, on
from bench.service.tls_cost import Cost


def test_the_interval_of_a_median_holds_the_true_one_in_95_of_100_cases() -> None:
    draw = random.Random(0)
    held = 0
    for _ in range(400):
        cost = Cost.of([draw.gauss(7.0, 3.0) for _ in range(101)])
        assert cost.low <= cost.median <= cost.high
        held += cost.low <= 7.0 <= cost.high
    assert 0.93 <= held / 400 <= 0.99


def test_cores_of_the_service_and_of_the_load_are_apart() -> None:
    every = os.sched_getaffinity(0)
    together = Cores.shared_out(0)
    assert together.service == together.load == every and not together.apart
    with pytest.raises(ValueError, match="the load needs one"):
        Cores.shared_out(len(every))
    if len(every) < 2:
        return
    cores = Cores.shared_out(1)
    assert cores.apart and cores.service | cores.load == every and not cores.service & cores.load
    with on(cores.service):
        assert os.sched_getaffinity(0) == cores.service
    assert os.sched_getaffinity(0) == every
