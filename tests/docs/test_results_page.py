"""The pages of results: what the records say, missed aims first, nothing left out, under 400 lines each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench import results_page
from bench.lib import table
from bench.lib.record import RESULTS, ROOT
from bench.lib.table import View


def result(**changes: Any) -> dict[str, Any]:
    """A line of a results file."""
    line = {"bench": "b", "case": "c", "ours": 2.0, "unit": "ms", "better": "lower", "aim": None, "peers": {}}
    return line | {"hardware": "h", "versions": {"torch": "t"}, "command": "x", "date": "d"} | changes


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({}, ("", None)),
        ({"aim": 2.0}, ("2", True)),
        ({"aim": 1.0}, ("1", False)),
        ({"aim": 1.0, "better": "higher"}, ("1", True)),
        ({"aim": 4.0, "better": "higher"}, ("4", False)),
        ({"aim": "<= 1.3 x peer", "peers": {"peer": 1.6}}, ("<= 1.3 x peer", True)),
        ({"aim": "<= 1.3 x peer", "peers": {"peer": 1.5}}, ("<= 1.3 x peer", False)),
        ({"aim": "hop at most 1 ms"}, ("hop at most 1 ms", False)),
        ({"aim": "<= 3, and tokens equal"}, ("<= 3, and tokens equal", None)),
    ],
)
def test_an_aim_is_judged(changes: dict[str, Any], shown: tuple[str, bool | None]) -> None:
    assert table.judged(result(**changes)) == shown


PHASES = View("b", "phases", r"(?P<line>\w+): (?P<column>\w+)", "{line}", "{column}")


def test_phases_are_columns_and_peers_stand_beside_them() -> None:
    records = [
        result(case="small: gate", ours=1.0),
        result(case="small: whole", ours=2.0, aim=1.5, peers={"peer": 4.0}),
        result(case="large: whole", ours=3.0, aim=5.0),
    ]
    assert table.table(PHASES, records).splitlines() == [
        "| [^b] | gate, ms | whole, ms | peer |",
        "| --- | --- | --- | --- |",
        "| small | 1 | **2** [1.5] | 4 (0.50x) |",
        "| large |  | 3 [5] |  |",
    ]
    assert table.missed(PHASES, records) == ["| small | whole 2 ms [1.5] 1.33x |"]


def test_peers_that_differ_by_column_stand_in_its_cells() -> None:
    records = [
        result(case="small: p50", peers={"peer": 4.0}),
        result(case="small: p99", peers={"peer": 1.0}),
        result(case="large: p99", peers={"peer": 8.0}),
    ]
    assert table.table(PHASES, records).splitlines() == [
        "| [^b] | p50, ms · peer | p99, ms · peer |",
        "| --- | --- | --- |",
        "| small | 2 · 4 (0.50x) | 2 · 1 (2.00x) |",
        "| large |  | 2 · 8 (0.25x) |",
    ]


def test_peers_can_be_lines_and_those_of_another_run_are_marked() -> None:
    view = View("b", "sizes", r"(?P<line>\w+), (?P<column>\w+)(?:, (?P<part>\w+))?", "{line}", "{column}")
    below = View(view.bench, view.title, view.pattern, view.line, view.column, second="kernel", below=True)
    records = [
        result(case="fp8, 8", peers={"peer": 4.0}),
        result(case="fp8, 8, kernel", ours=1.0),
        result(case="fp8, 16", peers={"peer, another run": 2.0}),
    ]
    assert table.table(below, records).splitlines() == [
        "| [^b] | 8, ms | 16, ms |",
        "| --- | --- | --- |",
        "| fp8 | 2 / 1 | 2 |",
        "| fp8: peer | 4 (0.50x) | 2 (1.00x) * |",
    ]


def test_two_cases_never_share_a_cell_in_silence() -> None:
    with pytest.raises(ValueError, match="2 cases share a cell: 'small: gate'"):
        table.table(PHASES, [result(case="small: gate"), result(case="small: gate")])


def test_a_case_that_no_view_shows_is_named_and_a_new_bench_is_shown() -> None:
    with pytest.raises(ValueError, match="gpu_layer: 'odd' stands in 0 tables"):
        results_page.page(results_page.PAGES[0], [result(bench="gpu_layer", case="odd")])
    assert "### new\n| [^new] | ours, ms |" in results_page.page(results_page.PAGES[0], [result(bench="new")])


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text('{"bench": "b"}\nnot json\n')
    with pytest.raises(ValueError, match=r"b\.jsonl:1 is not a result"):
        table.read(tmp_path)


@pytest.mark.parametrize("page", results_page.PAGES, ids=lambda page: page.path.name)
def test_a_page_is_what_the_records_say_and_is_short(page: results_page.Page) -> None:
    text = page.path.read_text()
    assert text == results_page.page(page, table.read(RESULTS)), "run python -m bench.results_page"
    assert len(text.splitlines()) < 400
    assert 0 < text.index("## Missed") < text.index("### ")


def test_every_bench_is_on_one_page() -> None:
    for bench in {record["bench"] for record in table.read(RESULTS)}:
        assert sum(page.holds(bench) for page in results_page.PAGES) == 1, bench


def test_no_recorded_number_is_left_out() -> None:
    records = table.read(RESULTS)
    for view in results_page.VIEWS:
        own = [record for record in records if view.place(record)]
        shown = table.table(view, own)
        for record in own:
            peers = [number for name, number in record["peers"].items() if name not in view.hidden]
            for number in (record["ours"], *peers):
                assert table.number(number, view.digits) in shown, (view.title, record["case"], number)


def test_records_name_programs_that_are_there() -> None:
    for record in table.read(RESULTS):
        words = record["command"].split()
        module = words[words.index("-m") + 1]
        assert (ROOT / module.replace(".", "/")).with_suffix(".py").exists(), record["command"]
