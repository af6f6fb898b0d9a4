"""`StepRunner`: one layer's step on one rank, launched phase by phase or replayed from its graph."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from moeserve.dispatch.members import Members
from moeserve.dispatch.routing import Routing
from moeserve.experts.placement import EMPTY
from moeserve.experts.routing.choices import Choices, StepAddressing, addressed, routed
from moeserve.experts.routing.gate import Gate
from moeserve.runtime.control.reached import Phase, Progress
from moeserve.runtime.rank.all2all import RankDispatchers
from moeserve.runtime.rank.experts import RankExperts
from moeserve.runtime.rank.graphs import GraphStep, Recorded, StepGraphs, absent_lanes
from moeserve.runtime.rank.measured import DeviceTimes, ExpertRows
from moeserve.runtime.rank.transfers.step_room import StepRoom
from moeserve.runtime.served import Served
from moeserve.runtime.step import LaneLogits, LaneRows, Phases


class Launch(NamedTuple):
    """A step as it is launched, or recorded."""

    layer: int
    lane_rows: tuple[int, ...]  # by lane, padded in a graph
    addressing: StepAddressing  # with the rows of the fullest lane, not padded
    members: Members
    brings: bool  # whether this member has a lane
    number: int
    timed: bool  # whether the device takes timestamps; alike on all members


class Made(NamedTuple):
    """What a step that was launched tells, or one that was recorded whenever it is replayed."""

    phases: Phases
    counts: Tensor | None  # [slots] rows of this member's experts; None: the graph counts them itself


MOST_READY = 4096  # rows of all lanes, in their order, whose graphs and rooms are found at one look


class _Ready(NamedTuple):
    """A recorded step that is replayed without being looked for."""

    members: Members
    padded: int
    absent: tuple[int, ...]
    graph: Recorded
    made: Made


class StepRunner:
    """Runs one rank's steps over `dispatchers`, and keeps their graphs and the layers' gates.

    Graphs use the dispatchers: they are dropped (`drop_graphs`) whenever those are closed.
    """

    def __init__(
        self,
        served: Served,
        device: str,
        experts: RankExperts,
        dispatchers: RankDispatchers,
        progress: Progress,
        expert_rows: ExpertRows,
    ) -> None:
        self._expert_rows = expert_rows
        self._served = served
        self._device = device
        self._experts = experts
        self._dispatchers = dispatchers
        self._progress = progress
        self._gates: dict[int, tuple[Gate, Gate]] = {}  # by layer: as it is stored, and on the device
        self.drop_graphs()

    def drop_graphs(self) -> None:
        """Drops all graphs: steps are launched and recorded anew."""
        self.graphs = StepGraphs(self._served.graph_rows, self._device)
        self._recorded: dict[Hashable, Made] = {}  # by graph
        self._ready: dict[Hashable, _Ready] = {}  # by rows of all lanes, and the memory that holds them
        self._rooms: dict[Hashable, StepRoom] = {}  # of graphs, by layer and rows of all lanes

    def gate(self, layer: int) -> Gate:
        """The gate of `layer`, its bias on the device; graphs that hold one of other weights are dropped."""
        stored = self._experts.gate(layer)
        source, here = self._gates.get(layer, (None, stored))
        if source is not stored:
            if source is not None:
                self.graphs.forget(layer)
                self._ready = {}
            here = replace(stored, bias=None if stored.bias is None else stored.bias.to(self._device))
            self._gates[layer] = stored, here
        return here

    def room(
        self, layer: int, lane_rows: tuple[int, ...], make: Callable[[], StepRoom | None]
    ) -> StepRoom | None:
        """The room of the graph of a step of these rows, looked for once; None where there is none."""
        room = self._rooms.get((layer, lane_rows))
        if room is None and (room := make()) is not None:
            if len(self._rooms) >= MOST_READY:
                self._rooms = {}
            self._rooms[layer, lane_rows] = room
        return room

    def replay(self, launch: Launch, rows: LaneRows, *, lent: bool = False) -> tuple[Tensor, Made]:
        """One step from its graph. The host's seconds are told as one phase, and the bytes as recorded.

        lent: the answer may lie where the next step writes its own.
        """
        lap, layer = _stopwatch(), launch.layer
        kind = launch.addressing.meter.metering.phase(launch.addressing.fullest), launch.timed
        which = (layer, launch.lane_rows, kind, rows)  # columns are the same only where they are one object
        ready = self._ready.get(which)
        if ready is not None and ready.members is launch.members:
            self._dispatchers.expect(layer, ready.padded, (launch.number, ready.absent))
            ready.graph.replay()
            answer = ready.graph.answer if lent else ready.graph.answer.clone()
            return answer, self._told(layer, ready.padded, ready.made, lap())
        absent = absent_lanes(launch.members, launch.lane_rows)
        step = GraphStep(layer, kind, launch.lane_rows, absent, launch.brings)
        answer, found = self._from_graph(launch, step, rows)
        if (graph := self.graphs.recorded(step, rows)) is not None:
            if len(self._ready) >= MOST_READY:
                self._ready = {}
            self._ready[which] = _Ready(launch.members, step.padded, absent, graph, found)
        return answer, self._told(layer, step.padded, found, lap())

    def _from_graph(self, launch: Launch, step: GraphStep, rows: LaneRows) -> tuple[Tensor, Made]:
        """The answer, and what the step told when it was launched or recorded."""
        made = list[Made]()

        def launched(inputs: LaneRows, lanes: tuple[int, ...]) -> Tensor:
            answer, one = self.launch(launch._replace(lane_rows=lanes), inputs)
            if self.graphs.recording and self._device != "cpu":
                assert one.counts is not None
                self._expert_rows.tally(launch.addressing.layer, one.counts).add()
                one = one._replace(counts=None)
            made.append(one)
            return answer

        def before_replay() -> None:
            self._dispatchers.expect(step.layer, step.padded, (launch.number, step.absent))

        self._expert_rows.count()  # of the step before, which makes the memory that a graph counts in
        answer = self.graphs.run(step, rows, launched, before_replay)
        graph = (step.layer, step.padded, step.kind, type(rows), rows.hidden.dtype)
        if made:
            self._recorded[graph] = made[-1]
        return answer, self._recorded[graph]

    def _told(self, layer: int, padded: int, recorded: Made, seconds: float) -> Made:
        """What a step tells that was replayed, by what it told when it was recorded."""
        sent = self._dispatchers.traffic_of_replayed(layer, padded)
        bytes_sent, on_device = (sent.dispatched, sent.combined), recorded.phases.on_device
        phases = Phases(0.0, seconds, 0.0, -1, *bytes_sent, sent.dispatcher, timed=False, on_device=on_device)
        return Made(phases, recorded.counts)

    def launch(self, launch: Launch, rows: LaneRows, place: Tensor | None = None) -> tuple[Tensor, Made]:
        """One step, phase by phase; rows are metered as of a step with the fullest lane of `launch`.

        `rows` are on the device. Where they bring logits, `gate` has been asked for the layer's before.
        place: `[T, H]` where the answer is wanted, and returned from.
        """
        layer, lane_rows, addressing = launch.layer, launch.lane_rows, launch.addressing
        dispatcher, lap = self._dispatchers[layer], _stopwatch()
        times = DeviceTimes() if launch.timed else None
        mark = _nothing if times is None else times.mark
        mark()
        if isinstance(rows, LaneLogits):
            slots, weights = routed(self._gates[layer][1], rows.logits, rows.valid, addressing)
        else:
            slots, weights = addressed(Choices(rows.experts, rows.weights, rows.valid), addressing)
        hidden, weights = self._weigh_input(layer, rows.hidden, slots, weights)
        self._progress.enter(Phase.DISPATCH)
        arrived = dispatcher.dispatch(hidden, Routing(slots, weights, lane_rows, launch.number))
        dispatched = lap()
        mark()
        likely = _taken_rows(launch) * slots.shape[1] / addressing.book.room
        self._progress.enter(Phase.EXPERTS)
        outputs = self._experts.compute(layer, replace(arrived.batch, likely=likely))
        computed = lap()
        mark()
        self._progress.enter(Phase.COMBINE)
        if place is None:
            answer = dispatcher.combine(outputs, arrived.ticket)
        else:
            answer = dispatcher.combine_into(outputs, arrived.ticket, place)
        combined = lap()
        mark()
        expert_rows = int(arrived.batch.counts.sum()) if self._device == "cpu" else -1
        sent = self._dispatchers.traffic_of_launched(layer, max(lane_rows))
        bytes_sent = (sent.dispatched, sent.combined)
        phases = Phases(dispatched, computed, combined, expert_rows, *bytes_sent, sent.dispatcher)
        on_device = None if times is None else times.seconds
        phases = replace(phases, timed=self._device == "cpu", on_device=on_device)
        return answer, Made(phases, arrived.batch.counts)

    def _weigh_input(
        self, layer: int, hidden: Tensor, slots: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Weights the input where the model does so (top-1); the rows then travel with weight 1."""
        if not self._served.checkpoint.gate(layer).weight_on_input:
            return hidden, weights
        scale = weights.sum(dim=1, keepdim=True)  # top-1 after merging: one weight a row
        return hidden * scale.to(hidden.dtype), (slots != EMPTY).to(weights.dtype)


def _taken_rows(launch: Launch) -> int:
    """Rows of lanes that a member has; those of reserved ones are only room in a graph."""
    taken = launch.members.seat_of_lane
    return sum(rows for rows, seat in zip(launch.lane_rows, taken, strict=True) if seat is not None)


def _nothing() -> None:
    """Takes no timestamp."""


def _stopwatch() -> Callable[[], float]:
    """Seconds since the last call. It never waits for a device."""
    last = [time.perf_counter()]

    def lap() -> float:
        now = time.perf_counter()
        last[0], lapsed = now, now - last[0]
        return lapsed

    return lap
