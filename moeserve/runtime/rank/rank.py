"""`Rank`: one member's experts, dispatcher and step, as a plain class without Ray or gRPC.

A launcher gives it a seat in a group; a model server may as well host it in its own process (torchrun) and
call `step` directly, with no hop at all. A rank holds experts and brings rows. A member that does only one of
both is served by the same class: without an owner's place it loads no experts and runs no kernel, without a
lane it brings no rows and gets none back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moeserve.device.waits import check_waits
from moeserve.dispatch.dispatcher import DispatchSpec, Living
from moeserve.dispatch.members import Member
from moeserve.experts.batch import Tally
from moeserve.experts.routing.address_book import AddressBook
from moeserve.experts.routing.choices import StepAddressing
from moeserve.experts.routing.meter import LoadMeter, Reading
from moeserve.runtime.control.reached import Phase, Progress
from moeserve.runtime.epoch import Epoch
from moeserve.runtime.planning.costing import TABLE_ORDER, CostBook, Costing
from moeserve.runtime.planning.layers import Place, dispatch_spec
from moeserve.runtime.planning.plan import DispatchSpan, Plan
from moeserve.runtime.rank.all2all import RankDispatchers
from moeserve.runtime.rank.experts import LayerProgress, RankExperts
from moeserve.runtime.rank.graphs import padded_rows
from moeserve.runtime.rank.host_threads import HostThreads
from moeserve.runtime.rank.measured import TIMED_EVERY, ExpertRows, RowsReading
from moeserve.runtime.rank.memory import RunsHeld, held_bytes, release_cached
from moeserve.runtime.rank.runner import Launch, StepRunner
from moeserve.runtime.rank.transfers.step_room import StepRoom
from moeserve.runtime.rank.warm.warming import Warming
from moeserve.runtime.served import Served
from moeserve.runtime.step import FIRST_NUMBER, LaneLogits, LaneRows, Phases, empty_input


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
        self._dispatchers = RankDispatchers(CostBook(costing), self._dispatch_spec)
        self._rows = ExpertRows(len(served.layers))
        self._runner = StepRunner(served, device, self.experts, self._dispatchers, self.progress, self._rows)
        self._warming = Warming(index, served, device, self.experts, self._runner.gate)
        self._book: AddressBook | None = None
        self._epoch: Epoch | None = None  # as it was loaded last
        self._number = 0  # of the last step since the dispatchers were built
        self._joins = 0  # groups that it was in
        self.timed_every = TIMED_EVERY  # of so many steps of a service a device times one
        self.host_threads: HostThreads | None = None  # of a process of its own: as many as pay compute a step
        self.runs_held: Callable[[], RunsHeld] = RunsHeld  # what runs of callers' GPUs hold of its device

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
        self.served.checkpoint.unmap()
        release_cached(self.device)  # what loading and the largest warm batch took

    @property
    def loaded(self) -> bool:
        """Whether it holds experts of some epoch."""
        return self._book is not None

    def take(self, epoch: Epoch) -> tuple[int, ...]:
        """Goes over to `epoch` and reads nothing. Returns the positions of layers whose slots do not hold yet
        what it says; `experts.restore` fills them. Raises RuntimeError before `load`.
        """
        if self._book is None or self.meter is None:
            raise RuntimeError(f"rank {self.index} has loaded no experts")
        self._epoch = epoch
        self.experts.use(epoch)
        self._book.update(epoch.placement)
        for position in range(epoch.placement.layers):
            self.meter.moved(position)
        return self.experts.missing(epoch)

    def warm(self) -> None:
        """Runs what a step runs alone, once for every size it may have, so that no step waits for a compiler.

        On the CPU there is nothing to compile. `load` ends with it: no other member is waited for. A rank
        that is alone runs whole steps when it has joined.
        """
        book, meter = self._book, self.meter
        if book is None or meter is None:
            return

        def addressing(rows: int) -> StepAddressing:
            return StepAddressing(0, book, meter, rows)

        brings = self.member.lane is not None
        self._warming.before_joining(self._planned, self._place.held, addressing if brings else None)

    def adopt(self, epoch: Epoch, position: int) -> None:
        """The layer at `position` has been committed: from the next step on it is `epoch`'s."""
        if self._book is None or self.meter is None:
            raise RuntimeError(f"rank {self.index} has loaded no experts")
        self._epoch = epoch
        self.experts.adopt(epoch, position)
        self._book.update_layer(position, epoch.placement.slots[position])
        self.meter.moved(position)

    def join(self, group: ProcessGroup | None = None, generation: int = 0) -> None:
        """Builds the dispatchers over `group`, of this epoch's members by position; None: this one is alone.
        generation: the group's, as `free` has it; 0: what was built before is closed.

        Layers of the same sizes share one. The group stays its owner's, who ends it after `leave`. Collective
        over it. Where several could serve and the configuration asks for it, they are measured first.
        """
        self.leave(keep=bool(generation))
        self._number = 0
        self.plans = self._dispatchers.join(self._planned, group, generation)
        self._warming.grouping(self.plans, self._place.held)
        self._warm_steps()
        self._joins += 1
        release_cached(self.device)

    def _warm_steps(self) -> None:
        """Whole steps of every size, where this rank is the only member; numbered below a service's steps."""
        lane = self.member.lane
        if len(self.epoch.members) > 1 or lane is None:
            return

        def run(layer: int, rows: LaneRows) -> Tensor:
            return self.step(layer, rows, (*(0,) * lane, rows.hidden.shape[0]))[0]

        recorded = self._runner.graphs.most_rows if not self._joins else 0  # else callers wait meanwhile
        self._warming.steps(self.plans, run, recorded)
        if self._number >= FIRST_NUMBER:
            raise RuntimeError(
                f"rank {self.index}: {self._number} warm steps; a service's begin at {FIRST_NUMBER}"
            )

    def leave(self, *, keep: bool = False) -> None:
        """Closes the dispatchers, and drops the graphs that use them. `keep`: what other members may still
        write to stays, until `free`.
        """
        self._runner.drop_graphs()
        self._dispatchers.leave()
        if not keep:
            self._dispatchers.free()

    def free(self, but: Collection[int] = ()) -> None:
        """Frees what `leave` has kept, as `RankDispatchers.free`."""
        self._dispatchers.free(but)

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
        self,
        layer: int,
        rows: LaneRows,
        lane_rows: tuple[int, ...],
        number: int | None = None,
        *,
        lent: bool = False,
        place: Tensor | None = None,
    ) -> tuple[Tensor, Phases]:
        """Runs one layer's step; collective over the members that take part: owners, and lanes with rows.

        `rows` are this lane's: hidden states of the served dtype, and final weights or what the layer's gate
        takes; a member without a lane brings none. `lane_rows` counts every lane's, by lane; lanes at the end
        that are only reserved may be left out. `number` is the step's, alike on all who take part, and rises.
        Without one, steps are counted here since `join`, and then every member must call every step; one that
        has no part in it returns at once.

        Returns the mixed expert output `[T, H]` of the served dtype, and what the step took. lent: the output
        may lie in memory that the next step writes to; without it, it is a tensor of its own. place: `[T, H]`
        of the served dtype on the device, where a step that is no graph writes the output; on a CPU none is.
        Raises ValueError for logits as `Gate.route` does, before the others are met, and for a number that
        does not rise.
        """
        if self._book is None or self.meter is None:
            raise RuntimeError(f"rank {self.index} has loaded no experts; call load and join before step")
        if isinstance(rows, LaneLogits):
            self._runner.gate(layer).check(rows.logits)
        number = self._numbered(number)
        self.progress.begin(number)
        lane_rows += (0,) * (self.epoch.members.max_lanes - len(lane_rows))
        fullest, member = max(lane_rows), self.member
        if member.owner is None and not (member.lane is not None and lane_rows[member.lane]):
            return self._absent(layer, fullest)
        self.meter.tick(time.monotonic())
        timed = self.device != "cpu" and number >= FIRST_NUMBER and number % self.timed_every == 0
        addressing = StepAddressing(self._position[layer], self._book, self.meter, fullest)
        brings = member.lane is not None
        launch = Launch(layer, lane_rows, addressing, self.epoch.members, brings, number, timed)
        if self._recordable(layer, fullest):
            answer, made = self._runner.replay(launch, rows, lent=lent)
        else:
            answer, made = self._runner.launch(launch, rows.to(self.device), place)
        self.progress.enter(Phase.DEVICE)
        if self.device != "cpu" and made.counts is not None:
            self._rows.take(self._position[layer], made.counts)
        return answer, made.phases

    def record(
        self,
        layer: int,
        rows: LaneRows,
        lane_rows: tuple[int, ...],
        then: Callable[[Tensor, Tally | None], None] | None = None,
        number: int = 0,
    ) -> Tensor:
        """One step as a part of a CUDA graph that the caller records: it runs when the graph is replayed,
        after `expect` has said so. Collective over the graph's replays.

        then: queues what is done with the answer, and counts the step's rows, as of a service; the host of a
        CPU has counted them, and the tally is None.
        number: of the step where nothing is recorded, and it runs at once: one of `numbers`.

        `lane_rows` are those of each replay, by lane and alike on all members; `rows` are on the device, and
        those that are none are not valid. Returns `[T, H]` in the graph's memory. Raises ValueError where
        what carries so many rows reads a count on the host, and for logits as `Gate.route` does.
        """
        if self._book is None or self.meter is None:
            raise RuntimeError(f"rank {self.index} has loaded no experts; call load and join before record")
        fullest = max(lane_rows)
        carries = self.plans[layer].span(fullest).dispatcher
        if carries.host_sync:
            raise ValueError(
                f"layer {layer}: {carries.name} reads a count on the host, and cannot be in a CUDA graph; "
                "set plan.all2all_backend to one that does not, such as nvlink_ll"
            )
        if isinstance(rows, LaneLogits):
            self._runner.gate(layer).check(rows.logits)
        addressing = StepAddressing(self._position[layer], self._book, self.meter, fullest)
        members = self.epoch.members
        launch = Launch(layer, lane_rows, addressing, members, brings=True, number=number, timed=False)
        answer, made = self._runner.launch(launch, rows)
        if then is not None:
            assert made.counts is not None
            tally = None if self.device == "cpu" else self._rows.tally(self._position[layer], made.counts)
            then(answer, tally)
        return answer

    def expect(
        self, steps: Sequence[tuple[int, int]], number: int | None = None, absent: tuple[int, ...] = ()
    ) -> None:
        """Says, right before, that a graph with these recorded steps is replayed next on the current stream:
        the layer of each, and its rows a lane. Alike on all members that take part.

        number: of the first, as in `step`. absent: lanes of the graph that launch nothing in it.
        """
        if self.meter is None or not steps:
            return
        number = self._numbered(number)
        self._dispatchers.expect_steps(steps, number, absent)
        self._number += len(steps) - 1
        self.meter.tick(time.monotonic())

    def numbers(self, steps: Sequence[tuple[int, int]], number: int) -> tuple[int, ...]:
        """Takes the numbers of a run whose steps are launched next, one by one: `number` and those after it.
        Returns each step's, as a graph of them counts, which other members may replay instead.
        """
        first = self._numbered(number)
        self._number += len(steps) - 1
        return self._dispatchers.numbers(steps, first)

    def living(self, layer: int, rows: int) -> Living | None:
        """Words of whom a step of `layer`, of `rows` rows a lane, waits for, as `Dispatcher.living`."""
        return self._dispatchers.living(layer, rows)

    def count(self) -> None:
        """Counts the rows of the last step's experts on the device, where its graph has not. Best called when
        its answer is on its way; the next step does it otherwise.
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
        room = self._runner.room(layer, lane_rows, lambda: self._graphs_room(layer, max(lane_rows)))
        if room is not None:
            return room
        lane, top_k = self.member.lane, self.plans[layer].problem.top_k
        hidden, dtype = self.served.checkpoint.hidden, self.served.dtype
        own = 0 if lane is None else lane_rows[lane]
        return StepRoom.of(torch.empty((own, hidden), dtype=dtype, device=self.device), top_k)

    def _graphs_room(self, layer: int, fullest: int) -> StepRoom | None:
        if not self._recordable(layer, fullest):
            return None
        widths = self.served.checkpoint.hidden, self.plans[layer].problem.top_k
        return self._runner.graphs.room(padded_rows(fullest), widths, self.served.dtype)

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
        fits = rows <= min(self._runner.graphs.most_rows, plan.problem.lane_rows)
        return self.device != "cpu" and fits and not plan.span(rows).dispatcher.host_sync

    def held_bytes(self) -> dict[str, int]:
        """Bytes of its device by each of `PURPOSES`; from any thread."""
        return held_bytes(
            self.experts.bank,
            (self._dispatchers.buffer_bytes, self._dispatchers.kept_bytes),
            self.device,
            self._runner.graphs.pool,
            self.runs_held(),
        )

    def load_reading(self) -> Reading:
        """What this rank's lane sent, by phase, served layer, expert and slot; waits for steps under way."""
        if self.meter is None:
            raise RuntimeError(f"rank {self.index} has loaded no experts")
        return self.meter.snapshot(time.monotonic()).read()

    def _dispatch_spec(self, plan: Plan, span: DispatchSpan) -> DispatchSpec:
        return dispatch_spec(self.served, plan, span, self._place)
