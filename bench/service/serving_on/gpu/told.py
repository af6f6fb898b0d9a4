"""`Told`: results so far, each printed and written as it comes, so that a later case may fail."""

from __future__ import annotations

import json
from pathlib import Path

from bench.lib.record import Result, write

BENCH = "gpu_serve_on"


class Told:
    """Results by case, and what was not as it should be. out: where results go; None: into the record.

    recorded: whether they are written at all.
    """

    def __init__(self, out: Path | None, *, recorded: bool) -> None:
        self._out, self._recorded = out, recorded
        self._results: dict[str, Result] = {}
        self.faults: list[str] = []

    def say(self, **what: object) -> None:
        """Prints a line that is no result."""
        print(json.dumps(what, ensure_ascii=False), flush=True)

    def add(self, case: str, ours: float, unit: str, aim: float | None = None, **peers: float | None) -> None:
        """One number, of which less is better, and what stands beside it; one of an earlier call that had
        the case is replaced. Peers that are None are left out.
        """
        known = {name: round(value, 4) for name, value in peers.items() if value is not None}
        made = Result(BENCH, case, round(ours, 4), unit, "lower", aim and round(aim, 4), known)
        self._results[case] = made
        self.say(case=case, ours=made.ours, unit=unit, aim=made.aim, **known)
        if self._recorded:
            write(self._results.values(), self._out)
