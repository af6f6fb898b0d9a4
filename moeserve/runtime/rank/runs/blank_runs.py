"""`BlankRuns`: runs of other members' lanes; this member computes its part of them without own rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moeserve.experts.batch import Tally
from moeserve.runtime.rank.rank import Rank
from moeserve.runtime.rank.runs.run_graphs import RunGraphs, RunLanes
from moeserve.runtime.rank.transfers.engines import Passed
from moeserve.runtime.step import LaneInput, Moment, empty_input


class _Key(NamedTuple):
    layers: tuple[int, ...]
    rows: int
    lane: int  # that brings the rows


class BlankRuns:
    """Launches them by the thread of the steps, on the current stream; on a GPU as graphs, one for each run's
    layers and rows.
    """

    def __init__(self, rank: Rank, graphs: RunGraphs) -> None:
        self._rank = rank
        self._graphs = None if rank.device == "cpu" else graphs
        self._rooms: dict[int, LaneInput] = {}

    @property
    def nbytes(self) -> int:
        """Of the rows that there are none of, by any thread; their sizes are powers of two."""
        return sum(column.nbytes for room in list(self._rooms.values()) for column in room.columns())

    @torch.no_grad()
    def launch(self, layers: tuple[int, ...], rows: int, lane: int, number: int) -> Moment:
        """Queues steps of these layers, the first one as `number`, to which `lane` brings padded `rows`; the
        moment when they have ended. Raises as `Rank.record`.
        """
        key, members = _Key(layers, rows, lane), self._rank.epoch.members
        lanes = RunLanes.of(members, lane, rows)

        steps = [(layer, rows) for layer in layers]

        def recorded() -> None:
            self._steps(key, lanes.recorded)

        replay = None if self._graphs is None else self._graphs.replay_of(key, len(layers), recorded)
        if replay is None:
            self._steps(key, lanes.launched, self._rank.numbers(steps, number))
        else:
            self._rank.expect(steps, number, lanes.absent)
            replay()
        if self._graphs is None:
            return Passed()
        ended: Moment = torch.cuda.current_stream(self._rank.device).record_event()
        return ended

    def _steps(self, key: _Key, lane_rows: tuple[int, ...], numbers: Sequence[int] = ()) -> None:
        """numbers: of the steps; () while they are recorded."""
        room = self._room(key.rows)
        for layer, number in zip(key.layers, numbers or [0] * len(key.layers), strict=True):
            self._rank.record(layer, room, lane_rows, then=_counted, number=number)

    def _room(self, rows: int) -> LaneInput:
        """Rows that there are none of: none is valid."""
        rank = self._rank
        if rank.member.lane is None:
            rows = 0
        room = self._rooms.get(rows)
        if room is None:
            hidden, top_k = rank.served.checkpoint.hidden, rank.served.checkpoint.top_k
            none = empty_input(hidden, top_k, rank.served.dtype)
            made = none.each(lambda column: column.new_zeros((rows, *column.shape[1:]), device=rank.device))
            room = self._rooms[rows] = made
        return room


def _counted(answer: Tensor, tally: Tally | None) -> None:
    """There is no answer to rows that there are none of; those of others are counted."""
    if tally is not None:
        tally.add()
