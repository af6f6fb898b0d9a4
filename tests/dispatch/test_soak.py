"""Hundreds of steps from which random lanes are absent: no wrong row, and no growth."""

import pytest
from parallel import parallel_launch
from soak_ranks import soaked

STEPS = 500
GROWN = 8.0
"""MiB that a process may take in STEPS steps beyond those it warms up in, for what malloc keeps."""


@pytest.mark.parametrize("members", ["2x1", "both,lane,owner"])
@pytest.mark.parametrize("dispatcher", ["nvlink_ll", "nvlink_ht"])
def test_steps_with_absent_lanes_over_the_twin(dispatcher: str, members: str) -> None:
    sizes = ["--hidden", "160", "--lane-rows", "16", "--slots", "6", "--room", "12x4"]
    options = ["--dispatcher", dispatcher, "--members", members, "--steps", str(STEPS), *sizes]
    found = parallel_launch(3, soaked, options)
    assert [one.wrong for one in found] == [0, 0, 0]
    assert [one.late for one in found] == [(), (), ()]
    absent = [one.absent for one in found]
    assert max(absent) > STEPS // 8, f"a lane-only member is absent from many steps: {absent}"
    assert min(absent) == 0, f"owners are in all of them: {absent}"
    for one in found:
        assert one.grown.host < GROWN
        assert (one.grown.files, one.grown.threads) == (0, 0)
