"""Costs: a fit that noise does not bend down, ranges by what is cheapest, and a file that is read again."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moeserve.dispatch.costs.costs import Costs, CostSetting, DispatcherCost, Fit, Point, cheapest, table
from moeserve.dispatch.costs.files import costs_folder, costs_path, store_costs, stored_costs
from moeserve.dispatch.costs.measure import sizes

SETTING = CostSetting(
    hosts=("here",),
    device="NVIDIA H200",
    lanes=4,
    owners=4,
    max_lanes=4,
    max_owners=4,
    hidden=7168,
    top_k=8,
    experts=256,
    lane_rows=4096,
    dtype="bf16",
    sliced=False,
    graph_rows=0,
    held=0,
    versions=(("torch", "2.11"),),
)
MEASURED = (1, 16, 256, 4096)


def cost(name: str, fixed: float, per_row: float) -> DispatcherCost:
    """A dispatcher that takes so many microseconds, and so many more a row; a third of it in combine."""
    times = [(rows, (fixed + per_row * rows) * 1e-6) for rows in MEASURED]
    return DispatcherCost(name, "bf16", tuple(Point(rows, time * 2 / 3, time / 3) for rows, time in times))


def at(fit: Fit, *rows: int) -> list[float]:
    return [float(value) for value in fit.seconds(np.array(rows))]


def test_a_fit_goes_through_what_was_measured_and_straight_between() -> None:
    fit = Fit.through([(1, 10.0), (101, 20.0), (1101, 120.0)])
    assert at(fit, 1, 51, 101, 601, 1101) == pytest.approx([10, 15, 20, 70, 120])
    assert [piece.per_row for piece in fit.pieces] == pytest.approx([0.1, 0.1, 0.1])


def test_past_the_last_size_it_rises_at_least_as_steeply_as_before() -> None:
    assert at(Fit.through([(1, 1.0), (11, 1.0), (21, 41.0)]), 31) == pytest.approx([81.0])
    assert at(Fit.through([(1, 1.0), (11, 41.0), (21, 41.0)]), 31) == pytest.approx([61.0])
    assert at(Fit.through([(4, 7.0)]), 0, 4, 4000) == [7.0] * 3


def test_more_rows_never_cost_less() -> None:
    fit = Fit.through([(1, 14.0), (4, 10.0), (16, 12.0), (64, 30.0), (256, 28.0)])
    values = at(fit, *range(1, 300))
    assert values == sorted(values)
    assert values[:4] == pytest.approx([12.0] * 4) and values[255] == pytest.approx(29.0)


def test_a_fit_needs_a_size() -> None:
    with pytest.raises(ValueError, match="one measured size at least"):
        Fit.through([])


def test_ranges_change_where_the_lines_cross() -> None:
    low, high, gather = cost("ll", 10, 0.2), cost("ht", 60, 0.1), cost("agrs", 40, 0.9)
    assert cheapest([(low, 256), (high, 4096), (gather, 4096)], 4096) == ((256, low), (4096, high))
    ranges = cheapest([(low, 4096), (high, 4096)], 4096)
    assert [entry for _, entry in ranges] == [low, high]
    assert ranges[0][0] == pytest.approx(500, abs=1) and ranges[1][0] == 4096


def test_a_third_dispatcher_has_the_middle_where_it_wins() -> None:
    low, middle, high = cost("ll", 5, 1.0), cost("agrs", 30, 0.25), cost("ht", 200, 0.05)
    ranges = cheapest([(high, 4096), (middle, 4096), (low, 4096)], 4096)
    assert [entry.dispatcher for _, entry in ranges] == ["ll", "agrs", "ht"]
    assert [end for end, _ in ranges] == pytest.approx([33, 850, 4096], abs=2)


def test_what_saves_next_to_nothing_gets_no_range() -> None:
    one, other = cost("one", 10, 0.1), cost("other", 10.3, 0.099)
    assert cheapest([(one, 4096), (other, 4096)], 4096) == ((4096, one),)
    assert len(cheapest([(one, 4096), (other, 4096)], 4096, margin=0.0)) == 2


def test_a_dispatcher_serves_no_more_than_it_may_be_given() -> None:
    low, high = cost("ll", 1, 0.001), cost("ht", 100, 1.0)
    assert cheapest([(low, 64), (high, 512)], 512) == ((64, low), (512, high))
    with pytest.raises(ValueError, match="no dispatcher with costs serves steps of 512 rows"):
        cheapest([(low, 64)], 512)


def test_dispatchers_are_compared_by_the_sizes_that_all_have() -> None:
    slow, fast = cost("slow", 60, 2.0), cost("fast", 5, 1.0)
    hasty = replace(slow, points=slow.points[:1])  # a single size, past which it would look free
    assert cheapest([(hasty, 4096), (fast, 4096)], 4096) == ((4096, fast),)
    low, high = cost("low", 10, 0.2), cost("high", 60, 0.1)
    ranges = cheapest([(low.up_to(256), 4096), (high.up_to(16), 4096)], 4096)
    assert ranges[0][0] == pytest.approx(500, abs=1) and [c.dispatcher for _, c in ranges] == ["low", "high"]


def test_the_table_marks_the_fastest_and_leaves_gaps() -> None:
    low, high = cost("ll", 9, 3), cost("ht", 90, 1.5)
    short = replace(low, points=low.points[:2])
    costs = Costs(SETTING, (short, high), (("deepep_ll", "fp8_group128", "rank 0: no"),))
    lines = table(costs)
    assert lines[0].split() == ["rows", "a", "lane", "ll", "(bf16)", "ht", "(bf16)"]
    assert "8.0 + 4.0 = 12.0*" in lines[1] and "61.0 + 30.5 = 91.5 " in lines[1]
    assert lines[4].split() == ["4096", "-", *["4156.0", "+", "2078.0", "=", "6234.0*"]]
    assert lines[5] == "not measured: deepep_ll (fp8_group128): rank 0: no"


def test_costs_are_read_again_for_exactly_their_setting(tmp_path: Path) -> None:
    costs = Costs(SETTING, (cost("ll", 10, 0.2), cost("ht", 60, 0.1)))
    path = store_costs(replace(costs, refused=(("x", "bf16", "gone"),)), tmp_path)
    assert stored_costs(SETTING, tmp_path) == costs  # what could not be measured is tried again
    for other in (
        replace(SETTING, lanes=2),
        replace(SETTING, owners=2),
        replace(SETTING, max_lanes=8),
        replace(SETTING, max_owners=8),
        replace(SETTING, held=16),
        replace(SETTING, hosts=("here", "there")),
        replace(SETTING, versions=(("torch", "2.12"),)),
    ):
        assert stored_costs(other, tmp_path) is None
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("damage", ["{", "{}", '{"setting": {}, "dispatchers": []}', "points"])
def test_a_damaged_file_is_as_none(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    path = store_costs(Costs(SETTING, (cost("ll", 10, 0.2),)), tmp_path)
    if damage == "points":
        document = json.loads(path.read_text())
        document["dispatchers"][0]["points"] = []
        damage = json.dumps(document)
    path.write_text(damage)
    with caplog.at_level(logging.WARNING):
        assert stored_costs(SETTING, tmp_path) is None
    assert str(path) in caplog.text and "measured anew" in caplog.text


def test_where_costs_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOESERVE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert costs_folder() == tmp_path / "moeserve" / "costs"
    monkeypatch.setenv("MOESERVE_CACHE", str(tmp_path / "own"))
    assert costs_folder() == tmp_path / "own" / "costs"
    assert costs_folder("elsewhere") == Path("elsewhere")
    assert costs_path(SETTING, tmp_path).name.startswith("nvidia-h200-4-lanes-4-owners-")


@pytest.mark.parametrize(
    ("most", "found"), [(1, [1]), (3, [1, 3]), (16, [1, 16]), (100, [1, 16, 100]), (4096, [1, 16, 256, 4096])]
)
def test_sizes_end_at_the_most_rows(most: int, found: list[int]) -> None:
    assert sizes(most) == found
