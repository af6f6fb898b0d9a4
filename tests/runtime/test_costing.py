"""Choosing by cost: ranks measure together, choose alike, and do not measure what they know."""

from __future__ import annotations

from dataclasses import replace

import pytest
from costing_ranks import FITTING, LANE_ROWS, Choice, choices
from parallel import parallel_launch


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[dict[str, Choice], dict[str, str]]]:
    """Choices and errors, by name, of each rank."""
    return parallel_launch(2, choices, str(tmp_path_factory.mktemp("costs")))


@pytest.fixture(scope="module")
def found(by_rank: list[tuple[dict[str, Choice], dict[str, str]]]) -> list[dict[str, Choice]]:
    """Choices by rank and name."""
    return [choices_of_rank for choices_of_rank, _ in by_rank]


@pytest.fixture(scope="module")
def said(by_rank: list[tuple[dict[str, Choice], dict[str, str]]]) -> list[dict[str, str]]:
    """Errors by rank and name."""
    return [errors for _, errors in by_rank]


def test_ranks_choose_alike(found: list[dict[str, Choice]]) -> None:
    for name, choice in found[0].items():
        assert found[1][name].dispatchers == choice.dispatchers, name
        assert found[1][name].points == choice.points, name
        assert choice.dispatchers[-1][1] == LANE_ROWS, name


def test_every_dispatcher_that_fits_is_measured_up_to_the_most_rows(found: list[dict[str, Choice]]) -> None:
    first = found[0]["first"]
    assert {"allgather_reducescatter", "all2allv"} <= FITTING
    assert sorted(first.measured) == sorted(FITTING)
    assert {name for name, _ in first.points} == FITTING
    assert {rows for _, rows in first.points} >= {1} and max(rows for _, rows in first.points) <= LANE_ROWS
    assert {name for name, _ in first.dispatchers} <= FITTING
    losers = FITTING - {name for name, _ in first.dispatchers}
    assert all(first.refused[name].endswith(" costs less") for name in losers)


@pytest.mark.parametrize("name", ["again", "stored"])
def test_what_is_known_is_not_measured_again(name: str, found: list[dict[str, Choice]]) -> None:
    for choices_of_rank in found:
        assert choices_of_rank[name].measured == ()
        assert replace(choices_of_rank["first"], measured=()) == choices_of_rank[name]


def test_costs_are_measured_anew_when_asked(found: list[dict[str, Choice]]) -> None:
    assert set(found[0]["anew"].measured) == FITTING


@pytest.mark.parametrize("name", ["pinned", "never", "auto"])
def test_nothing_is_measured_for_a_pinned_dispatcher_nor_by_default_on_the_cpu(
    name: str, found: list[dict[str, Choice]]
) -> None:
    only = "all2allv" if name == "pinned" else "allgather_reducescatter"
    for choices_of_rank in found:
        choice = choices_of_rank[name]
        assert (choice.measured, choice.points, choice.dispatchers) == ((), (), ((only, LANE_ROWS),))


def test_a_dispatcher_that_some_rank_cannot_build_is_left_out_by_all(found: list[dict[str, Choice]]) -> None:
    for choices_of_rank in found:
        choice = choices_of_rank["picky"]
        assert choice.measured == ("picky",)  # of the others the costs were kept
        assert choice.refused["picky"] == "rank 1: needs 7 bytes more than rank 1 has"
        assert {name for name, _ in choice.dispatchers} <= FITTING


def test_a_dispatcher_that_one_rank_alone_has_is_left_out(found: list[dict[str, Choice]]) -> None:
    assert found[0]["lonely"].measured == () == found[1]["lonely"].measured
    assert "lonely" not in dict(found[0]["lonely"].dispatchers)


def test_ranks_that_would_carry_differently_are_told_so_on_each(said: list[dict[str, str]]) -> None:
    text = said[0]["differing"]
    assert said[1]["differing"] == text
    assert "rank 0 allgather_reducescatter up to 20 rows" in text and "rank 1 all2allv up to 20" in text


def test_a_dispatcher_that_fails_while_it_is_measured_is_named(said: list[dict[str, str]]) -> None:
    for errors in said:
        assert "measuring dispatcher broken failed: rank 0: a byte is wrong; rank 1: " in errors["broken"]
        assert "; name a dispatcher" in errors["broken"]


def test_a_failure_on_one_rank_is_heard_on_all(said: list[dict[str, str]]) -> None:
    assert said[0]["halves"] == said[1]["halves"]
    assert "measuring dispatcher halves failed: rank 1: out of memory on arrival; name" in said[0]["halves"]


def test_sizes_that_one_rank_has_no_memory_for_are_left_out_on_all(found: list[dict[str, Choice]]) -> None:
    for choices_of_rank in found:
        points = choices_of_rank["roomless"].points
        assert {name for name, _ in points} == FITTING and {rows for _, rows in points} == {1, 16}


def test_where_one_rank_has_no_memory_at_all_every_rank_says_so(said: list[dict[str, str]]) -> None:
    assert said[0]["roomless"] == said[1]["roomless"]
    assert "all2allv: rank 1: out of memory: tried to allocate 7 bytes" in said[0]["roomless"]
