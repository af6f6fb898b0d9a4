"""`RunQueue`: runs that members have asked for and that are in no order yet, first come, first served."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from moeserve.runtime.control.run_messages import MOST_ASKED, AskedRun


class RunQueue:
    """A queue of runs beside the steps that jobs wait for. Not thread-safe: its owner locks."""

    def __init__(self) -> None:
        self._asked: deque[AskedRun] = deque()
        self._runs_turn = True  # of a run, where a step waits too

    def __len__(self) -> int:
        return len(self._asked)

    def add(self, run: AskedRun) -> None:
        """Queues a run behind all others. Raises ValueError where `MOST_ASKED` of its member wait."""
        if sum(one.seat == run.seat for one in self._asked) >= MOST_ASKED:
            raise ValueError(f"seat {run.seat} has {MOST_ASKED} runs that wait, and asks for one more")
        self._asked.append(run)

    def of_others(self, seat: int) -> bool:
        """Whether a member of another seat waits for a run."""
        return any(run.seat != seat for run in self._asked)

    def next(self, *, step_waits: bool) -> AskedRun | None:
        """Takes the run that came first; None where a step waits whose turn it is."""
        if not self._asked or (step_waits and not self._runs_turn):
            return None
        self._runs_turn = False
        return self._asked.popleft()

    def stepped(self) -> None:
        """A step has been begun: where both wait, a run is next."""
        self._runs_turn = True

    def without(self, layers: Collection[int]) -> list[AskedRun]:
        """Takes out the runs that have a step of any of `layers`, and returns them."""
        gone = [run for run in self._asked if not set(layers).isdisjoint(run.layers)] if layers else []
        if gone:
            self._asked = deque(run for run in self._asked if set(layers).isdisjoint(run.layers))
        return gone

    def clear(self) -> None:
        """Forgets every run."""
        self._asked.clear()
        self._runs_turn = True
