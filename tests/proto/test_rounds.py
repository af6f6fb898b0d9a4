"""Over which layers a caller's calls go round, as a client of lanes foresees it."""

from __future__ import annotations

from itertools import pairwise

import pytest

from moeserve.proto.passes.called_lane import (
    AGREEING_ROUNDS,
    FEWEST_CALLS,
    LONG_STEPS,
    MOST_AGREEING,
    REST_SECONDS,
    RESTLESS_CALLS,
    Rounds,
    divided,
)


def rounds(layers: list[int]) -> Rounds:
    made = Rounds()
    for layer in layers:
        made.called(layer)
    return made


def test_a_round_is_known_once_calls_have_gone_over_the_same_layers_twice() -> None:
    model = list(range(58))
    assert rounds(model + model[:-1]).of(57) == ()
    assert rounds(model + model).of(0) == tuple(model)
    assert rounds(model + model + model[:5]).of(5) == (*model[5:], *model[:5]), "it may begin anywhere"
    assert rounds(model + model).of(3) == (), "the calls before were of other layers"


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_a_short_round_takes_some_calls(length: int) -> None:
    model, made = list(range(length)), Rounds()
    calls = 0
    while made.of(calls % length) == ():
        made.called(calls % length)
        calls += 1
    assert calls == max(AGREEING_ROUNDS * length, FEWEST_CALLS)
    first = calls % length
    assert made.of(first) == tuple([*model, *model][first : first + length])


def test_calls_of_any_order_are_no_rounds() -> None:
    assert rounds([1, 2, 1, 3, 2, 1, 1, 2, 3, 3, 1, 2]).of(1) == ()
    assert Rounds().of(1) == ()


def test_after_rounds_that_did_not_hold_more_have_to_agree() -> None:
    made = rounds([1, 2, 3, 4] * 40)
    assert made.of(1) == (1, 2, 3, 4)
    agreeing = AGREEING_ROUNDS
    while agreeing < MOST_AGREEING:
        made.held(3, 4)
        agreeing *= 2
    made.held(1, 4)
    few = rounds([1, 2, 3, 4] * (MOST_AGREEING - 1))
    few._agreeing = made._agreeing
    assert few.of(1) == () and made.of(1) == (1, 2, 3, 4)
    made.held(5, 4)
    few._agreeing = made._agreeing
    assert few.of(1) == (1, 2, 3, 4), "one went round"


def test_a_round_of_a_layer_called_twice_is_found() -> None:
    assert rounds([1, 2, 1, 3] * 3).of(1) == (), "since its last call is no round, another layer begins it"
    assert rounds([1, 2, 1, 3] * 3 + [1]).of(2) == (2, 1, 3, 1)


def test_short_rounds_of_a_caller_who_does_not_rest_are_one_pass() -> None:
    made, now = Rounds(), 5.0
    for at in range(RESTLESS_CALLS):
        assert not made.longer(3)
        made.called(at % 3, now, now + 1e-3)
        now += 1e-3 + REST_SECONDS / 2
    made.called(RESTLESS_CALLS % 3, now, now)
    first = (RESTLESS_CALLS + 1) % 3
    assert made.longer(3) and not made.longer(LONG_STEPS)
    assert made.of(first) == tuple((first + at) % 3 for at in range(18))
    made.called(first, now + 2 * REST_SECONDS, now + 3 * REST_SECONDS)
    assert not made.longer(3) and len(made.of((first + 1) % 3)) == 3, "it has rested"


def test_long_rounds_stay_as_they_are() -> None:
    made = Rounds()
    for at in range(200):
        made.called(at % 58, at * 1e-3, at * 1e-3)
    assert made.of(200 % 58) == tuple((200 + at) % 58 for at in range(58))


@pytest.mark.parametrize("rows", [1, 1023, 1024, 1025, 2049, 3073, 4096, 8191, 8192])
def test_a_calls_rows_are_steps_of_about_as_many(rows: int) -> None:
    parts = divided(rows, 1024)
    counts = [stop - start for start, stop in parts]
    assert parts[0][0] == 0 and parts[-1][1] == rows
    assert all(one[1] == other[0] for one, other in pairwise(parts))
    assert len(parts) == -(-rows // 1024) and max(counts) == counts[0] <= 1024
    assert counts[0] - min(counts) < len(parts), "as few rows apart as may be"
