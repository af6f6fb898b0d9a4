"""`ByRows`: one carrier made of several, each for steps of a range of rows.

The step's header tells every rank how many rows each lane brings, so all ranks choose alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from moeserve.dispatch.dispatcher import Dispatched, Dispatcher, Pending, Traffic
from moeserve.dispatch.routing import Routing


@dataclass(frozen=True, eq=False)
class _Ticket:
    carrier: Dispatcher  # that dispatched, and brings home
    own: Any


class ByRows(Dispatcher):
    """Carriers by the rows of a step's fullest lane. What they hand on may differ in grouping."""

    def __init__(self, ranges: Sequence[tuple[int, Dispatcher]]) -> None:
        """`ranges` are (up to rows, carrier), rising; one carrier may serve several. ValueError otherwise."""
        ends = [end for end, _ in ranges]
        if not ends or ends != sorted(set(ends)):
            raise ValueError(f"carriers by rows need ends that rise, and at least one; found {ends}")
        self._ranges = tuple(ranges)
        self._carriers = tuple(dict.fromkeys(carrier for _, carrier in ranges))

    def dispatch(self, hidden: Tensor, routing: Routing) -> Pending[Dispatched]:
        """As the carrier of the fullest lane's rows does. Raises ValueError for more than the last serves."""
        carrier = self._carrier(max(routing.lane_rows))
        pending = carrier.dispatch(hidden, routing)

        def finish() -> Dispatched:
            arrived = pending.wait()
            return Dispatched(arrived.batch, _Ticket(carrier, arrived.ticket))

        return Pending(finish)

    def combine(self, outputs: Tensor, ticket: _Ticket) -> Pending[Tensor]:
        """Home by the carrier that dispatched: `[T, H]`."""
        return ticket.carrier.combine(outputs, ticket.own)

    @property
    def traffic(self) -> Traffic:
        """Bytes of all of them."""
        total = Traffic()
        for carrier in self._carriers:
            total = total.plus(carrier.traffic.dispatched, carrier.traffic.combined)
        return total

    def late(self) -> tuple[int, ...]:
        """Ranks that any of them stopped waiting for."""
        return tuple(sorted({rank for carrier in self._carriers for rank in carrier.late()}))

    def interrupt(self) -> None:
        """None of them waits any more."""
        for carrier in self._carriers:
            carrier.interrupt()

    def close(self) -> None:
        """Closes all, also when one fails to."""
        with ExitStack() as closing:
            for carrier in self._carriers:
                closing.callback(carrier.close)

    def _carrier(self, rows: int) -> Dispatcher:
        for end, carrier in self._ranges:
            if rows <= end:
                return carrier
        raise ValueError(f"a lane brings {rows} rows, and the carriers serve up to {self._ranges[-1][0]}")
