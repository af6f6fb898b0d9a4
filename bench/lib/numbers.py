"""`Numbers`: the numbers of one dispatcher's steps in a bench, launched or replayed from a CUDA graph."""

from __future__ import annotations

from dataclasses import replace

from moeserve.dispatch.dispatcher import Dispatcher
from moeserve.dispatch.routing import Routing


class Numbers:
    """Numbers that rise from one dispatch to the next. All members of a group ask for them alike.

    A launched dispatch has the number of its routing; a recorded one has the next after the device's last. So
    before a graph is replayed `replayed` says where its steps begin, and counts them.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher, self._last = dispatcher, 0

    def next(self, routing: Routing) -> Routing:
        """The same routing, as the next step."""
        self._last += 1
        return replace(routing, number=self._last)

    def replayed(self, dispatches: int) -> None:
        """The next `dispatches` steps are those of a graph that is replayed now."""
        self._dispatcher.expect(self._last + 1)
        self._last += dispatches
