"""Where a call's time goes, by the metrics of the lane's rank: means of what it counted between two looks."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Callable

LINE = re.compile(r"moe_(step_phase|request)_duration_seconds_(sum|count)\{(?P<labels>.*)\} (?P<value>\S+)")
LABEL = re.compile(r'(phase|method)="([^"]*)"')
ROWS = (
    ("client and wire", lambda call, mean: call - mean["request"]),
    ("door: parse, check, submit; and threads' turns", lambda call, mean: mean["request"] - _in_rank(mean)),
    ("wait for the header, and launch", lambda call, mean: mean["wait"]),
    ("of it launch, by the host", lambda call, mean: mean["launch"]),
    ("step: dispatch", lambda call, mean: mean["dispatch"]),
    ("step: experts", lambda call, mean: mean["compute"]),
    ("step: combine", lambda call, mean: mean["combine"]),
    ("reply", lambda call, mean: mean["reply"]),
)
"""The rows of the table: a name, and how it comes from the call and the means, all in seconds. Where the
host's clock begins later than the device's, what the step took beside its kernels (upload, download) is in
the wait.
"""


def _in_rank(mean: dict[str, float]) -> float:
    return sum(mean[phase] for phase in ("wait", "dispatch", "compute", "combine", "reply"))


class Phases:
    """Means of one rank's phases since it was made, or last asked."""

    def __init__(self, exporter: str) -> None:
        """`exporter`: host:port of the rank's metrics."""
        self._exporter = exporter
        self._before = self._read()

    def means(self) -> dict[str, float]:
        """Seconds by phase, and of a `request` past gRPC; 0 where nothing was counted."""
        now, before = self._read(), self._before
        self._before = now
        found = {}
        for name in ("request", "wait", "launch", "dispatch", "compute", "combine", "reply"):
            total, count = (
                now.get((name, kind), 0.0) - before.get((name, kind), 0.0) for kind in ("sum", "count")
            )
            found[name] = total / count if count else 0.0
        return found

    def table(self, call: float) -> dict[str, float]:
        """Microseconds by row, of a call of `call` seconds as its caller sees it."""
        mean = self.means()
        rows: tuple[tuple[str, Callable[[float, dict[str, float]], float]], ...] = ROWS
        return {"call": round(call * 1e6, 1)} | {name: round(of(call, mean) * 1e6, 1) for name, of in rows}

    def _read(self) -> dict[tuple[str, str], float]:
        with urllib.request.urlopen(f"http://{self._exporter}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        found: dict[tuple[str, str], float] = {}
        for match in filter(None, map(LINE.match, lines)):
            labels = dict(LABEL.findall(match["labels"]))
            name = labels.get("phase", "") if match[1] == "step_phase" else "request"
            if match[1] == "request" and labels.get("method") not in ("RegionCall", "DataConnection"):
                continue
            found[name, match[2]] = found.get((name, match[2]), 0.0) + float(match["value"])
        return found
