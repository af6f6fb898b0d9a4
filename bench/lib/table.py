"""Tables of results: a `View` says which cases of a bench stand on one line, and what its columns are.

Nothing is computed here but ratios; every number comes from a file that a bench wrote, with its command.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Record = Mapping[str, Any]
"""One line of a results file, as `bench/lib/record.py` writes it."""

MORE = ("higher", "more")
"""Values of `better` under which a larger number is the better one."""

APART = ", another run"
"""How the name of a peer ends that was not measured in the run of ours."""

OURS = "ours"
"""The column of a view that has only one."""

_WORDS = re.compile(r"(?:\w+ )?(?:<=|at most) ([\d.e+-]+)(?: ?x ([^,]+)| [^\W\d]+)?")


@dataclass(frozen=True)
class View:
    """How the cases of a bench become a table; `line`, `column`, `each` are made of the pattern's groups."""

    bench: str
    title: str
    pattern: str = "(?P<case>.*)"
    line: str = "{case}"
    column: str = OURS
    corner: str = ""  # says how to read the cells
    second: str = (
        ""  # stands after a slash in the cell: the case whose group `part`, or the peer, is named so
    )
    each: str = ""  # what cases on one line that share a cell are told apart by
    absent: str = ""  # what a group is called that the case lacks
    unit: str = ""  # instead of the records' own
    hidden: tuple[str, ...] = ()  # peers that are not shown
    facts: tuple[str, ...] = ()  # peers that are no rivals: shown without a ratio
    below: bool = False  # peers are lines of their own below ours, not columns
    in_order: bool = True  # as recorded; else by the numbers in their names
    digits: int = 3

    def place(self, record: Record) -> tuple[str, str, str] | None:
        """Line, column and part of a record's cell; None where it belongs to another view."""
        found = re.fullmatch(self.pattern, record["case"]) if record["bench"] == self.bench else None
        if found is None:
            return None
        groups = found.groupdict(self.absent)
        return self.line.format(**groups), self.column.format(**groups), groups.get("part", "")


@dataclass
class Cell:
    """The records of one line and column: usually one, and perhaps a second that stands after a slash."""

    records: list[Record] = field(default_factory=list)
    second: Record | None = None
    each: list[str] = field(default_factory=list)


Lines = dict[str, dict[str, Cell]]
"""Line -> column -> cell."""


def read(folder: Path) -> list[Record]:
    """Reads all results of a folder. Raises ValueError naming the file and line that is not a result."""
    found: list[Record] = []
    for path in sorted(folder.glob("*.jsonl")):
        for number_of_line, line in enumerate(path.read_text().splitlines(), 1):
            try:
                record = json.loads(line)
                judged(record)
                found.append(record | {"bench": str(record["bench"]), "case": str(record["case"])})
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path.name}:{number_of_line} is not a result: {error}") from error
    return found


def lines_of(view: View, records: Iterable[Record]) -> Lines:
    """The records of a view by line and column."""
    lines: Lines = {}
    for record in records:
        if (placed := view.place(record)) is None:
            continue
        line, column, part = placed
        cell = lines.setdefault(line, {}).setdefault(column, Cell())
        if part and part == view.second:
            cell.second = record
        else:
            cell.records.append(record)
            if view.each and (found := re.fullmatch(view.pattern, record["case"])):
                cell.each.append(view.each.format(**found.groupdict()))
    if not view.in_order:
        lines = {line: lines[line] for line in sorted(lines, key=_by_numbers)}
    return lines


def table(view: View, records: Iterable[Record]) -> str:
    """The records of a view as a Markdown table; empty where there are none."""
    lines = lines_of(view, records)
    if not lines:
        return ""
    columns = unique(column for cells in lines.values() for column in cells)
    if not view.in_order:
        columns.sort(key=_by_numbers)
    inside = {} if view.below else _peers_inside(view, lines)
    apart = unique(p for cells in lines.values() for p in _peers(view, cells, inside))
    head = [
        f"{view.corner} [^{view.bench}]".strip(),
        *(_head(view, lines, column, inside.get(column, ())) for column in columns),
    ]
    head += [] if view.below else apart
    head += ["cases"] if view.each else []
    rows = []
    for line, cells in lines.items():
        label = line + _line_unit(view, lines, cells, columns)
        row = [label, *(_shown(view, lines, cells, column, inside.get(column, ())) for column in columns)]
        if not view.below:
            row += [_beside(view, cells, peer, None) for peer in apart]
        if view.each:
            row.append("; ".join(text for cell in cells.values() for text in cell.each))
        rows.append(row)
        if view.below:
            for peer in unique(peer.removesuffix(APART) for peer in _peers(view, cells, {})):
                rows.append([f"{line}: {peer}", *(_either(view, cells, peer, column) for column in columns)])
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def _peers(view: View, cells: Mapping[str, Cell], inside: Mapping[str, Sequence[str]]) -> list[str]:
    """Peers of a line that stand beside all its columns, not inside the cell of one."""
    return [
        peer
        for peer in unique(p for cell in cells.values() for r in cell.records for p in r["peers"])
        if peer not in view.hidden
        and peer not in cells
        and not any(peer == f"{column} {view.second}" for column in cells)
        and not any(peer in own for own in inside.values())
    ]


def _peers_inside(view: View, lines: Lines) -> dict[str, list[str]]:
    """Peers inside the cells of each column: those whose number differs between columns of some line."""
    found: dict[str, list[str]] = {}
    for peer in unique(peer for cells in lines.values() for peer in _peers(view, cells, {})):
        beside = [
            {
                column: r["peers"][peer]
                for column, cell in cells.items()
                for r in cell.records
                if peer in r["peers"]
            }
            for cells in lines.values()
        ]
        if any(len(set(numbers.values())) > 1 for numbers in beside):
            for column in unique(column for numbers in beside for column in numbers):
                found.setdefault(column, []).append(peer)
    return found


def _units(view: View, lines: Lines, column: str) -> list[str]:
    return unique(
        view.unit or r["unit"] for cells in lines.values() if column in cells for r in cells[column].records
    )


def _head(view: View, lines: Lines, column: str, inside: Sequence[str]) -> str:
    """A column's name, its unit where all its cells share one, and the peers inside its cells."""
    units = _units(view, lines, column)
    unit = f", {units[0]}" if len(units) == 1 and units[0] else ""
    return " · ".join([f"{column}{unit}", *inside])


def _line_unit(view: View, lines: Lines, cells: Mapping[str, Cell], columns: Sequence[str]) -> str:
    """The unit that all cells of a line share, where the columns have none."""
    units = unique(r["unit"] for cell in cells.values() for r in cell.records)
    mixed = any(len(_units(view, lines, column)) > 1 for column in columns)
    return f", {units[0]}" if mixed and len(units) == 1 and units[0] else ""


def _shown(view: View, lines: Lines, cells: Mapping[str, Cell], column: str, inside: Sequence[str]) -> str:
    """A cell: our number, the second one, the aim in brackets (bold where missed), and the peers inside."""
    if column not in cells:
        return ""
    cell = cells[column]
    if len(cell.records) > 1 and not view.each:
        raise ValueError(f"{view.bench}: {len(cell.records)} cases share a cell: {cell.records[0]['case']!r}")
    record = cell.records[0]
    text = number(record["ours"], view.digits)
    if len(unique(str(r["ours"]) for r in cell.records)) > 1:
        values = [r["ours"] for r in cell.records]
        text = f"{number(min(values), view.digits)} to {number(max(values), view.digits)}"
    if cell.second is not None:
        text += f" / {number(cell.second['ours'], view.digits)}"
    elif (alone := record["peers"].get(f"{column} {view.second}")) is not None:
        text += f" / {number(alone, view.digits)}"
    units = unique(r["unit"] for other in cells.values() for r in other.records)
    if len(_units(view, lines, column)) > 1 and len(units) > 1:
        text += f" {record['unit']}"
    aims = unique(judged(r) for r in cell.records)
    if any(verdict is False for _, verdict in aims):
        text = f"**{text}**"
    text += f" [{aims[0][0]}]" if len(aims) == 1 and aims[0][0] else ""
    own = [_beside(view, {column: cell}, peer, column) for peer in inside]
    return " · ".join([text, *own])


def _beside(view: View, cells: Mapping[str, Cell], peer: str, column: str | None) -> str:
    """A peer's number with the ratio of the best of ours, in one column or on the whole line, to it."""
    records = [
        record
        for name, cell in cells.items()
        if column is None or name == column
        for record in cell.records
        if peer in record["peers"]
    ]
    if not records:
        return ""
    value = records[0]["peers"][peer]
    best = max if records[0]["better"] in MORE else min
    ours = best(record["ours"] for record in records)
    shown = number(value, view.digits)
    return f"{shown} ({ours / value:.2f}x)" if value and peer not in view.facts else shown


def _either(view: View, cells: Mapping[str, Cell], peer: str, column: str) -> str:
    """A peer's number from the same run as ours, else the one from another run, marked."""
    apart = _beside(view, cells, peer + APART, column)
    return _beside(view, cells, peer, column) or (f"{apart} *" if apart else "")


def missed(view: View, records: Iterable[Record]) -> list[str]:
    """A line for each line of the view's table in which an aim is missed, with the numbers that miss it."""
    found = []
    for line, cells in lines_of(view, records).items():
        texts = []
        for column, cell in cells.items():
            for record in cell.records:
                aim, held = judged(record)
                if held is False:
                    where = "" if column == OURS else f"{column} "
                    ours = number(record["ours"], view.digits)
                    texts.append(f"{where}{ours} {record['unit']} [{aim}]{_off(record)}")
        if texts:
            found.append(f"| {line} | {'; '.join(texts)} |")
    return found


def _off(record: Record) -> str:
    """How many times the aim our number is."""
    aim = record["aim"] if not isinstance(record["aim"], str) else limit(record)
    return f" {record['ours'] / aim:.3g}x" if aim else ""


def judged(record: Record) -> tuple[str, bool | None]:
    """The aim as text, and whether the number holds it; None where there is no aim or only words.

    An aim is a bound in the result's own unit, or in words; words are judged where they say `<= 1.3 x <peer>`
    or `at most 1 ms` and nothing more, else only shown.
    """
    aim, ours = record["aim"], record["ours"]
    if aim is None:
        return "", None
    text, bound = (aim, limit(record)) if isinstance(aim, str) else (number(aim, 4), float(aim))
    if bound is None:
        return text, None
    return text, ours >= bound if record["better"] in MORE else ours <= bound


def limit(record: Record) -> float | None:
    """The bound that an aim's words set, in the result's unit."""
    if not (found := _WORDS.fullmatch(record["aim"])):
        return None
    factor, peer = float(found[1]), found[2]
    if not peer:
        return factor
    named = [value for name, value in record["peers"].items() if peer in name]
    return factor * named[0] if named else None


def number(value: float, digits: int = 3) -> str:
    """So many significant digits; in scientific notation below 0.01."""
    if value and abs(value) < 0.01:
        return f"{value:.1e}"
    return f"{value:.{digits}g}" if abs(value) < 1000 else f"{value:.0f}"


def ran(records: Iterable[Record]) -> str:
    """How records came about: commands by hardware, version of torch and date."""
    runs: dict[str, list[str]] = {}
    for r in records:
        where = f"{r['hardware']}, torch {r['versions'].get('torch', '?')}, {r['date']}"
        runs.setdefault(where, []).append(f"`{r['command']}`")
    return "; ".join(f"{', '.join(unique(commands))} on {where}" for where, commands in runs.items())


def unique(words: Iterable[Any]) -> list[Any]:
    """Each once, in order."""
    return list(dict.fromkeys(words))


def _by_numbers(text: str) -> list[tuple[int, str]]:
    """Sorts 16 before 128."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text)]
