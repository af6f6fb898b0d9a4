"""What dispatchers cost: times measured on a group, the fit through them, and which dispatcher is cheapest
where.

A cost is of one step's dispatch and combine, every lane bringing the same rows, by the slowest rank. What a
dispatcher's grouping costs the kernel is not in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

MARGIN = 0.05
"""A dispatcher that saves no more than this at any size is not worth its buffers beside the others."""

FAR, TELLING, GROWN = 2.0, 3, 0.5
"""How many times as long, at how many sizes, and with what growth a dispatcher takes that is not measured at
larger ones."""


@dataclass(frozen=True)
class Point:
    """Seconds of the two phases; together those of the slowest rank, by the median of rounds."""

    rows: int  # of every lane
    dispatch: float
    combine: float


@dataclass(frozen=True)
class Piece:
    """A straight stretch of a fit: from `start` rows on, `fixed` seconds and `per_row` seconds a row."""

    start: int
    fixed: float
    per_row: float


@dataclass(frozen=True)
class Fit:
    """Seconds by rows: a fixed part and a part per row, from each measured size to the next."""

    pieces: tuple[Piece, ...]

    @classmethod
    def through(cls, measured: Sequence[tuple[int, float]]) -> Fit:
        """The fit through (rows, seconds). More rows never take less: neighbours that say so are averaged.

        Past the last size it rises as steeply as on its last piece, or as from first to last if that is more.
        Raises ValueError without a point.
        """
        if not measured:
            raise ValueError("a cost is fitted through one measured size at least, and there is none")
        points = sorted(measured)
        rows = [size for size, _ in points]
        seconds = _rising([time for _, time in points])
        sides = list(zip(rows, seconds, strict=True))
        slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(sides)] or [0.0]
        overall = (seconds[-1] - seconds[0]) / max(1, rows[-1] - rows[0])
        slopes = [*slopes[: len(rows) - 1], max(slopes[-1], overall)]
        return cls(
            tuple(
                Piece(size, time - slope * size, slope)
                for (size, time), slope in zip(sides, slopes, strict=True)
            )
        )

    def seconds(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Seconds of each of `rows [N]`; fewer rows than were measured cost what the fewest did."""
        starts = np.array([piece.start for piece in self.pieces])
        at = np.clip(np.searchsorted(starts, rows, side="right") - 1, 0, None)
        fixed = np.array([piece.fixed for piece in self.pieces])
        per_row = np.array([piece.per_row for piece in self.pieces])
        found: NDArray[np.float64] = fixed[at] + per_row[at] * np.maximum(rows, starts[0])
        return found


def _rising(values: Sequence[float]) -> list[float]:
    """The values closest to these that never fall: runs that do become their mean."""
    runs: list[tuple[float, int]] = []
    for value in values:
        mean, count = value, 1
        while runs and runs[-1][0] > mean:
            before, many = runs.pop()
            mean, count = (before * many + mean * count) / (many + count), many + count
        runs.append((mean, count))
    return [mean for mean, count in runs for _ in range(count)]


@dataclass(frozen=True)
class DispatcherCost:
    """One dispatcher with one wire."""

    dispatcher: str
    wire: str
    points: tuple[Point, ...]

    @property
    def dispatch(self) -> Fit:
        """The fit of dispatch alone."""
        return Fit.through([(point.rows, point.dispatch) for point in self.points])

    @property
    def combine(self) -> Fit:
        """The fit of combine alone."""
        return Fit.through([(point.rows, point.combine) for point in self.points])

    def up_to(self, rows: int) -> DispatcherCost:
        """What was measured at no more rows than these, or at the fewest."""
        least = self.points[0].rows
        return replace(self, points=tuple(p for p in self.points if p.rows <= max(rows, least)))

    def seconds(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Dispatch and combine together, by rows `[N]`."""
        return self.dispatch.seconds(rows) + self.combine.seconds(rows)


def hopeless(points: Sequence[Point], rival: Sequence[Point]) -> bool:
    """Whether a dispatcher need not be measured further, by what it and a rival cost at the sizes both have.

    It takes more than FAR times as long at each of TELLING sizes or more, and from the first to the last it
    grows by more than FAR times as much, and by GROWN of what it began with, which is more than noise: no
    larger size can turn that.
    """
    seconds = {point.rows: point.dispatch + point.combine for point in rival}
    both = [(p.dispatch + p.combine, seconds[p.rows]) for p in points if p.rows in seconds]
    if len(both) < TELLING or any(own <= FAR * other for own, other in both):
        return False
    grown, rivals = both[-1][0] - both[0][0], both[-1][1] - both[0][1]
    return grown > FAR * max(rivals, 0.0) and grown > GROWN * both[0][0]


@dataclass(frozen=True)
class CostSetting:
    """What costs hold for; others are measured anew."""

    hosts: tuple[str, ...]
    device: str  # the machine's name
    lanes: int  # that bring rows
    owners: int  # that hold experts
    max_lanes: int  # reserved ones counted
    max_owners: int
    hidden: int
    top_k: int
    experts: int
    lane_rows: int
    dtype: str
    sliced: bool
    graph_rows: int  # steps of up to so many rows a lane were replayed from CUDA graphs
    held: int  # multiprocessors of each GPU that grids leave to others
    versions: tuple[tuple[str, str], ...]  # (package, version)


@dataclass(frozen=True)
class Costs:
    """The times that were measured in one setting."""

    setting: CostSetting
    dispatchers: tuple[DispatcherCost, ...] = ()
    refused: tuple[
        tuple[str, str, str], ...
    ] = ()  # (dispatcher, wire, why it could not be measured); not kept

    def of(self, dispatcher: str, wire: str) -> DispatcherCost | None:
        """The cost of one dispatcher and wire; None where they were not measured."""
        return next(
            (cost for cost in self.dispatchers if (cost.dispatcher, cost.wire) == (dispatcher, wire)), None
        )

    def tried(self, dispatcher: str, wire: str) -> bool:
        """Whether it was measured, or could not be."""
        return self.of(dispatcher, wire) is not None or any(r[:2] == (dispatcher, wire) for r in self.refused)

    def plus(self, measured: Sequence[DispatcherCost], refused: Sequence[tuple[str, str, str]] = ()) -> Costs:
        """These costs and refusals, and the ones given."""
        return replace(self, dispatchers=(*self.dispatchers, *measured), refused=(*self.refused, *refused))

    def json(self) -> dict[str, Any]:
        """The costs as a JSON document, without refusals."""
        document = asdict(self)
        del document["refused"]
        return document

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Costs:
        """The costs in a document of `json`. Raises KeyError, TypeError or ValueError for another one."""
        setting = dict(document["setting"])
        setting["hosts"] = tuple(setting["hosts"])
        setting["versions"] = tuple((name, version) for name, version in setting["versions"])
        dispatchers = tuple(
            DispatcherCost(
                str(cost["dispatcher"]),
                str(cost["wire"]),
                tuple(
                    Point(int(p["rows"]), float(p["dispatch"]), float(p["combine"])) for p in cost["points"]
                ),
            )
            for cost in document["dispatchers"]
        )
        if any(not cost.points for cost in dispatchers):
            raise ValueError("a dispatcher's costs have no points")
        return cls(CostSetting(**setting), dispatchers)


def cheapest(
    offers: Sequence[tuple[DispatcherCost, int]], rows: int, margin: float = MARGIN
) -> tuple[tuple[int, DispatcherCost], ...]:
    """Which of `offers`, (cost, most rows it serves), is cheapest up to how many rows a lane.

    Gives `(up to, cost)`, rising, the last up to `rows`. One whose absence would cost no more than `margin`
    anywhere is left out, the least useful first; hopeless ones are left out before. Where some were measured
    at fewer sizes than others, all are compared by those sizes. Raises ValueError when none serves `rows`.
    """
    if all(most < rows for _, most in offers):
        raise ValueError(f"no dispatcher with costs serves steps of {rows} rows a lane")
    offers = _hopeful(offers)
    sizes = np.arange(1, rows + 1)
    short = [cost.points[-1].rows for cost, most in offers if cost.points[-1].rows < most]
    alike = [cost.up_to(min(short, default=rows)).seconds(sizes) for cost, _ in offers]
    seconds = np.stack(
        [np.where(sizes <= most, times, np.inf) for times, (_, most) in zip(alike, offers, strict=True)]
    )
    kept = list(range(len(offers)))
    while len(kept) > 1:
        best = seconds[kept].min(axis=0)
        without = [seconds[[at for at in kept if at != left]].min(axis=0) for left in kept]
        losses = [float((other / best).max()) - 1 for other in without]
        least = min(range(len(kept)), key=lambda at: losses[at])
        if losses[least] > margin:
            break
        del kept[least]
    winners = np.array(kept)[seconds[kept].argmin(axis=0)]
    ends = [*(np.flatnonzero(np.diff(winners)) + 1).tolist(), rows]
    return tuple((end, offers[int(winners[end - 1])][0]) for end in ends)


def _hopeful(offers: Sequence[tuple[DispatcherCost, int]]) -> list[tuple[DispatcherCost, int]]:
    """Those that no other offer for as many rows makes hopeless."""

    def beaten(cost: DispatcherCost, most: int) -> bool:
        rivals = [other for other, others_most in offers if others_most >= most]
        return any(hopeless(cost.points, rival.points) for rival in rivals)

    return [offer for offer in offers if not beaten(*offer)]


def table(costs: Costs) -> list[str]:
    """Microseconds by size and dispatcher, dispatch + combine = both; `*` marks the fastest of a size."""
    sizes = sorted({point.rows for cost in costs.dispatchers for point in cost.points})
    found = {(cost, point.rows): point for cost in costs.dispatchers for point in cost.points}
    names = [f"{cost.dispatcher} ({cost.wire})" for cost in costs.dispatchers]
    rows = [["rows a lane", *names]]
    for size in sizes:
        points = [found.get((cost, size)) for cost in costs.dispatchers]
        best = min(point.dispatch + point.combine for point in points if point is not None)
        rows.append([str(size), *(_cell(point, best) for point in points)])
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return lines + [f"not measured: {name} ({wire}): {why}" for name, wire, why in costs.refused]


def _cell(point: Point | None, best: float) -> str:
    if point is None:
        return "-"
    both = point.dispatch + point.combine
    mark = "*" if both <= best else " "
    return f"{point.dispatch * 1e6:.1f} + {point.combine * 1e6:.1f} = {both * 1e6:.1f}{mark}"
