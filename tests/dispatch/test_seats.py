"""A seat that is taken and left under load, over the twin of peer memory."""

import pytest

from bench.dispatch.gpu_seats import SHARED, parsed, spread, take_and_leave

ROUNDS = 20


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dispatcher", ["nvlink_ll", "nvlink_ht"])
def test_a_seat_is_taken_and_left_while_steps_go_on(dispatcher: str) -> None:
    """The process that comes and goes brings right rows in each round; nobody is late."""
    options = ["--device", "cpu", "--dispatcher", dispatcher, "--rounds", str(ROUNDS), "--hidden", "160"]
    found = take_and_leave(parsed(options))
    assert (found.wrong, found.late) == (0, ())
    assert len(found.changing) >= ROUNDS - 1, "steps went on while the seat changed hands"
    assert len(found.usual) >= (ROUNDS - 1) * SHARED
    assert spread(found.changing)[2] < 2000.0, "milliseconds: no step waits for who comes or goes"


@pytest.mark.gpu(2)
@pytest.mark.parametrize("dispatcher", ["nvlink_ll", "nvlink_ht"])
def test_a_seat_costs_nothing_on_gpus(dispatcher: str) -> None:
    found = take_and_leave(parsed(["--dispatcher", dispatcher, "--rounds", str(ROUNDS)]))
    assert (found.wrong, found.late, found.compiled) == (0, (), 0)
    assert found.grown <= 0
