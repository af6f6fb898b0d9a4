"""`RankDispatchers`: what carries every layer's rows on one rank, in one generation of its group."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, Protocol

from torch.distributed import ProcessGroup

from moeserve.dispatch.by_rows import ByRows
from moeserve.dispatch.dispatcher import Dispatcher, DispatchSpec, Living, Traffic
from moeserve.dispatch.peers.memory import left_over
from moeserve.runtime.control.messages import ANY_GENERATION
from moeserve.runtime.planning.costing import CostBook
from moeserve.runtime.planning.plan import DispatchSpan, Plan
from moeserve.runtime.sections import FAIL

log = logging.getLogger(__name__)

DispatcherKey = tuple[str, str]
"""The names of a dispatcher and its wire."""

SpecOf = Callable[[Plan, DispatchSpan], DispatchSpec]
"""What this rank builds the dispatcher of a plan's range for."""


class PeersLate(RuntimeError):
    """A step has no right answer: it went without the rows of members that were late; names their seats."""


class Closes(Protocol):
    """A dispatcher, or what is left of one that was not built."""

    def close(self) -> None:
        """Frees what it holds."""


class StepTraffic(NamedTuple):
    """The dispatcher that carried a step, and the bytes that left for other ranks."""

    dispatcher: str
    dispatched: int
    combined: int


class RankDispatchers:
    """The dispatchers of every layer: `join` builds them over a process group, `leave` closes them."""

    def __init__(self, costs: CostBook, spec_of: SpecOf) -> None:
        self._costs, self._spec_of = costs, spec_of
        self._built: dict[tuple[str, DispatchSpec], Dispatcher] = {}
        self._generation = 0  # of which those are
        self._kept: list[tuple[int, Closes]] = []  # of generations before: members may still write there
        self._nbytes: dict[Closes, int] = {}  # of the device, that each of all these holds, where known
        self._of_layer: dict[int, Dispatcher] = {}
        self._parts: dict[tuple[int, DispatcherKey], Dispatcher] = {}  # by layer, and dispatcher and wire
        self._specs: dict[int, DispatchSpec] = {}  # of each layer's last range
        self._plans: dict[int, Plan] = {}
        self._counted: dict[Dispatcher, Traffic] = {}  # what each had sent when last asked
        self._launched: dict[tuple[int, int], StepTraffic] = {}  # by layer and rows, the last
        self._late: set[int] = set()  # seats that these dispatchers do not wait for any more
        self._interrupted = False  # nobody is waited for any more, and nobody is named for that

    def __getitem__(self, layer: int) -> Dispatcher:
        """What carries the rows of `layer` (decoder index). KeyError before `join`."""
        return self._of_layer[layer]

    def join(
        self, planned: dict[int, Plan], group: ProcessGroup | None, generation: int = 0
    ) -> dict[int, Plan]:
        """Builds the dispatchers, one for layers of the same sizes; returns the plans as they are served.

        Collective over `group`, of that generation; None: this member is alone. Where several could serve and
        the configuration asks for it, they are measured first.
        """
        self.leave()
        self._interrupted, self._generation = False, generation
        try:
            self._build(planned, group)
        finally:
            for memory in left_over():
                self._kept.append((generation, memory))
                self._nbytes[memory] = memory.nbytes
        return self._plans

    def _build(self, planned: dict[int, Plan], group: ProcessGroup | None) -> None:
        self._plans = self._costs.choose(planned, self._spec_of, group)
        for layer, plan in self._plans.items():
            for span in plan.dispatchers:
                self._parts[layer, span.key] = self._part(plan, span, group)
            self._specs[layer] = self._spec_of(plan, plan.dispatchers[-1])
            ranges = [(span.up_to, self._parts[layer, span.key]) for span in plan.dispatchers]
            self._of_layer[layer] = ranges[0][1] if len(ranges) == 1 else ByRows(ranges)

    def _part(self, plan: Plan, span: DispatchSpan, group: ProcessGroup | None) -> Dispatcher:
        """The dispatcher of one range, built for the most rows of any range that it serves."""
        fullest = {other.key: other for other in plan.dispatchers}[span.key]  # the last range of each
        spec = self._spec_of(plan, fullest)
        key = (span.dispatcher.name, spec)
        if key not in self._built:
            self._built[key] = span.dispatcher.build(spec, group)
            known = span.dispatcher.buffer_bytes
            self._nbytes[self._built[key]] = 0 if known is None else known(spec)
        return self._built[key]

    def leave(self) -> None:
        """Lets go of the dispatchers of every layer. What other members may still write to is kept until
        `free`, since they have yet to leave, or to end.
        """
        while self._built:
            key = next(iter(self._built))
            dispatcher = self._built[key]
            if dispatcher.part():
                self._kept.append((self._generation, dispatcher))
            else:
                del self._nbytes[dispatcher]
            del self._built[key]
        self._of_layer, self._parts, self._specs = {}, {}, {}
        self._counted, self._launched, self._late = {}, {}, set()

    def free(self, but: Collection[int] = ()) -> None:
        """Frees what was kept of all generations but these, of which somebody has yet to end. ANY_GENERATION
        among them: of none.
        """
        if ANY_GENERATION in but:
            return
        for one in [one for one in self._kept if one[0] not in but]:
            one[1].close()
            self._kept.remove(one)
            del self._nbytes[one[1]]

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the device that all dispatchers hold, as far as it is known. From any thread."""
        return sum(dict(self._nbytes).values()) - self.kept_bytes

    @property
    def kept_bytes(self) -> int:
        """Bytes that are kept of generations before. From any thread."""
        nbytes = dict(self._nbytes)
        return sum(nbytes.get(one, 0) for _, one in list(self._kept))

    def interrupt(self) -> None:
        """Ends every dispatcher's waits for other ranks: the group has ended, and no step has an answer any
        more, as `late` says. From any thread.
        """
        self._interrupted = True  # before a wait ends, whose step then goes on without rows
        for dispatcher in list(self._built.values()):
            dispatcher.interrupt()

    def exclude(self, seats: Collection[int]) -> None:
        """Ends every dispatcher's waits for the members of `seats`; steps go on without their rows.

        They are late for no step from now on, also if they were before.
        """
        for dispatcher in list(self._built.values()):
            dispatcher.exclude(seats)
        self._late -= set(seats)

    def expect(self, layer: int, rows: int, step: tuple[int, tuple[int, ...]]) -> None:
        """Says that a graph of `layer`, of `rows` rows a lane, is replayed next as `step`: its number, and
        the lanes of the graph that launch nothing in it.
        """
        number, absent = step
        self._carrier(layer, rows).expect(number, absent)

    def expect_steps(
        self, steps: Sequence[tuple[int, int]], number: int, absent: tuple[int, ...] = ()
    ) -> None:
        """Says that a graph is replayed next that holds these steps, by layer and rows a lane: as `number`
        and those after it. Each dispatcher counts on by itself from the first of them that it carries.
        absent: lanes of the graph that launch nothing in it.
        """
        for part, first in self._firsts(steps, number).items():
            part.expect(first, absent)

    def numbers(self, steps: Sequence[tuple[int, int]], number: int) -> tuple[int, ...]:
        """What each step has for its number where these are launched and not replayed, as `number` and those
        after it: as a graph of them counts, which other members may replay.
        """
        upcoming, found = self._firsts(steps, number), list[int]()
        for layer, rows in steps:
            part = self._carrier(layer, rows)
            found.append(upcoming[part])
            upcoming[part] += 1
        return tuple(found)

    def _firsts(self, steps: Sequence[tuple[int, int]], number: int) -> dict[Dispatcher, int]:
        """The number of the first step that each dispatcher carries."""
        firsts: dict[Dispatcher, int] = {}
        for at, (layer, rows) in enumerate(steps):
            firsts.setdefault(self._carrier(layer, rows), number + at)
        return firsts

    def _carrier(self, layer: int, rows: int) -> Dispatcher:
        return self._parts[layer, self._plans[layer].span(rows).key]

    def living(self, layer: int, rows: int) -> Living | None:
        """Words of whom a step of `layer`, of `rows` rows a lane, waits for, as `Dispatcher.living`."""
        return self._carrier(layer, rows).living

    def late(self, layer: int) -> tuple[int, ...]:
        """Seats whose rows the last steps of `layer` went without; to be asked once an answer is on the host.

        Raises PeersLate, naming them, where the configuration says that a step fails without them, and from
        then on for every step until the dispatchers are built anew: nobody waits for those members any more.
        So it does after `interrupt`.
        """
        if self._interrupted:
            raise PeersLate(
                f"layer {layer}: the group has ended, and rows of others may not be in the answer"
            )
        late = self._of_layer[layer].late()
        self._late.update(late)
        spec = self._specs[layer]
        waited = f"within {spec.patience:g} s"
        if self._late and spec.on_late == FAIL:
            raise PeersLate(f"layer {layer}: no rows of ranks {sorted(self._late)} {waited}")
        if late:
            log.warning("layer %d: goes on without rows of ranks %s, none %s", layer, list(late), waited)
        return late

    def traffic_of_launched(self, layer: int, rows: int) -> StepTraffic:
        """What a launched step of `layer` sent, whose fullest lane brought `rows`.

        What a dispatcher counts on the device may come with a later step.
        """
        span = self._plans[layer].span(rows)
        dispatcher = self._parts[layer, span.key]
        now = dispatcher.traffic
        dispatched, combined = now.since(self._counted.get(dispatcher, Traffic()))
        self._counted[dispatcher] = now
        self._launched[layer, rows] = StepTraffic(span.dispatcher.name, dispatched, combined)
        return self._launched[layer, rows]

    def traffic_of_replayed(self, layer: int, rows: int) -> StepTraffic:
        """What a replayed step sent. Where only a launch counts, as much as when its size was launched."""
        counted = self._carrier(layer, rows).counts_on_device
        return self.traffic_of_launched(layer, rows) if counted else self._launched[layer, rows]
