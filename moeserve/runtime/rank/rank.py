"""`Rank`: one member's experts, dispatcher and step, as a plain class without Ray or gRPC.

A launcher gives it a seat in a group; a model server may as well host it in its own process (torchrun) and
call `step` directly, with no hop at all. A rank holds experts and brings rows. A member that does only one of
both is served by the same class: without an owner's place it loads no experts and runs no kernel, without a
lane it brings no rows and gets none back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Hashable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moeserve.device.waits import check_waits
from moeserve.dispatch.dispatcher import DispatchSpec
from moeserve.dispatch.members import Member
from moeserve.dispatch.routing import Routing
from moeserve.experts.batch import Grouping
from moeserve.experts.kernel import KernelSpec
from moeserve.experts.placement import EMPTY
from moeserve.experts.routing.address_book import AddressBook
from moeserve.experts.routing.choices import Choices, StepAddressing, addressed, routed
from moeserve.experts.routing.gate import Gate
from moeserve.experts.routing.meter import LoadMeter, Reading
from moeserve.quant.format import Format
from moeserve.runtime.control.reached import Phase, Progress
from moeserve.runtime.epoch import Epoch
from moeserve.runtime.planning.costing import TABLE_ORDER, CostBook, Costing
from moeserve.runtime.planning.layers import Place, dispatch_spec
from moeserve.runtime.planning.plan import DispatchSpan, Plan
from moeserve.runtime.rank.all2all import RankDispatchers
from moeserve.runtime.rank.experts import LayerProgress, RankExperts
from moeserve.runtime.rank.graphs import GraphStep, StepGraphs, absent_lanes, padded_rows
from moeserve.runtime.rank.measured import TIMED_EVERY, DeviceTimes, ExpertRows, RowsReading
from moeserve.runtime.rank.memory import held_bytes, release_cached
from moeserve.runtime.rank.transfers import StepRoom
from moeserve.runtime.rank.warm import Arrivals, warm
from moeserve.runtime.rank.warm_steps import numbers_of, warm_choices, warm_grouping, warm_routing, warm_steps
from moeserve.runtime.served import Served
from moeserve.runtime.step import FIRST_NUMBER, LaneLogits, LaneRows, Phases, empty_input

log = logging.getLogger(__name__)


class _Launch(NamedTuple):
    """A step as it is launched, or recorded."""

    layer: int
    lane_rows: tuple[int, ...]  # by lane, padded in a graph
    fullest: int  # rows of the fullest lane, not padded
    number: int
    timed: bool  # whether the device takes timestamps; alike on all members


class _Made(NamedTuple):
    """What a step that was launched tells, or one that was recorded whenever it is replayed."""

    phases: Phases
    counts: Tensor  # [slots] rows of this member's experts


class Rank:
    """One member, of seat `index`. `load` reads its experts, `join` builds its dispatchers once the process
    group is up, `step` runs.
    """

    def __init__(
        self, index: int, served: Served, plans: dict[int, Plan], device: str, costing: Costing = TABLE_ORDER
    ) -> None:
        self.index = index
        self.served = served
        self.plans = plans  # as they are served: by cost from `join` on, where `costing` asks for it
        self.device = device
        self._planned = plans
        self.experts = RankExperts(index, served, plans, device)
        self.progress = Progress()
        self.meter: LoadMeter | None = None
        self._position = {layer: at for at, layer in enumerate(served.layers)}
        self._warm: set[tuple[KernelSpec, Arrivals]] = set()
        self._grouped: set[tuple[Format, tuple[int, int, int, int]]] = set()  # whose kernels are warm
        self._dispatchers = RankDispatchers(CostBook(costing), self._dispatch_spec)
        self._graphs = StepGraphs(served.graph_rows, device)
        self._book: AddressBook | None = None
        self._epoch: Epoch | None = None  # as it was loaded last
        self._number = 0  # of the last step since the dispatchers were built
        self._choices_warm = False
        self._recorded: dict[Hashable, _Made] = {}  # by graph
        self._rows = ExpertRows(len(served.layers))
        self._gates: dict[int, tuple[Gate, Gate]] = {}  # by layer: as it is stored, and on the device

    @property
    def epoch(self) -> Epoch:
        """The epoch that was loaded last. Raises RuntimeError before `load`."""
        if self._epoch is None:
            raise RuntimeError(f"rank {self.index} has loaded no experts; call load and join before step")
        return self._epoch

    @property
    def member(self) -> Member:
        """What this is in its group: its lane, and its owner's place. Raises RuntimeError before `load`."""
        return self.epoch.members.at(self.index)

    @property
    def _place(self) -> Place:
        return Place.at(self.epoch, self.index, self.device)

    def load(self, epoch: Epoch, progress: LayerProgress = iter) -> None:
        """Reads what `epoch` gives this member and it does not hold, from disk, and prepares it.

        After the first load it is ready for the next: what steps run alone is warm.
        """
        self._epoch = epoch
        self.experts.load(epoch, progress)
        if self._book is None or self.meter is None:
            self._book = AddressBook(
                epoch.placement, self.device, self.served.replica_choice, self.member.lane or 0
            )
            sizes = (len(self.served.layers), epoch.placement.experts, epoch.placement.slots.shape[1])
            self.meter = LoadMeter(sizes, self.device)
        self._book.update(epoch.placement)
        for position in range(epoch.placement.layers):
            self.meter.moved(position)
        self.warm()
        release_cached(self.device)  # what loading and the largest warm batch took

    def warm(self) -> None:
        """Runs what a step runs alone, once for every size it may have, so that no step waits for a compiler.

        On the CPU there is nothing to compile. `load` ends with it: no other member is waited for. A rank
        that is alone runs whole steps when it has joined.
        """
        if self.device == "cpu" or self._book is None or self.meter is None:
            return
        started, before = time.perf_counter(), len(self._warm)
        for layer, plan in self._planned.items() if self._place.held else ():
            for arrivals in {
                Arrivals.over(span, plan, self.experts.bank[layer].slots) for span in plan.fitting
            }:
                key = (self.experts.kernel_spec(plan), arrivals)
                if key not in self._warm:
                    warm(self.experts.kernels[layer], self.experts.bank[layer], arrivals)
                    self._warm.add(key)
        if len(self._warm) > before or not self._choices_warm:
            kernels, self._choices_warm = time.perf_counter(), True
            if self.member.lane is not None:
                self._warm_choices(self._book, self.meter)
            text = "rank %d: its kernels are warm in %.1f s, choices and routing in %.1f s"
            log.info(text, self.index, kernels - started, time.perf_counter() - kernels)

    def _warm_choices(self, book: AddressBook, meter: LoadMeter) -> None:
        """What a step does with its rows' choices and logits before they leave this member."""
        served, device = self.served, self.device

        def addressing(rows: int) -> StepAddressing:
            return StepAddressing(0, book, meter, rows)

        warm_choices(served, addressing, device)
        for layer in {numbers_of(self.experts.gate(layer)): layer for layer in served.layers}.values():
            warm_routing(self._gate_here(layer), (torch.float32, served.dtype), addressing(1), device)

    def _warm_grouping(self) -> None:
        """Groups and weighs rows where a dispatcher that serves leaves that to the kernels of `permute`."""
        slots = self._place.held
        if self.device == "cpu" or not slots:
            return
        wanted = {
            (span.wire, (plan.problem.top_k, plan.problem.shape.hidden, slots, plan.kernel.row_align))
            for plan in self.plans.values()
            for span in plan.dispatchers
            if span.dispatcher.grouping is Grouping.RAGGED and span.dispatcher.permutes
        }
        started = time.perf_counter()
        for wire, sizes in wanted - self._grouped:
            warm_grouping(wire, sizes, self.served.dtype, self.device)
        if wanted - self._grouped:
            log.info("rank %d: grouping rows is warm in %.1f s", self.index, time.perf_counter() - started)
        self._grouped |= wanted

    def _warm_steps(self) -> None:
        """Whole steps of the first layer of every plan, where this rank is the only member.

        They are numbered below every step of a service.
        """
        lane = self.member.lane
        if self.device == "cpu" or len(self.epoch.members) > 1 or lane is None:
            return
        started, done = time.perf_counter(), 0
        for layer in {id(plan): layer for layer, plan in reversed(self.plans.items())}.values():

            def run(rows: LaneRows, layer: int = layer) -> Tensor:
                return self.step(layer, rows, (*(0,) * lane, rows.hidden.shape[0]))[0]

            recorded = min(self._graphs.most_rows, self.plans[layer].problem.lane_rows)
            done += warm_steps(run, self.served, self._gate_here(layer), recorded)
        if self._number >= FIRST_NUMBER:
            raise RuntimeError(f"rank {self.index}: {done} warm steps; a service's begin at {FIRST_NUMBER}")
        log.info("rank %d: %d steps warmed it in %.1f s", self.index, done, time.perf_counter() - started)

    def adopt(self, epoch: Epoch, position: int) -> None:
        """The layer at `position` has been committed: from the next step on it is `epoch`'s."""
        if self._book is None or self.meter is None:
            raise RuntimeError(f"rank {self.index} has loaded no experts")
        self._epoch = epoch
        self.experts.adopt(epoch, position)
        self._book.update_layer(position, epoch.placement.slots[position])
        self.meter.moved(position)

    def join(self, group: ProcessGroup | None = None) -> None:
        """Builds the dispatchers over `group`, of this epoch's members by position; None: this one is alone.

        Layers of the same sizes share one. The group stays its owner's, who ends it after `leave`. Collective
        over it. Where several could serve and the configuration asks for it, they are measured first.
        """
        self.leave()
        self._number = 0
        self.plans = self._dispatchers.join(self._planned, group)
        self._warm_grouping()
        self._warm_steps()
        release_cached(self.device)

    def leave(self) -> None:
        """Closes the dispatchers, and drops the graphs that use them."""
        self._graphs, self._recorded = StepGraphs(self.served.graph_rows, self.device), {}
        self._dispatchers.leave()

    def exclude(self, seats: Collection[int]) -> None:
        """Waits for no member of `seats` any more, also in the step under way; none is late for it."""
        self._dispatchers.exclude(seats)

    def interrupt(self) -> None:
        """No dispatcher waits for another member any more: the group has ended. From any thread."""
        self._dispatchers.interrupt()

    def late(self, layer: int) -> tuple[int, ...]:
        """Seats whose rows the last steps of `layer` went without; to be asked once an answer is on the host.

        Raises RuntimeError as `check_waits` does, and PeersLate as `RankDispatchers.late` does.
        """
        check_waits()
        return self._dispatchers.late(layer)

    def step(
        self, layer: int, rows: LaneRows, lane_rows: tuple[int, ...], number: int | None = None
    ) -> tuple[Tensor, Phases]:
        """Runs one layer's step; collective over the members that take part: owners, and lanes with rows.

        `rows` are this lane's: hidden states of the served dtype, and final weights or what the layer's gate
        takes; a member without a lane brings none. `lane_rows` counts every lane's, by lane; lanes at the end
        that are only reserved may be left out. `number` is the step's, alike on all who take part, and rises.
        Without one, steps are counted here since `join`, and then every member must call every step; one that
        has no part in it returns at once.

        Returns the mixed expert output `[T, H]` of the served dtype, and what the step took. Raises
        ValueError for logits as `Gate.route` does, before the others are met, and for a number that does not
        rise.
        """
        if self._book is None or self.meter is None:
            raise RuntimeError(f"rank {self.index} has loaded no experts; call load and join before step")
        if isinstance(rows, LaneLogits):
            self._gate_here(layer).check(rows.logits)
        number = self._numbered(number)
        self.progress.begin(number)
        lane_rows += (0,) * (self.epoch.members.max_lanes - len(lane_rows))
        fullest, member = max(lane_rows), self.member
        if member.owner is None and not (member.lane is not None and lane_rows[member.lane]):
            return self._absent(layer, fullest)
        self.meter.tick(time.monotonic())
        timed = self.device != "cpu" and number >= FIRST_NUMBER and number % TIMED_EVERY == 0
        launch = _Launch(layer, lane_rows, fullest, number, timed)
        if self._recordable(layer, fullest):
            answer, made = self._replayed(launch, rows)
        else:
            answer, made = self._launched(launch, rows.to(self.device))
        self.progress.enter(Phase.DEVICE)
        if self.device != "cpu":
            self._rows.take(self._position[layer], made.counts)
        return answer, made.phases

    def count(self) -> None:
        """Counts the rows of the last step's experts on the device. Best called when its answer is on its
        way; the next step does it otherwise.
        """
        self._rows.count()

    def rows_computed(self) -> RowsReading | None:
        """Rows that this member's experts computed since the start, as the device counted them; None before
        the first step, and on a CPU, where each step tells its own.
        """
        return self._rows.reading()

    def room(self, layer: int, lane_rows: tuple[int, ...]) -> StepRoom:
        """Device memory for this lane's rows of the next step, to be filled and given to `step` at once.

        `lane_rows` as in `step`. It has padded rows more where the step is a graph.
        """
        lane, top_k = self.member.lane, self.plans[layer].problem.top_k
        own, fullest = 0 if lane is None else lane_rows[lane], max(lane_rows)
        hidden, dtype = self.served.checkpoint.hidden, self.served.dtype
        if self._recordable(layer, fullest):
            return self._graphs.room(padded_rows(fullest), (hidden, top_k), dtype)
        return StepRoom.of(torch.empty((own, hidden), dtype=dtype, device=self.device), top_k)

    def _numbered(self, number: int | None) -> int:
        """The number of the next step. Raises ValueError where it does not rise."""
        following = self._number + 1
        if number is not None and number < following:
            raise ValueError(
                f"rank {self.index}: step {number} comes after step {self._number}; numbers rise"
            )
        self._number = following if number is None else number
        return self._number

    def _absent(self, layer: int, fullest: int) -> tuple[Tensor, Phases]:
        """A step that this member has no part in: it launches nothing."""
        plan, served = self.plans[layer], self.served
        none = empty_input(plan.problem.shape.hidden, plan.problem.top_k, served.dtype).hidden
        name = plan.span(fullest).dispatcher.name
        return none.to(self.device), Phases(0.0, 0.0, 0.0, 0, 0, 0, name)

    def _recordable(self, layer: int, fullest: int) -> bool:
        """Whether a step of these rows is a graph: small, on a GPU, with a dispatcher that reads no count."""
        plan, rows = self.plans[layer], padded_rows(fullest)
        fits = rows <= min(self._graphs.most_rows, plan.problem.lane_rows)
        return self.device != "cpu" and fits and not plan.span(rows).dispatcher.host_sync

    def _gate_here(self, layer: int) -> Gate:
        """The gate of `layer`, its bias on the device; graphs that hold one of other weights are dropped."""
        stored = self.experts.gate(layer)
        source, here = self._gates.get(layer, (None, stored))
        if source is not stored:
            if source is not None:
                self._graphs.forget(layer)
            here = replace(stored, bias=None if stored.bias is None else stored.bias.to(self.device))
            self._gates[layer] = stored, here
        return here

    def _replayed(self, launch: _Launch, rows: LaneRows) -> tuple[Tensor, _Made]:
        """One step from its graph. The host's seconds are told as one phase, and the bytes as recorded."""
        assert self.meter is not None
        lap, layer, made = _stopwatch(), launch.layer, list[_Made]()
        kind = self.meter.metering.phase(launch.fullest), launch.timed
        absent = absent_lanes(self.epoch.members, launch.lane_rows)
        step = GraphStep(layer, kind, launch.lane_rows, absent, self.member.lane is not None)

        def launched(inputs: LaneRows, lanes: tuple[int, ...]) -> Tensor:
            answer, one = self._launched(launch._replace(lane_rows=lanes), inputs)
            made.append(one)
            return answer

        def before_replay() -> None:
            self._dispatchers.expect(layer, step.padded, (launch.number, absent))

        answer = self._graphs.run(step, rows, launched, before_replay)
        graph = (layer, step.padded, step.kind, type(rows), rows.hidden.dtype)
        if made:
            self._recorded[graph] = made[-1]
        sent, found = self._dispatchers.traffic_of_replayed(layer, step.padded), self._recorded[graph]
        phases = Phases(0.0, lap(), 0.0, -1, sent.dispatched, sent.combined, sent.dispatcher)
        return answer, _Made(replace(phases, timed=False, on_device=found.phases.on_device), found.counts)

    def _launched(self, launch: _Launch, rows: LaneRows) -> tuple[Tensor, _Made]:
        """One step, phase by phase; rows are metered as of a step with the fullest lane of `launch`."""
        assert self._book is not None and self.meter is not None
        layer, lane_rows = launch.layer, launch.lane_rows
        dispatcher, lap = self._dispatchers[layer], _stopwatch()
        times = DeviceTimes() if launch.timed else None
        mark = _nothing if times is None else times.mark
        mark()
        addressing = StepAddressing(self._position[layer], self._book, self.meter, launch.fullest)
        if isinstance(rows, LaneLogits):
            slots, weights = routed(self._gates[layer][1], rows.logits, rows.valid, addressing)
        else:
            slots, weights = addressed(Choices(rows.experts, rows.weights, rows.valid), addressing)
        hidden, weights = self._weigh_input(layer, rows.hidden, slots, weights)
        self.progress.enter(Phase.DISPATCH)
        arrived = dispatcher.dispatch(hidden, Routing(slots, weights, lane_rows, launch.number))
        dispatched = lap()
        mark()
        likely = self._taken_rows(lane_rows) * slots.shape[1] / self._book.room
        self.progress.enter(Phase.EXPERTS)
        outputs = self.experts.compute(layer, replace(arrived.batch, likely=likely))
        computed = lap()
        mark()
        self.progress.enter(Phase.COMBINE)
        answer = dispatcher.combine(outputs, arrived.ticket)
        combined = lap()
        mark()
        expert_rows = int(arrived.batch.counts.sum()) if self.device == "cpu" else -1
        sent = self._dispatchers.traffic_of_launched(layer, max(lane_rows))
        bytes_sent = (sent.dispatched, sent.combined)
        phases = Phases(dispatched, computed, combined, expert_rows, *bytes_sent, sent.dispatcher)
        on_device = None if times is None else times.seconds
        phases = replace(phases, timed=self.device == "cpu", on_device=on_device)
        return answer, _Made(phases, arrived.batch.counts)

    def _taken_rows(self, lane_rows: tuple[int, ...]) -> int:
        """Rows of lanes that a member has; those of reserved ones are only room in a graph."""
        taken = self.epoch.members.seat_of_lane
        return sum(rows for rows, seat in zip(lane_rows, taken, strict=True) if seat is not None)

    def held_bytes(self) -> dict[str, int]:
        """Bytes of its device by each of `PURPOSES`; from any thread."""
        return held_bytes(self.experts.bank, self._dispatchers.buffer_bytes, self.device, self._graphs.pool)

    def load_reading(self) -> Reading:
        """What this rank's lane sent, by phase, served layer, expert and slot; waits for steps under way."""
        if self.meter is None:
            raise RuntimeError(f"rank {self.index} has loaded no experts")
        return self.meter.snapshot(time.monotonic()).read()

    def _weigh_input(
        self, layer: int, hidden: Tensor, slots: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Weights the input where the model does so (top-1); the rows then travel with weight 1."""
        if not self.served.checkpoint.gate(layer).weight_on_input:
            return hidden, weights
        scale = weights.sum(dim=1, keepdim=True)  # top-1 after merging: one weight a row
        return hidden * scale.to(hidden.dtype), (slots != EMPTY).to(weights.dtype)

    def _dispatch_spec(self, plan: Plan, span: DispatchSpan) -> DispatchSpec:
        return dispatch_spec(self.served, plan, span, self._place)


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
