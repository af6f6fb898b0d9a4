"""The test launcher itself: results by rank, a rank's traceback, and a bound on time."""

import time

import pytest
from launched import add_up, die, fail_on_one, hang
from parallel import RankFailed, parallel_launch


def test_results_come_by_rank() -> None:
    assert parallel_launch(2, add_up, 10, timeout=60) == [(0, 21), (1, 21)]


def test_a_failure_carries_its_traceback() -> None:
    with pytest.raises(RankFailed, match=r"(?s)rank 1: .*ValueError: lost my way") as failed:
        parallel_launch(2, fail_on_one, timeout=60)
    assert "in fail_on_one" in str(failed.value)


def test_a_death_and_a_hang_are_told() -> None:
    began = time.monotonic()
    with pytest.raises(RankFailed, match="rank 1: died without a word"):
        parallel_launch(2, die, timeout=60)
    with pytest.raises(RankFailed, match="rank 0: did not finish in time"):
        parallel_launch(1, hang, timeout=2)
    assert time.monotonic() - began < 60
