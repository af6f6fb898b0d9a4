"""Dispatchers whose time is known, as a group measures them."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from parallel import group
from torch import Tensor

from moeserve.dispatch.backends import DISPATCHERS
from moeserve.dispatch.costs.costs import Point
from moeserve.dispatch.costs.measure import Candidate, measure
from moeserve.dispatch.dispatcher import Dispatched, DispatchEntry, Dispatcher, DispatchSpec, Traffic
from moeserve.dispatch.members import Members
from moeserve.dispatch.routing import Routing
from moeserve.experts.batch import ExpertBatch, Grouping
from moeserve.quant.formats import BF16

LANE_ROWS = 5000
PHASE_SECONDS = 0.02


@dataclass(frozen=True)
class Pauses:
    """Seconds that a step sleeps in each phase, and more for every row."""

    dispatch: float
    combine: float = 0.0
    per_row: float = 0.0


class Asleep(Dispatcher):
    """A dispatcher that carries nothing and takes its time."""

    def __init__(self, spec: DispatchSpec, pauses: Pauses) -> None:
        self._spec, self._pauses = spec, pauses

    def dispatch(self, hidden: Tensor, routing: Routing) -> Dispatched:
        time.sleep(self._pauses.dispatch + self._pauses.per_row * len(hidden))
        none = torch.zeros(self._spec.slots, dtype=torch.int32)
        tokens = self._spec.wire.quantize(hidden[:1])
        return Dispatched(ExpertBatch(tokens, Grouping.RAGGED, none, none), hidden)

    def combine(self, outputs: Tensor, ticket: Any) -> Tensor:
        time.sleep(self._pauses.combine)
        return torch.as_tensor(ticket)

    @property
    def traffic(self) -> Traffic:
        return Traffic()

    def close(self) -> None:
        return


def asleep(name: str, pauses: Pauses) -> DispatchEntry:
    """The entry of such a dispatcher."""
    return replace(DISPATCHERS["all2allv"], name=name, build=lambda spec, group: Asleep(spec, pauses))


def measured(rank: int, world: int) -> dict[str, tuple[Point, ...]]:
    """Worker: what is measured of dispatchers that sleep, by name."""
    spec = DispatchSpec(Members.of_ranks(world), rank, 2, 32, 2, LANE_ROWS, torch.bfloat16, BF16)
    first, second = (PHASE_SECONDS, 0.0) if rank == 0 else (0.0, PHASE_SECONDS)
    entries = [
        asleep("steady", Pauses(1e-3, 1e-3)),
        asleep("apart", Pauses(first, second)),  # one rank is slow in dispatch, the other in combine
        asleep("hopeless", Pauses(0.02, 0.0, 1e-4)),
        asleep("flat", Pauses(0.02, 0.0)),  # dear for few rows, and not for many
    ]
    found = measure([Candidate(entry, spec) for entry in entries], 6.0, group())
    return {cost.dispatcher: cost.points for cost in found.costs}
