"""The law table: formats, layouts and dialects against the laws that hold for them.

    python -m bench.numbers.laws          # all three tables; exit status 1 when a cell failed
    python -m bench.numbers.laws layout   # one of format, layout, dialect

Nothing is computed here a second time: a column is a set of tests, a cell the outcome of those that were
parametrised with its entry. `ok 19` are nineteen tests that passed; `FAIL 2/19`; `skip` with a reason below;
`-` where a law does not concern an entry (rows of a per-tensor format do not travel alone); `none` where a
test should be and is none, which counts as a failure. Each run's counts go to `bench/results/laws.jsonl`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from bench.lib.record import ROOT, Result, write

sys.path.insert(0, str(ROOT / "tests" / "support"))

FORMAT_LAWS, LAYOUT_LAWS = "tests/laws/test_formats.py", "tests/laws/test_layouts.py"
DIALECTS, QUANTIZED = (
    "tests/checkpoints/test_dialects_errors.py",
    "tests/checkpoints/test_dialects_quantized.py",
)
DAMAGE, STACKED = "tests/checkpoints/test_checkpoint_errors.py", "tests/checkpoints/test_dialects_stacked.py"
REAL = "tests/laws/test_producers.py"


@dataclass(frozen=True)
class Law:
    """A column: its tests by file and function, an empty function standing for all of the file's."""

    name: str
    tests: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Table:
    """A kind of entry: their names, the laws, and which entry a test is about (None: no single one)."""

    kind: str
    entries: Callable[[], Iterable[str]]
    laws: tuple[Law, ...]
    entry_of: Callable[[Any], str | None]
    concerns: Callable[[str, str], bool] = lambda entry, law: True


@dataclass
class Cell:
    """Outcomes of the tests of one entry and law."""

    passed: int = 0
    failed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        if self.failed:
            return f"FAIL {len(self.failed)}/{len(self.failed) + self.passed}"
        if self.passed:
            return f"ok {self.passed}"
        return "skip" if self.skipped else "none"


def formats() -> list[str]:
    from moeserve.quant.formats import FORMATS, STATIC

    return [*FORMATS, *STATIC]


def rows_alone_concerns(entry: str, law: str) -> bool:
    """Whether a law says anything of a format: only rows without shared scales travel alone."""
    from moeserve.quant.formats import FORMATS, STATIC

    return law != "rows alone" or (FORMATS | STATIC)[entry].row_wise


def layouts() -> list[str]:
    from moeserve.quant.layouts import LAYOUTS

    return list(LAYOUTS)


def dialects() -> list[str]:
    from moeserve.checkpoints.dialects import DIALECTS

    return list(DIALECTS)


def of_parameter(name: str) -> Callable[[Any], str | None]:
    """Rows by the `name` of a parameter's value."""

    def found(item: Any) -> str | None:
        value = item.callspec.params.get(name)
        return None if value is None else str(value.name)

    return found


def of_dialect(item: Any) -> str | None:
    """The dialect a test is about: its producer's, or the one its id begins with, or its file's own."""
    from quantized import PRODUCERS

    producer = item.callspec.params.get("producer") or PRODUCERS.get(str(item.callspec.params.get("name")))
    if producer is not None:
        return str(producer.dialect)
    begun = [name for name in dialects() if item.callspec.id.replace("-", "_").startswith(name)]
    return max(begun, key=len) if begun else OF_FUNCTION.get(item.originalname)


OF_FUNCTION = {
    "test_damage_is_named": "plain",
    "test_damaged_fp8_is_named": "fp8_block",
    "test_damaged_mxfp4_blocks_are_named": "mxfp4_blocks",
}
"""Tests about one dialect alone, whose ids do not name it."""

TABLES = (
    Table(
        "format",
        formats,
        (
            Law("worked bytes", ((FORMAT_LAWS, "test_worked_bytes"),)),
            Law(
                "round trip",
                (
                    (FORMAT_LAWS, "test_rounding_costs_what_its_codes_cost"),
                    (FORMAT_LAWS, "test_shapes_dtypes_and_bytes_are_those_declared"),
                ),
            ),
            Law("idempotence", ((FORMAT_LAWS, "test_what_is_rounded_stays_as_it_is"),)),
            Law("rows alone", ((FORMAT_LAWS, "test_rows_travel_alone"),)),
            Law(
                "empty and zero",
                (
                    (FORMAT_LAWS, "test_nothing_stays_nothing"),
                    (FORMAT_LAWS, "test_zeros_are_zeros"),
                ),
            ),
        ),
        of_parameter("form"),
        rows_alone_concerns,
    ),
    Table(
        "layout",
        layouts,
        (
            Law(
                "inverse",
                (
                    (LAYOUT_LAWS, "test_inverse"),
                    (LAYOUT_LAWS, "test_matrices_of_a_stack_are_alone"),
                ),
            ),
            Law("peak memory", ((LAYOUT_LAWS, "test_peak_memory"),)),
        ),
        of_parameter("layout"),
    ),
    Table(
        "dialect",
        dialects,
        (
            Law("real producer", ((REAL, "test_real_producer"),)),
            Law(
                "error catalogue",
                (
                    (DIALECTS, "test_a_config_that_is_not_supported_is_named"),
                    (DIALECTS, "test_values_that_contradict_are_named"),
                    (QUANTIZED, "test_every_tensor_of_a_projection_is_needed"),
                    (QUANTIZED, "test_every_tensor_is_checked_for_its_dtype_and_shape"),
                    (DAMAGE, "test_damage_is_named"),
                    (DAMAGE, "test_damaged_fp8_is_named"),
                    (STACKED, "test_damaged_mxfp4_blocks_are_named"),
                ),
            ),
        ),
        of_dialect,
    ),
)

ADDOPTS = "--import-mode=importlib --strict-markers"
"""The project's own, but for its summary of skips: each is under its table."""

Cells = dict[str, dict[str, dict[str, Cell]]]
"""Table -> entry -> law -> cell."""


class Collector:
    """A pytest plug-in that keeps the tests of the laws, and puts each outcome into its cell."""

    def __init__(self, tables: Iterable[Table]) -> None:
        self._tables = tuple(tables)
        self.cells: Cells = {
            t.kind: {entry: {law.name: Cell() for law in t.laws} for entry in t.entries()}
            for t in self._tables
        }
        self._of: dict[str, Cell] = {}

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        """Keeps those tests that fill a cell."""
        kept = [item for item in items if self._place(item)]
        dropped = [item for item in items if item.nodeid not in self._of]
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept

    def _place(self, item: Any) -> bool:
        for table, law in self._laws(item):
            parametrised = item.get_closest_marker("parametrize") is not None
            entry = table.entry_of(item) if parametrised else OF_FUNCTION.get(item.originalname)
            if entry in self.cells[table.kind]:
                self._of[item.nodeid] = self.cells[table.kind][entry][law.name]
                return True
        return False

    def _laws(self, item: Any) -> Iterator[tuple[Table, Law]]:
        file = str(item.path.relative_to(ROOT))
        for table in self._tables:
            for law in table.laws:
                if any(file == path and function in ("", item.originalname) for path, function in law.tests):
                    yield table, law

    def pytest_runtest_logreport(self, report: Any) -> None:
        """One outcome a test; what fails while it is set up or torn down has failed."""
        cell = self._of[report.nodeid]
        if report.failed:
            cell.failed.append(report.nodeid)
        elif report.skipped:
            cell.skipped.append(f"{report.nodeid}: {report.longrepr[-1]}")
        elif report.when == "call":
            cell.passed += 1


def run(tables: Iterable[Table]) -> tuple[Cells, int]:
    """Runs every test of the tables' laws once. Returns the cells and pytest's own exit status."""
    tables = tuple(tables)
    collector = Collector(tables)
    found = {path for table in tables for law in table.laws for path, _ in law.tests}
    files = sorted(str(ROOT / path) for path in found if (ROOT / path).exists())
    options = ["-q", "--no-header", "--tb=short", "--rootdir", str(ROOT), "-o", f"addopts={ADDOPTS}"]
    status = pytest.main([*options, *files], plugins=[collector])
    return collector.cells, int(status)


def rendered(table: Table, cells: Mapping[str, Mapping[str, Cell]]) -> tuple[str, int]:
    """One table as text, and how many of its cells are not held."""
    head = [table.kind, *(law.name for law in table.laws)]
    lines, bad = [], 0
    for entry, own in cells.items():
        shown = [str(own[law.name]) if table.concerns(entry, law.name) else "-" for law in table.laws]
        bad += sum(text == "none" or text.startswith("FAIL") for text in shown)
        lines.append([entry, *shown])
    widths = [max(len(line[i]) for line in [head, *lines]) for i in range(len(head))]
    rows = [
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True))
        for line in [head, ["-" * width for width in widths], *lines]
    ]
    return "\n".join(row.rstrip() for row in rows), bad


def notes(cells: Mapping[str, Mapping[str, Cell]]) -> list[str]:
    """What failed, and why the skipped were."""
    every = [cell for own in cells.values() for cell in own.values()]
    failed = [f"FAIL {name}" for cell in every for name in cell.failed]
    return failed + [f"skip {reason}" for cell in every if not cell.passed for reason in cell.skipped]


def main() -> int:
    """Runs the laws, prints the tables, records how many cells hold. 1 when one does not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("kinds", nargs="*", help="format, layout, dialect; all unless given")
    parser.add_argument("--no-record", action="store_true", help="leave bench/results/laws.jsonl as it is")
    arguments = parser.parse_args()
    if unknown := set(arguments.kinds) - {table.kind for table in TABLES}:
        parser.error(f"no table of {', '.join(sorted(unknown))}; there are format, layout and dialect")
    chosen = [table for table in TABLES if table.kind in (arguments.kinds or [t.kind for t in TABLES])]
    cells, status = run(chosen)
    results, bad = [], 0
    for table in chosen:
        text, own = rendered(table, cells[table.kind])
        print(f"\n{text}")
        print("\n".join(notes(cells[table.kind])))
        every = [c for r, laws in cells[table.kind].items() for n, c in laws.items() if table.concerns(r, n)]
        held = sum(str(cell).startswith("ok") for cell in every)
        print(f"{held} of {len(every)} cells held by {sum(cell.passed for cell in every)} tests")
        results.append(
            Result("laws", f"cells of the table of {table.kind}s", held, "cells", "higher", float(len(every)))
        )
        bad += own
    if not arguments.no_record:
        write(results)
    return 1 if bad or status else 0


if __name__ == "__main__":
    sys.exit(main())
