"""`ByRows` of two dispatchers, as one more dispatcher for the cases of the law."""

from __future__ import annotations

from dataclasses import replace

from dispatcher_cases import Case, Outcome, run_cases
from torch.distributed import ProcessGroup

from moeserve.dispatch.backends import DISPATCHERS
from moeserve.dispatch.by_rows import ByRows
from moeserve.dispatch.dispatcher import Dispatcher, DispatchSpec

SMALL_ROWS = 4
"""Steps of the law bring up to 9 rows a lane, so each part serves some."""


def parted(name: str, small: str, large: str) -> None:
    """Adds to the table a dispatcher `name`: `small` up to SMALL_ROWS a lane, `large` above."""

    def build(spec: DispatchSpec, group: ProcessGroup | None) -> Dispatcher:
        first = DISPATCHERS[small].build(replace(spec, lane_rows=SMALL_ROWS), group)
        return ByRows([(SMALL_ROWS, first), (spec.lane_rows, DISPATCHERS[large].build(spec, group))])

    DISPATCHERS[name] = replace(DISPATCHERS[large], name=name, build=build)


def run_parted(rank: int, world: int, parts: dict[str, tuple[str, str]], cases: list[Case]) -> list[Outcome]:
    """Worker: every case once, and once more for its bits; `parts` are the dispatchers by name."""
    for name, (small, large) in parts.items():
        parted(name, small, large)
    return run_cases(rank, world, cases)
