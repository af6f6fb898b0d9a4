"""One rank: nothing travels; rows are rounded to the wire format, grouped, and weighed back."""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup

from moeserve.dispatch.checks import check_lane, check_spec, local_slots
from moeserve.dispatch.dispatcher import (
    Dispatched,
    DispatchEntry,
    Dispatcher,
    DispatchSpec,
    Pace,
    Traffic,
)
from moeserve.dispatch.exchange import TORCH_ARCHS
from moeserve.dispatch.peers.rounding import rounding
from moeserve.dispatch.permute import Homes, group_rows, weigh_rows
from moeserve.dispatch.routing import Routing
from moeserve.dispatch.wire import ROW_WISE
from moeserve.experts.batch import Grouping


class Local(Dispatcher):
    """The dispatcher of a single rank."""

    def __init__(self, spec: DispatchSpec, group: ProcessGroup | None = None) -> None:
        check_spec(spec)
        if spec.ranks != 1:
            raise ValueError(
                f"dispatcher local serves one rank, not {spec.ranks} members; use allgather_reducescatter"
            )
        self._spec, self._rounded = spec, rounding(spec)

    def dispatch(self, hidden: Tensor, routing: Routing) -> Dispatched:
        """Groups this lane's rows by slot."""
        spec = self._spec
        check_lane(spec, hidden, routing)
        slots = local_slots(spec, routing.slots)
        batch, homes = group_rows(
            self._rounded(hidden), slots, routing.weights, (spec.slots_here, spec.row_align)
        )
        return Dispatched(batch, homes)

    def combine(self, outputs: Tensor, ticket: Homes) -> Tensor:
        """Weighs the outputs into `[T, H]`."""
        return weigh_rows(outputs, ticket, self._spec.dtype)

    def combine_into(self, outputs: Tensor, ticket: Homes, place: Tensor) -> Tensor:
        """Weighs the outputs into `place`."""
        return weigh_rows(outputs, ticket, self._spec.dtype, place)

    @property
    def traffic(self) -> Traffic:
        """Nothing: there is no other rank."""
        return Traffic()

    def close(self) -> None:
        """Does nothing: this dispatcher holds no buffer."""


ENTRY = DispatchEntry(
    name="local",
    build=Local,
    wires=ROW_WISE,
    grouping=Grouping.RAGGED,
    pace=Pace.ANY,
    archs=TORCH_ARCHS,
    buffer_bytes=lambda spec: 0,
    max_lanes=1,
    max_owners=1,
    sliced=True,
    outlives=True,
    verified=("cpu", "sm90"),
)
