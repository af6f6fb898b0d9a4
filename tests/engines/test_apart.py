"""How two runs of engines are compared: what must pass, and what must not."""

from __future__ import annotations

from typing import Any

from engine_models import FLOAT32, Apart, Bound, apart, bound_by_experts, bound_by_float32

NOISE = Apart(0.2, 0.05, (), 20, 300)
BF16 = bound_by_experts(NOISE)


def run(*chosen: int, off: float = 0.0) -> list[dict[str, Any]]:
    """One request that generated `chosen`; all log-probabilities but the first are `off` by so much."""
    position = {str(token): -1.0 - token / 20 - (off if token else 0.0) for token in range(20)}
    return [{"tokens": list(chosen), "logprobs": [dict(position) for _ in chosen]}]


def test_bounds_of_bf16_follow_from_its_noise() -> None:
    assert Bound(0.4, 0.1) == BF16
    assert bound_by_float32(NOISE) == Bound(0.4, 2**0.5 * 0.05)


def test_equal_runs_are_within_every_bound() -> None:
    told = apart(run(0, 0, 3), run(0, 0, 3))
    assert (told.most, told.mean, told.ties, told.positions) == (0.0, 0.0, (), 3)
    assert told.within(FLOAT32) and told.within(Bound(0.0, 0.0))


def test_the_largest_and_the_mean_are_bounded_both() -> None:
    told = apart(run(0, 0, off=0.2), run(0, 0))
    assert abs(told.most - 0.2) < 1e-9 and abs(told.mean - 0.2) < 1e-9
    assert not told.within(FLOAT32)
    assert not told.within(BF16), "its mean is too large"
    assert told.within(Bound(0.4, 0.3)) and not told.within(Bound(0.1, 0.3))


def test_tokens_may_differ_only_between_two_that_are_as_probable() -> None:
    told = apart(run(0, 1, 0), run(0, 2, 0))
    assert told.positions == 2, "what follows another token is another text"
    ((request, position, margin),) = told.ties
    assert (request, position) == (0, 1) and abs(margin + 0.05) < 1e-9
    assert told.within(FLOAT32)  # the other one is the more probable here
    assert not apart(run(9), run(0)).within(FLOAT32)
    assert apart(run(9), run(0)).within(BF16)
    assert not apart(run(19), run(0)).within(BF16)


def test_other_tokens_among_the_most_probable_are_seen() -> None:
    one = run(0)
    one[0]["logprobs"][0] = {str(token + 10): -1.0 for token in range(20)}
    told = apart(one, run(0))
    assert told.shared == 10 and not told.within(Bound(100.0, 100.0))
