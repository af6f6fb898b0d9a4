"""`ByRows`: one dispatcher made of several, each for steps of a range of rows.

The step's header tells every rank how many rows each lane brings, so all ranks choose alike.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from moeserve.dispatch.dispatcher import Dispatched, Dispatcher, Traffic
from moeserve.dispatch.routing import Routing


@dataclass(frozen=True, eq=False)
class _RangeTicket:
    dispatcher: Dispatcher  # that dispatched, and brings home
    own: Any


class ByRows(Dispatcher):
    """Dispatchers by the rows of a step's fullest lane. What they hand on may differ in grouping."""

    def __init__(self, ranges: Sequence[tuple[int, Dispatcher]]) -> None:
        """`ranges` are (up to rows, dispatcher), rising; one dispatcher may serve several. ValueError
        otherwise.
        """
        ends = [end for end, _ in ranges]
        if not ends or ends != sorted(set(ends)):
            raise ValueError(f"dispatchers by rows need ends that rise, and at least one; found {ends}")
        self._ranges = tuple(ranges)
        self._dispatchers = tuple(dict.fromkeys(dispatcher for _, dispatcher in ranges))

    def dispatch(self, hidden: Tensor, routing: Routing) -> Dispatched:
        """Dispatches with the part for the fullest lane's rows. Raises ValueError above the last range."""
        dispatcher = self._dispatcher(max(routing.lane_rows))
        arrived = dispatcher.dispatch(hidden, routing)
        return Dispatched(arrived.batch, _RangeTicket(dispatcher, arrived.ticket))

    def combine(self, outputs: Tensor, ticket: _RangeTicket) -> Tensor:
        """Home by the dispatcher that dispatched: `[T, H]`."""
        return ticket.dispatcher.combine(outputs, ticket.own)

    def combine_into(self, outputs: Tensor, ticket: _RangeTicket, place: Tensor) -> Tensor:
        """The same, by what can write there."""
        return ticket.dispatcher.combine_into(outputs, ticket.own, place)

    @property
    def traffic(self) -> Traffic:
        """The sum of what its dispatchers have sent."""
        total = Traffic()
        for dispatcher in self._dispatchers:
            total = total.plus(dispatcher.traffic.dispatched, dispatcher.traffic.combined)
        return total

    def expect(self, number: int, absent: tuple[int, ...] = ()) -> None:
        """Raises RuntimeError: the dispatcher that was recorded is told, and it is not known here."""
        raise RuntimeError(
            f"step {number} is to be replayed by one of several dispatchers; tell the one that was recorded"
        )

    def exclude(self, seats: Collection[int]) -> None:
        """Ends the waits of all its dispatchers for the members of `seats`."""
        for dispatcher in self._dispatchers:
            dispatcher.exclude(seats)

    def late(self) -> tuple[int, ...]:
        """Seats that any of them stopped waiting for."""
        return tuple(sorted({seat for dispatcher in self._dispatchers for seat in dispatcher.late()}))

    def interrupt(self) -> None:
        """Ends the waits of all its dispatchers."""
        for dispatcher in self._dispatchers:
            dispatcher.interrupt()

    def close(self) -> None:
        """Closes all, also when one fails to."""
        with ExitStack() as closing:
            for dispatcher in self._dispatchers:
                closing.callback(dispatcher.close)

    def _dispatcher(self, rows: int) -> Dispatcher:
        for end, dispatcher in self._ranges:
            if rows <= end:
                return dispatcher
        raise ValueError(f"a lane brings {rows} rows, and the dispatchers serve up to {self._ranges[-1][0]}")
