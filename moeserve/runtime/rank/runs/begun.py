"""`Begun`: runs that were begun and are yet to be launched, as other threads have to know of them."""

from __future__ import annotations

import threading

from moeserve.runtime.rank.runs.group_runs import Pass
from moeserve.runtime.rank.runs.runs import Run


class Begun:
    """Of one member that is alone. From any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._runs: list[tuple[Run, Pass, bool]] = []  # and whether each is recorded
        self._full = False  # whether no further run is launched before one has ended

    def __len__(self) -> int:
        return len(self._runs)

    def put(self, run: Run, of: Pass, *, recorded: bool) -> bool:
        """Counts a run; whether there is no other one."""
        with self._changed:
            self._runs.append((run, of, recorded))
            return len(self._runs) == 1

    def launched(self, run: Run) -> None:
        """It was launched, or whose it is was told why not."""
        with self._changed:
            del self._runs[next(at for at, one in enumerate(self._runs) if one[0] is run)]
            self._changed.notify_all()

    def records_another_than(self, of: Pass) -> bool:
        """Whether a run of anybody else is to be recorded, which waits for all that lies on the device."""
        with self._changed:
            return any(whose is not of and not recorded for _, whose, recorded in self._runs)

    def wait(self, seconds: float) -> None:
        """Returns once all are launched, or wait for others to end, or after so many seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._full or not self._runs, seconds)

    def note_full(self, *, full: bool) -> None:
        """full: no further run is launched before one has ended."""
        with self._changed:
            self._full = full
            if full and self._runs:
                self._changed.notify_all()
