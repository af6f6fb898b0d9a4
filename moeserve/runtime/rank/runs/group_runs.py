"""`GroupRuns`: runs of a group of several members. The head orders them, and every owner launches each; one
that all others have left orders its own.

A member whose lane's caller has brought rows asks for a run. It comes to all who take part, in the
order of all steps: that member takes rows and posts answers, the others compute its steps without rows of
their own. Where the pass has ended meanwhile, that member computes them so, too: the others wait for it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

from moeserve.dispatch.mail.kernels import ABORT
from moeserve.runtime.control.reached import Phase
from moeserve.runtime.control.run_messages import (
    MOST_ASKED,
    AskedRun,
    OrderedRun,
    asked_message,
    ordered_from,
)
from moeserve.runtime.control.stream import Message
from moeserve.runtime.rank.all2all import PeersLate
from moeserve.runtime.rank.rank import Rank
from moeserve.runtime.rank.runs.blank_runs import BlankRuns
from moeserve.runtime.rank.runs.run_graphs import RunGraphs
from moeserve.runtime.rank.runs.runs import Flight, Run, Told
from moeserve.runtime.step import Moment

log = logging.getLogger(__name__)

Act = Callable[[], None]

ANEW = "the group forms anew"


class Pass(Protocol):
    """Whose run it is. One of its methods is called, once, for each run, from any thread."""

    def ran(self, told: Told, version: int) -> None:
        """The run has ended, with this version of the weights."""

    def lost(self, why: str) -> None:
        """It cannot be launched, or is lost on the way."""

    def other_weights(self, version: int) -> None:
        """It was not launched: its layers have this version of the weights."""


@dataclass(frozen=True, eq=False)
class OwnRun:
    """A run of a lane of this member, and whose it is. version: of the weights that it must have; 0: any."""

    run: Run
    of: Pass
    version: int


@dataclass(frozen=True, eq=False)
class _Launched:
    order: OrderedRun
    entry: Message
    steps: int  # of it that were launched: those behind them have other weights
    version: int
    event: Moment
    own: tuple[OwnRun, Flight] | None  # None: this member brought no rows


class GroupRuns:
    """One member's part in the runs of its group. `ask`, `serving` and `end` from any thread; `execute` by
    the thread that launches steps.

    finish: has an act done after the steps that were launched before.
    """

    def __init__(self, rank: Rank, finish: Callable[[Act], None], graphs: RunGraphs | None = None) -> None:
        self._rank, self._finish = rank, finish
        self.tell: Callable[[Message], None] = lambda message: None  # to the head
        self.failed: Callable[[Message, Exception], None] = _nobody_hears  # an entry, which others are in
        self.observe: Callable[[Sequence[int]], None] = lambda layers: None  # of steps that have ended
        self.launch: Callable[[Run, tuple[int, int], int], Flight] = _nothing_launches  # a lane's own run
        self.others: Act = lambda: None  # a run of another member has come
        self.flies: Act = lambda: None  # something was launched
        self.over: Callable[[Act], None] = lambda tell: tell()  # it has ended, and whose it was is told
        self.graphs = RunGraphs() if graphs is None else graphs
        self._blank = BlankRuns(rank, self.graphs)
        self._lock = threading.Lock()
        self._live = 0  # the generation in which runs are asked for; 0: none
        self._count = 0  # of runs that were asked for
        self._asked: dict[int, OwnRun] = {}  # that are not ordered yet

    @property
    def nbytes(self) -> int:
        """Of device memory for runs of other members, by any thread."""
        return self._blank.nbytes

    @property
    def live(self) -> bool:
        """Whether the group serves."""
        return self._live > 0

    def serving(self, generation: int) -> None:
        """The group serves in this generation; 0: it does no more."""
        self.end()
        with self._lock:
            self._live = generation

    def end(self) -> None:
        """The generation has ended: what was asked for in it never comes."""
        with self._lock:
            self._live, asked = 0, list(self._asked.values())
            self._asked = {}
        for own in asked:
            own.of.lost(ANEW)

    def ask(self, own: OwnRun) -> None:
        """Asks the head for a run. It is launched, or its pass is told why not."""
        with self._lock:
            live, many = self._live, len(self._asked) >= MOST_ASKED
            if live and not many:
                self._count += 1
                number = self._count
                self._asked[number] = own
        if not live or many:
            own.of.lost(f"{MOST_ASKED} runs of this rank wait for their turn" if live else ANEW)
            return
        layers = tuple(layer for layer, _ in own.run.steps)
        self.tell(asked_message(AskedRun(self._rank.index, number, layers, own.run.rows), live))

    def execute(self, entry: Message) -> None:
        """Launches a run that the head has ordered. Raises where it cannot: then nobody can go on."""
        order = ordered_from(entry)
        own = self._taken(order)
        if not order.number:
            if own is not None:
                own.of.lost(str(entry["why_not"]))
            return
        try:
            launched = self._launched(order, own, entry)
        except Exception as error:
            if own is not None:
                own.of.lost(f"it cannot be launched: {type(error).__name__}: {error}")
            raise
        self.flies()
        try:
            self._finish(lambda: self._ended(launched))
        except Exception as error:  # what was launched before does not end
            why = f"{type(error).__name__}: {error}"
            self.over(lambda: _lost(launched, why))
            raise

    def _taken(self, order: OrderedRun) -> OwnRun | None:
        """What this member asked for by this order, if it is its own."""
        if order.asked.seat != self._rank.index:
            self.others()
            return None
        with self._lock:
            return self._asked.pop(order.asked.run, None)

    def _launched(self, order: OrderedRun, own: OwnRun | None, entry: Message) -> _Launched:
        rank, asked = self._rank, order.asked
        epoch, served = rank.epoch, rank.served
        if epoch.number != order.epoch:
            raise RuntimeError(
                f"run {order.number} is of epoch {order.epoch}; this rank holds {epoch.number}"
            )
        versions = {layer: epoch.version(at) for at, layer in enumerate(served.layers)}
        first = versions[asked.layers[0]]
        steps = len(list(takewhile(lambda layer: versions[layer] == first, asked.layers)))  # alike on all
        rank.progress.begin(order.number)
        flight: Flight | None = None
        if own is not None and _wanted(own, first):
            run = own.run._replace(steps=own.run.steps[:steps])
            flight = self.launch(run, (epoch.number, first), order.number)
            event: Moment = flight.event
        else:
            lane = epoch.members.at(asked.seat).lane or 0
            event = self._blank.launch(asked.layers[:steps], asked.rows, lane, order.number)
        rank.progress.enter(Phase.DEVICE)
        brought = None if own is None or flight is None else (own, flight)
        return _Launched(order, entry, steps, first, event, brought)

    def _ended(self, launched: _Launched) -> None:
        number, layers = launched.order.number, launched.order.asked.layers[: launched.steps]
        try:
            launched.event.synchronize()
            for layer in dict.fromkeys(layers):
                self._rank.late(layer)  # raises where a member's sums are missing
            told = None if launched.own is None else launched.own[1].read()
        except Exception as error:
            if isinstance(error, PeersLate):  # as all that was under way when the group ended
                log.info("run %d has no answer: %s", number, error)
            else:
                log.exception("run %d failed", number)
            why = f"it failed: {type(error).__name__}: {error}"
            self.over(lambda: _lost(launched, why))
            self.failed(launched.entry, error)
            return
        self._rank.progress.end(number)
        self.tell({"kind": "done", "generation": launched.entry["generation"], "step": number})
        self.observe(layers if told is None else layers[: told.answered])
        self.over(lambda: _ran(launched, told))


def _wanted(own: OwnRun, version: int) -> bool:
    """Whether a run may still take rows; else whose it is has been told."""
    if own.run.lane.abort[0] == ABORT:
        own.of.lost("its pass was over before its turn came")
        return False
    if own.version not in (0, version):
        own.of.other_weights(version)
        return False
    return True


def _lost(launched: _Launched, why: str) -> None:
    if launched.own is not None:
        launched.own[0].of.lost(why)


def _ran(launched: _Launched, told: Told | None) -> None:
    if launched.own is not None and told is not None:
        launched.own[0].of.ran(told, launched.version)


def _nobody_hears(entry: Message, error: Exception) -> None:
    """Logs a failure that nobody takes."""
    log.error("a run of generation %s failed", entry["generation"], exc_info=error)


def _nothing_launches(run: Run, stamp: tuple[int, int], number: int) -> Flight:
    """Raises RuntimeError: this rank attaches no lanes of GPUs, and so asks for no runs."""
    raise RuntimeError(f"run {number} of {len(run.steps)} steps: this rank has no lanes of GPUs")
