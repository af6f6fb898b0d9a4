"""How far a member is: what two threads note at once never goes back."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import pytest

from moeserve.runtime.control.reached import Phase, Progress, Reached

SECONDS = 20.0


class Compared(int):
    """A step's number; another thread notes something while it is compared, where it may."""

    note: Callable[[], Future[None]]

    def __eq__(self, other: object) -> bool:
        wait([self.note()], 0.2)  # where writers exclude each other, it is noted after this
        return int(self) == other

    __hash__ = int.__hash__


@pytest.mark.parametrize(
    ("note", "then"),
    [
        (lambda progress: progress.begin(10), Reached(10, Phase.BEGUN)),
        (lambda progress: progress.join(Phase.GROUP), Reached(0, Phase.GROUP)),
    ],
    ids=["a step begins", "a generation joins"],
)
def test_a_step_that_ends_takes_nothing_back(note: Callable[[Progress], None], then: Reached) -> None:
    """Else the member would seem to be behind the others, or ahead of them, and be blamed for it."""
    progress = Progress()
    progress.begin(9)
    with ThreadPoolExecutor(1) as threads:
        noted: list[Future[None]] = []

        def begun() -> Future[None]:
            if not noted:  # by the first comparison alone
                noted.append(threads.submit(note, progress))
            return noted[0]

        step = Compared(9)
        step.note = begun
        progress.end(step)
        noted[0].result(SECONDS)
    assert progress.reached == then


def test_a_step_ends_where_it_is_the_last_that_began() -> None:
    progress = Progress()
    progress.begin(9)
    progress.enter(Phase.DEVICE)
    progress.end(8)
    assert progress.reached == Reached(9, Phase.DEVICE)
    progress.end(9)
    assert progress.reached == Reached(9, Phase.DONE)
