"""Timeouts of clients that are no time to wait: each is refused by its name, before anything is sent."""

from __future__ import annotations

import math

import pytest

from moeserve.proto.client import Patience
from moeserve.proto.passes.attached import AttachedLane, Wanted
from moeserve.proto.passes.lane_client import LaneClient
from moeserve.proto.timeouts import LONGEST_SECONDS, checked

NOBODY = "127.0.0.1:1"
WRONG = [math.nan, -1.0, -math.inf]


@pytest.mark.parametrize("seconds", WRONG)
def test_no_wait_is_negative_or_nan(seconds: float) -> None:
    with pytest.raises(ValueError, match=rf"^timeout={seconds} must be 0 seconds or more$"):
        checked("timeout", seconds)


@pytest.mark.parametrize("seconds", ["5", None, True])
def test_a_wait_is_a_number(seconds: object) -> None:
    with pytest.raises(TypeError, match=rf"^timeout={seconds!r} must be a number of seconds$"):
        checked("timeout", seconds)


def test_a_wait_without_end_is_a_long_one() -> None:
    assert checked("timeout", 0) == 0.0
    assert checked("timeout", math.inf) == LONGEST_SECONDS


@pytest.mark.parametrize("seconds", [*WRONG, 0.0])
def test_what_a_lane_is_wanted_with(seconds: float) -> None:
    with pytest.raises(ValueError, match=f"^timeout={seconds} must be more than 0 seconds$"):
        Wanted("decoder", timeout=seconds)
    with pytest.raises(ValueError, match=f"^timeout={seconds} must be more than 0 seconds$"):
        LaneClient(NOBODY, timeout=seconds)


@pytest.mark.parametrize("seconds", WRONG)
def test_attaching(seconds: float) -> None:
    with pytest.raises(ValueError, match=f"^timeout={seconds} must be 0 seconds or more$"):
        AttachedLane.attach(NOBODY, Wanted("decoder"), seconds)


@pytest.mark.parametrize("lanes", [math.nan, 1.5, True])
def test_lanes_are_a_whole_number(lanes: float) -> None:
    with pytest.raises(TypeError, match=f"^lanes={lanes} must be a whole number$"):
        LaneClient(NOBODY, lanes=lanes)  # type: ignore[arg-type]


@pytest.mark.parametrize("seconds", [*WRONG, 0.0])
@pytest.mark.parametrize("operation", ["rebalance", "reload", "scale"])
def test_operations(client_of, operation: str, seconds: float) -> None:  # type: ignore[no-untyped-def]
    given = {"rebalance": (), "reload": ("/new",), "scale": (2,)}[operation]
    with (
        client_of(NOBODY) as client,
        pytest.raises(ValueError, match=f"^timeout={seconds} must be more than 0 seconds$"),
    ):
        getattr(client, operation)(*given, timeout=seconds)


@pytest.mark.parametrize("name", ["first_wait", "longest_wait", "spin"])
def test_other_times_of_a_patience(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=nan"):
        Patience(**{name: math.nan})
