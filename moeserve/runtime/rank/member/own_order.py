"""`OwnOrder`: the order of steps at a member that is alone in its group. A job need not travel to the head,
and its step back: two wake-ups of other processes, as much as many a step takes.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from moeserve.dispatch.members import Members
from moeserve.proto.host import sleep_finely
from moeserve.runtime.control.messages import header_from
from moeserve.runtime.control.own_steps import MOST_ENDED, OwnSteps, own_steps_message
from moeserve.runtime.control.run_messages import AskedRun, OrderedRun, refused_message, run_message
from moeserve.runtime.control.stream import Message
from moeserve.runtime.epoch import Epoch
from moeserve.runtime.ordering.sequencer import StepPace
from moeserve.runtime.ordering.step_order import StepOrder
from moeserve.runtime.step import Announcement, Header, Step

log = logging.getLogger(__name__)

TELL_SECONDS, SHORTEST_TELLING = 0.25, 0.01
"""Between two messages to the head while steps run: the first, or a quarter of what the head bears where that
is shorter, but no less than the second.
"""

REST_SECONDS = 1.0  # at most, for which the thread sleeps

KINDS = ("withdraw", "run", "done")
"""Messages to the head that are for whoever orders steps."""


class OwnOrder:
    """Orders the steps of this member while the generation lasts in which it is alone. Safe from any thread.

    put: takes an entry for the thread that launches steps. tell: tells the head; the caller holds no lock.
    """

    def __init__(self, seat: int, put: Callable[[Message], None], tell: Callable[[Message], None]) -> None:
        self._seat, self._put, self._tell = seat, put, tell
        self.pace: StepPace | None = None  # None: the head orders all steps
        self.late_seconds = math.inf  # for which the head bears that no step goes on
        self.on_company: Callable[[], None] = lambda: None  # others wait behind this member's runs
        self.failed: Callable[[Message, Exception], None] = _nobody_hears
        self.next_number = 0  # of the step after the last one that was ordered here
        self._lock = threading.Condition(threading.RLock())
        self._last: dict[int, Message] = {}  # by generation that has ended: what its thread has yet to tell
        self._order: StepOrder | None = None
        self._generation = 0
        self._end()

    def _end(self) -> None:
        self._steady, self._rests = True, True
        self._company = self._says = False  # for the thread: to tell of company, and the head at once
        self._turn, self._told_at = 0, 0.0
        self._told = 0, 0  # steps and jobs that the head has been told of
        self._ended = deque[tuple[int, float]](maxlen=MOST_ENDED)  # the newest, where the head takes no word

    def begin(self, join: Message, layers: Sequence[int], members: Members, lacks: Collection[int]) -> None:
        """A generation begins, and with it the order of its steps where `join` says so. layers: decoder
        indices of those that are served; `lacks`: positions in these that no step may take yet.
        """
        self.end()
        first, generation = int(join.get("orders", 0)), int(join["generation"])
        if not first or self.pace is None:
            return
        with self._lock:
            self._end()
            order = StepOrder(_Oneself(self, generation, members), layers, self.pace, lambda: self._steady)
            order.in_flight.number_from(max(first, self.next_number))
            order.in_flight.closed = frozenset(layers[at] for at in lacks)
            order.observe = self._observe
            self._order, self._generation = order, generation
        threading.Thread(target=self._run, args=(generation,), name="own-order", daemon=True).start()

    def end(self) -> None:
        """The generation has ended: no step is begun in it any more. The head is told the last of it by the
        order's own thread: it may take nothing, and whoever ends generations waits for nobody.
        """
        with self._lock:
            if self._order is None:
                return
            self._last[self._generation] = self._figures(time.monotonic())
            self.next_number = self._order.in_flight.next_number
            self._order, self._generation = None, 0
            self._lock.notify_all()

    def announce(self, jobs: Sequence[Announcement]) -> bool:
        """Queues jobs of one generation; False where the head is to."""
        generation = jobs[0].generation
        with self._woken(generation):
            if (order := self._of(generation)) is None:
                return False
            order.announce(jobs)
        return True

    def take(self, message: Message) -> bool:
        """Takes a message to whoever orders steps; False where that is the head."""
        kind = message["kind"]
        if kind not in KINDS or self._order is None:
            return False
        with self._woken(message["generation"]) if kind == "run" else self._lock:
            if (order := self._of(message["generation"])) is None:
                return False
            match kind:
                case "withdraw":
                    order.withdrawn(self._seat, message)
                case "run":
                    order.asked(self._seat, message)
                case _:
                    order.done(self._seat, message)
                    if not self._steady:
                        self._says = True
                        self._lock.notify_all()
        return True

    def close_layers(self, closed: Collection[int]) -> None:
        """Has steps of all layers (decoder indices) but these."""
        with self._lock:
            if self._order is not None:
                self._order.close_layers(closed)

    def steady(self, message: Message) -> None:
        """The head has steps begun, or none while others are about to join, and waits for word of that."""
        with self._lock:
            if (order := self._of(message["generation"])) is None:
                return
            self._steady = bool(message["steady"])
            order.begin()
            self._says = True
            self._lock.notify_all()

    def _of(self, generation: int | None) -> StepOrder | None:
        """What orders the steps of a generation here; None for another one, or where the head does."""
        return self._order if generation == self._generation else None

    @contextmanager
    def _woken(self, generation: int) -> Iterator[None]:
        """Holds the lock, and does not rest. The head is told that steps run again, before the first: of one
        that hangs this process may be unable to tell.
        """
        while True:
            with self._lock:
                if self._of(generation) is None or not self._rests:
                    yield
                    return
                self._rests = False
                told = self._figures(time.monotonic())
                self._lock.notify_all()
            self._tell(told)

    def _observe(self, layer: int, seconds: float) -> None:
        self._ended.append((layer, seconds))
        if len(self._ended) == MOST_ENDED // 2:
            self._says = True
            self._lock.notify_all()

    def _figures(self, now: float) -> Message:
        """What the head is told now. The caller holds the lock."""
        if self._order is None:
            raise RuntimeError("the head orders steps")
        steps = self._order.in_flight
        standing = steps.standing
        self._turn += 1
        self._told_at, self._says = now, False
        before, self._told = self._told, (steps.steps, steps.jobs)
        ended = tuple(self._ended)
        self._ended.clear()
        told = OwnSteps(
            self._turn,
            steps.steps - before[0],
            steps.jobs - before[1],
            steps.queued,
            steps.running,
            steps.next_number if standing is None else standing[0],
            steps.went_on,
            not self._rests,
            not self._steady,
            ended,
        )
        return own_steps_message(told, self._generation)

    # -- by a thread of the generation's --------------------------------------------------------------------

    def _run(self, generation: int) -> None:
        """Begins steps that have gathered company, and tells the head of those that run."""
        sleep_finely()
        try:
            while self._look(generation):
                pass
            with self._lock:
                last = self._last.pop(generation, None)
            if last is not None:
                self._tell(last)
        except Exception as error:
            self.failed({"kind": "step", "generation": generation}, error)

    def _look(self, generation: int) -> bool:
        """Does what is due, or sleeps until something is; False once the generation has ended."""
        told: Message | None = None
        with self._lock:
            if (order := self._of(generation)) is None:
                return False
            due, now = order.begin(), time.monotonic()
            next_telling = math.inf if self._rests else self._told_at + self._interval
            if self._says or now >= next_telling:
                self._rests = self._idle(order)
                told = self._figures(now)
            company, self._company = self._company, False
            if told is None and not company:
                until = min(math.inf if due is None else due, next_telling, now + REST_SECONDS)
                order.sleeps_until = until
                self._lock.wait(max(0.0, until - now))
                return True
        if company:
            self.on_company()
        if told is not None:
            self._tell(told)
        return True

    @property
    def _interval(self) -> float:
        return max(SHORTEST_TELLING, min(TELL_SECONDS, self.late_seconds / 4))

    def _idle(self, order: StepOrder) -> bool:
        """Whether nothing has come since the head was last told, and nothing waits or runs."""
        steps = order.in_flight
        waits = steps.running or steps.queued or steps.asked
        return not waits and self._told == (steps.steps, steps.jobs)

    def tell_company(self) -> None:
        """Has the thread tell of company. The caller holds the lock."""
        self._company = True
        self._lock.notify_all()

    def put(self, entry: Message) -> None:
        """Hands an entry on to the thread that launches steps, which has it be of the epoch that it holds."""
        self._put(entry | {"own": True})

    def sooner(self) -> None:
        """Wakes the thread. The caller holds the lock."""
        self._lock.notify_all()


class _Oneself:
    """The `Audience` of a member alone: itself."""

    epoch = 0  # of entries: their executor knows what it holds then

    def __init__(self, order: OwnOrder, generation: int, members: Members) -> None:
        self._order, self._generation, self._members = order, generation, members
        self._member = members.present[0]

    @property
    def members(self) -> Members:
        return self._members

    def step(self, step: Step) -> None:
        entry = {"kind": "step", "generation": self._generation, "header": step.header(self._member)}
        self._order.put(entry)

    def run(self, run: OrderedRun) -> None:
        self._order.put(run_message(run, self._generation))

    def refuse(self, run: AskedRun, why: str) -> None:
        self._order.put(refused_message(run, self._generation, why))

    def company(self, seat: int) -> bool:
        self._order.tell_company()
        return True

    def layers_closed(self, layers: Collection[int]) -> None:
        """This member has been told."""

    def sooner(self) -> None:
        self._order.sooner()


def header_in(entry: Message, epoch: Epoch | None) -> Header:
    """The step that an entry tells of. One that was ordered here is of `epoch`, which its executor holds."""
    if "own" not in entry:
        return header_from(entry)
    header: Header = entry["header"]
    return header if epoch is None else replace(header, epoch=epoch.number)


def run_in(entry: Message, epoch: Epoch | None) -> Message:
    """The entry of a run. One that was ordered here is of `epoch`, which its executor holds."""
    return entry if epoch is None or "own" not in entry else entry | {"epoch": epoch.number}


def _nobody_hears(entry: Message, error: Exception) -> None:
    """Logs a failure that nobody takes."""
    log.error("steps of generation %s are ordered no more", entry["generation"], exc_info=error)
