"""What happened when after an event: lines of the service's log, moments by name, and a process's end."""

from __future__ import annotations

import os
import re
import select
import threading
import time
from datetime import UTC, datetime
from typing import NamedTuple

END_SECONDS = 60.0  # for a process that was killed or stopped to end
LINE = re.compile(r"^(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z) (\w+) +(.*?) generation \S+ epoch \S+ (.*)$")
LONGEST = 180  # characters of a line that is printed


class Line(NamedTuple):
    """A line of the log. seconds: after the event."""

    seconds: float
    text: str  # who says it, and what


class Moment(NamedTuple):
    """A moment by the line that tells it; `last`: of several such lines the last, else the first."""

    name: str
    pattern: str
    last: bool = False


MOMENTS = (
    Moment("launcher gives it up", r"^launcher .*rank {rank} \(pid \d+\) is given up"),
    Moment("launcher sees its end", r"^launcher .*rank {rank} \(pid \d+\) ended"),
    Moment("head hears", r"^head .*generation \d+ aborts: rank {rank} "),
    Moment("others leave", r"^rank .*generation \d+ is aborted: rank {rank} ", last=True),
    Moment("head goes on", r"^head .*goes on without"),
    Moment("waits for its end", r"^head .*no generation forms before"),
    Moment("preparing", r"^head .*the group is preparing"),
    Moment("joining", r"^head .*the group is joining"),
    Moment("others joined", r"^rank .*: joined generation"),
    Moment("serves", r"^head .*generation \d+ serves epoch"),
    Moment("last layer again", r"^head .*layer \d+ is served again", last=True),
    Moment("new process", r"^launcher .*rank {rank} is process"),
    Moment("it loads", r"^head .*rank {rank} \(pid \d+\) loads"),
    Moment("it has loaded", r"^head .*rank {rank} has loaded"),
    Moment("it joins", r"^head .*aborts: ranks \[.*\] join"),
    Moment("whole serves", r"^head .*generation \d+ serves epoch", last=True),
)
"""In the order in which they come, as a rule."""


def lines_of(log: str, at: float) -> list[Line]:
    """The log's lines in order of time, those of the event at `at` and later."""
    found = []
    for text in log.splitlines():
        if (read := LINE.match(text)) is None:
            continue
        when = datetime.strptime(read[1], "%Y-%m-%dT%H:%M:%S.%fZ").replace(tzinfo=UTC).timestamp()
        if when >= at - 0.001:  # the log has whole milliseconds
            found.append(Line(when - at, f"{read[3]} {read[4]}"))
    return sorted(found)


def moments(lines: list[Line], rank: int) -> dict[str, float]:
    """Seconds of the moments that the lines tell, of the loss of a rank and its return."""
    found = {}
    for moment in MOMENTS:
        pattern = re.compile(moment.pattern.format(rank=rank))
        told = [line.seconds for line in lines if pattern.search(line.text)]
        if told:
            found[moment.name] = round(told[-1 if moment.last else 0], 3)
    return found


def shown(lines: list[Line]) -> str:
    """The lines, one below the other."""
    return "\n".join(f"    {line.seconds:+8.3f} {line.text[:LONGEST]}" for line in lines)


class End:
    """Looks when a process ends: nothing of it runs any more, and its parent can collect it."""

    def __init__(self, pid: int) -> None:
        self.at: float | None = None  # on the clock of `time.time`
        self._handle = os.pidfd_open(pid)
        self._thread = threading.Thread(target=self._look, name="end", daemon=True)
        self._thread.start()

    def _look(self) -> None:
        poll = select.poll()
        poll.register(self._handle, select.POLLIN)
        if poll.poll(END_SECONDS * 1e3):
            self.at = time.time()
        os.close(self._handle)
