"""`RowExchange`: dispatchers that send one copy of a row to each rank that needs it, and add sums at home.

Libraries that work this way differ in their calls only. What stands around the calls is here: the step that
nobody brings a row to, grouping by slot, weighing, and counting bytes.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moeserve.dispatch.checks import check_equal, check_lane, check_spec
from moeserve.dispatch.dispatcher import Dispatched, DispatchEntry, Dispatcher, DispatchSpec, Traffic
from moeserve.dispatch.exchange import check_group
from moeserve.dispatch.libraries.probe import probe
from moeserve.dispatch.libraries.travel import cropped, parts_arrived, parts_travelling, presented, widened
from moeserve.dispatch.permute import Homes, group_rows, weigh_rows
from moeserve.dispatch.routing import Routing
from moeserve.experts.placement import EMPTY
from moeserve.quant.format import Packed


@dataclass(frozen=True, eq=False)
class Arrived:
    """Rows that came here, and what the library needs to bring their sums home."""

    parts: tuple[Tensor, ...]  # [R, ...] of the wire, at least as wide as a row of H
    slots: Tensor  # [R, K] of any integers, in this rank's numbering; EMPTY: not here
    weights: Tensor  # [R, K] float32
    handle: Any  # the library's, for the way home; None where no lane brought a row


@dataclass(frozen=True, eq=False)
class ExchangeTicket:
    """What `combine` needs of a dispatched step."""

    homes: Homes
    handle: Any  # as it arrived
    own: int  # rows of this lane


class RowExchange(Dispatcher):
    """A dispatcher over a library's own exchange of rows, which the adapter calls in `_send` and
    `_bring_home`.

    `spec` is what it is built for, over `group`, and `entry` what it declares. Building is collective: all
    ranks refuse with RuntimeError, before the library's first call, when one of them lacks something. Raises
    ValueError, alike on all, where lanes and owners are not the same ranks.
    """

    def __init__(self, spec: DispatchSpec, group: ProcessGroup | None, entry: DispatchEntry) -> None:
        check_spec(spec)
        check_equal(spec, entry.name)
        self._group = check_group(spec, group)
        probe(entry, spec, self._group)
        self._spec = spec
        self._travelling = entry.limits.travelling(spec.hidden)  # elements of a row on its way
        self._row_bytes = spec.wire.nbytes((1, self._travelling))  # of a copy on the way out
        self._traffic = Traffic()

    @abstractmethod
    def _send(self, hidden: Tensor, routing: Routing) -> Arrived:
        """Sends each row of `hidden [T, H]` to every rank that needs it. Some lane has a row; T may be 0."""

    @abstractmethod
    def _bring_home(self, partials: Tensor, handle: Any) -> Tensor:
        """Sends `partials [R, travelling]`, one sum for each row that arrived, to the rows' own ranks.

        The answer `[T or more, H or more]` holds this lane's rows first, all ranks' sums added; the next step
        leaves it alone.
        """

    def dispatch(self, hidden: Tensor, routing: Routing) -> Dispatched:
        """Sends rows on the wire to each rank that needs them, and groups those that came here."""
        spec = self._spec
        check_lane(spec, hidden, routing)
        arrived = self._send(hidden, routing) if sum(routing.lane_rows) else _nobody(spec, hidden)
        shape = torch.Size((arrived.slots.shape[0], spec.hidden))
        tokens = Packed(spec.wire, shape, parts_arrived(arrived.parts, spec))
        sizes = spec.slots, spec.row_align
        batch, homes = group_rows(tokens, arrived.slots.int(), arrived.weights, sizes)
        ticket = ExchangeTicket(homes, arrived.handle, hidden.shape[0])
        self._traffic = self._traffic.plus(dispatched=_most_copies(spec, ticket.own) * self._row_bytes)
        return Dispatched(batch, ticket)

    def combine(self, outputs: Tensor, ticket: ExchangeTicket) -> Tensor:
        """Sends this rank's weighted sums to the rows' own ranks, and takes this lane's: `[T, H]`."""
        spec = self._spec
        partials = weigh_rows(outputs, ticket.homes, spec.dtype)
        if ticket.handle is None:
            return partials
        total = self._bring_home(widened(partials, self._travelling), ticket.handle)
        answer = cropped(total[: ticket.own], spec.hidden).contiguous()
        nbytes = self._travelling * spec.dtype.itemsize
        self._traffic = self._traffic.plus(combined=_most_copies(spec, ticket.own) * nbytes)
        return answer

    def _warm(self) -> None:
        """Runs a step of one row a lane, for libraries that compile at first use. Collective.

        The last thing of building: so callers do not wait for a compiler, and a dispatcher whose library
        cannot make the step is refused, with RuntimeError, before it serves.
        """
        spec, rows = self._spec, min(1, self._spec.lane_rows)
        hidden = torch.zeros((rows, spec.hidden), dtype=spec.dtype, device=spec.device)
        slots = torch.full((rows, spec.top_k), EMPTY, dtype=torch.int32, device=spec.device)
        slots[:, 0] = (spec.rank + 1) % spec.ranks * spec.slots
        weights = torch.zeros(slots.shape, device=spec.device)
        routing = Routing(slots, weights, (rows,) * spec.ranks, 0)  # before the group's first step
        try:
            arrived = self.dispatch(hidden, routing)
            self.combine(hidden.new_zeros(arrived.batch.tokens.shape), arrived.ticket)
        except Exception as error:  # libraries raise classes of their own
            raise RuntimeError(f"its library's first step failed: {type(error).__name__}: {error}") from error
        self._traffic = Traffic()

    @property
    def traffic(self) -> Traffic:
        """Bytes moved between ranks, counting every row once for each rank it may need."""
        return self._traffic

    def _on_the_wire(self, hidden: Tensor, routing: Routing) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
        """A lane as libraries take it that know codes and scales: parts, slots and weights of its rows.

        Parts are contiguous and as wide as they travel. There is at least one row, as `presented` says.
        """
        rows, slots, weights = presented(hidden, routing)
        return parts_travelling(self._spec.wire.quantize(rows), self._travelling), slots, weights


def _nobody(spec: DispatchSpec, hidden: Tensor) -> Arrived:
    """What arrives in a step that no lane brings a row to: all ranks know it from the header."""
    none = hidden[:0]
    slots = none.new_empty((0, spec.top_k), dtype=torch.int32)
    weights = none.new_empty((0, spec.top_k), dtype=torch.float32)
    return Arrived(spec.wire.quantize(none).parts, slots, weights, None)


def _most_copies(spec: DispatchSpec, rows: int) -> int:
    """Most copies of a lane's rows that leave for other ranks: what traffic counts without a look at the
    routing, which would make the host wait for the device."""
    return rows * min(spec.top_k, spec.ranks - 1)
