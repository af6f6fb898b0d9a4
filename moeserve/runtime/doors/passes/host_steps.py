"""`HostSteps`: steps of lanes in host memory, begun together: those of one layer that were found at one look.

Each of them would be a call of its own at the rank's door else, with a request that is made to be read again.
The door's rules are kept: rows are admitted, the choice of experts is copied before it is checked, and what
fails ends the pass of its own lane.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeserve.proto import moe_pb2
from moeserve.proto.passes.mailbox import MailboxLayout
from moeserve.proto.tensors import TensorError, as_torch
from moeserve.runtime.doors.calls.rows import Held, RowAdmission
from moeserve.runtime.doors.deadlines import Observe
from moeserve.runtime.doors.failures import status_of
from moeserve.runtime.doors.payloads.region import Hold
from moeserve.runtime.doors.request import check_ids
from moeserve.runtime.errors import CallerLeft, GroupUnavailable, LaneFull
from moeserve.runtime.rank.lanes.lane import Lane
from moeserve.runtime.rank.lanes.together import Part, Together
from moeserve.runtime.step import Job, Stamp

log = logging.getLogger(__name__)

MOST_UNDER_WAY = 2
"""Jobs of one layer that a rank's lanes have under way: while one is computed another waits for its turn, and
the steps of callers who come meanwhile are the next one together.
"""

METHOD = "DeviceLane"
"""How metrics of requests name a step of a device lane."""

Outcome = Stamp | moe_pb2.Error
"""How a step ended: with an answer, or not."""


@dataclass(frozen=True, eq=False)
class Places:
    """Where some rows of one stage lie, and their answer."""

    hidden: Tensor  # [T, H]
    ids: NDArray[np.int32]  # [T, K]
    weights: NDArray[np.float32]  # [T, K]
    home: Tensor  # [T, H]
    reached: tuple[bool, bool]  # whether the device reads the rows, and writes the answer, in place

    @classmethod
    def of(
        cls, layout: MailboxLayout, held: tuple[Hold, Hold], stage: int, count: int, buffer: int = 0
    ) -> Places:
        """Of the first `count` rows of a stage, and of their answer in a buffer. held: the mailbox, and the
        answers.
        """
        box, answers = held
        rows, (ids, weights, _) = layout.hidden_spec(count), layout.route_specs(count)
        at, id_at, weight_at, _ = layout.columns(stage)
        home = layout.answer(stage, buffer)
        return cls(
            as_torch(box.memory[at : at + rows.nbytes], rows),
            np.frombuffer(box.memory[id_at : id_at + ids.nbytes], np.int32).reshape(ids.shape),
            np.frombuffer(box.memory[weight_at : weight_at + weights.nbytes], np.float32).reshape(ids.shape),
            as_torch(answers.memory[home : home + rows.nbytes], rows),
            (box.reached, answers.reached),
        )


class HostStep:
    """One lane's part of what is begun together. `ended` hears of its end, once, from any thread."""

    def __init__(
        self,
        wanted: tuple[int, int],
        places: Places,
        caller: tuple[str, float],
        ended: Callable[[Outcome], None],
        given_back: Callable[[], None],
    ) -> None:
        """wanted: the layer, and the version of its weights, 0 for any. caller: who it is, and since when its
        rows are there, as far as was seen. given_back: called when neither the rank nor its device touches
        the lane's memory for it any more.
        """
        self.wanted, self.places = wanted, places
        self.peer, self.since = caller
        self.left = False
        self.waits = True  # it was neither begun nor has it failed
        self.held: Held | None = None  # its rows, while they count
        self.admission: RowAdmission | None = None  # that has let it in
        self.rows = len(places.ids)  # how many it brings
        self._ended, self._given_back = ended, given_back
        self._together: tuple[Together, Part] | None = None
        self._started, self._took, self._code = time.perf_counter(), 0.0, "OK"

    def part(self, observe: Observe) -> Part:
        """What it is of a job."""
        places = self.places
        done = partial(self._done, observe)
        return Part(places.hidden, places.home, self._tell, done, self._given_back)

    def joins(self, together: Together, part: Part) -> None:
        """Its job was made."""
        self.waits = False
        self._together = together, part
        if self.left:
            self.give_up()
        if not part.open:
            self._together = None  # they would hold each other

    def give_up(self) -> None:
        """Ends it soon; its `ended` is called all the same."""
        self.left = True
        if (joined := self._together) is not None:  # else whoever begins it sees it
            together, part = joined
            together.leave(part, CallerLeft("the pass ended before the answer was there"))

    def fail(self, error: Exception, observe: Observe) -> None:
        """It was not begun."""
        self.waits = False
        self._given_back()
        self._tell(error)
        self._done(observe)

    def _tell(self, told: Stamp | Exception) -> None:
        """Its caller hears of its end."""
        self._took, self._together = time.perf_counter() - self._started, None
        outcome: Outcome
        if isinstance(told, Stamp):
            outcome = told
        else:
            status = status_of(told)
            self._code, outcome = status.code, status.as_message()
        if (held := self.held) is not None and self.admission is not None:
            self.admission.leave_all([held], self._code)
        self._ended(outcome)

    def _done(self, observe: Observe) -> None:
        """Counts it: callers who were answered with it have heard of that."""
        observe(METHOD, "shared_memory", self._code, self._took)


class HostSteps:
    """Of one rank. `add` and `begin` are called by the thread that looks at lanes, steps end in any.

    stopping: why no further step is taken; empty while they are.
    """

    def __init__(
        self,
        lane: Lane,
        model: tuple[torch.dtype, int, float],
        admission: Callable[[], RowAdmission],
        stopping: Callable[[], str],
        observe: Observe,
    ) -> None:
        """model: the dtype that is served, the experts of a layer, and the seconds within which a step is to
        be answered.
        """
        self.ended: Callable[[], None] = lambda: None  # steps that were begun together have; from any thread
        self.gathers = False  # whether the head need wait for no company of a job
        self._lane, self._admission, self._stopping, self._observe = lane, admission, stopping, observe
        self._dtype, self._experts, self._seconds = model
        self._found: list[HostStep] = []  # since the last `begin`
        self._under_way: Counter[int] = Counter()  # jobs by layer
        self._lock = threading.Lock()

    def takes(self, places: Places) -> bool:
        """Whether such rows are begun here, and not as a call: they are of the served dtype, and the device,
        if there is one, reads them and writes their answer in place.
        """
        return places.hidden.dtype == self._dtype and (self._lane.transfers is None or all(places.reached))

    def open(self, layer: int) -> bool:
        """Whether a step of this layer that is there now is to be begun now."""
        return self._under_way[layer] < MOST_UNDER_WAY

    def add(self, step: HostStep) -> None:
        """Has `step` begun by the next `begin`."""
        self._found.append(step)

    def begin(self) -> None:
        """Begins what was added. Where it raises, what was not begun has failed."""
        if not self._found:
            return
        found, self._found = self._found, []
        try:
            self._begin(found)
        except Exception as error:
            for step in found:
                if step.waits:
                    step.fail(error, self._observe)
            raise

    def _begin(self, found: Sequence[HostStep]) -> None:
        ready = self._let_in(found)
        for wanted in dict.fromkeys(step.wanted for step in ready):
            for some in self._parted([step for step in ready if step.wanted == wanted]):
                self._submit(wanted, some)

    def _let_in(self, found: Sequence[HostStep]) -> list[HostStep]:
        """The steps that may begin; the others have ended."""
        why, asked = self._stopping(), list[HostStep]()
        for step in found:
            if step.left or why:
                left = CallerLeft("the pass ended before its step began")
                step.fail(left if step.left else GroupUnavailable(why), self._observe)
            else:
                asked.append(step)
        calls = [(step.peer, step.rows, step.since + self._seconds) for step in asked]
        admission, ready = self._admission(), list[HostStep]()
        try:
            entered = admission.enter_all(calls)
        except Exception as error:
            log.exception("steps of device lanes could not be let in")
            for step in asked:
                step.fail(error, self._observe)
            return ready
        for step, held in zip(asked, entered, strict=True):
            if isinstance(held, LaneFull):
                step.fail(held, self._observe)
            else:
                step.held, step.admission = held, admission
                ready.append(step)
        return ready

    def _parted(self, steps: Sequence[HostStep]) -> Iterator[list[HostStep]]:
        """The steps in their order, as many together as a step of the lane takes, and as it has room for when
        they are begun: of more it would refuse all.
        """
        some, rows, room = list[HostStep](), 0, self._lane.room
        for step in steps:
            if some and (rows + step.rows > self._lane.capacity or len(some) >= room):
                yield some
                some, rows, room = [], 0, self._lane.room
            some.append(step)
            rows += step.rows
        yield some

    def _submit(self, wanted: tuple[int, int], steps: Sequence[HostStep]) -> None:
        steps, choice = self._chosen(steps)
        if not steps:
            return
        layer, deadline = wanted[0], min(step.since for step in steps) + self._seconds
        self._count(layer, 1)

        def ended(job: Job) -> None:
            self._lane.forget(job)
            admission = steps[0].admission
            if job.error is None and job.output is not None and admission is not None:
                held = [step.held for step in steps if step.held is not None]
                for step in steps:
                    step.held = None  # or each would be counted again
                admission.leave_all(held, "OK")

        def over() -> None:
            self._count(layer, -1)
            self.ended()

        parts = [step.part(self._observe) for step in steps]
        together = Together(parts, choice, ended, over)
        together.gathered = self.gathers
        try:
            self._lane.submit_together(together, wanted, deadline, steps[0].places.reached)
        except Exception as error:
            self._count(layer, -1)
            for step in steps:
                step.fail(error, self._observe)
            return
        for step, part in zip(steps, parts, strict=True):
            step.joins(together, part)

    def _chosen(self, steps: Sequence[HostStep]) -> tuple[list[HostStep], tuple[NDArray[np.int32], Tensor]]:
        """The steps whose choice of experts can be, and a copy of it: ids and weights of all their rows. The
        callers may change theirs at any time.
        """
        left = list(steps)
        ids = np.concatenate([step.places.ids for step in left])
        weights = np.concatenate([step.places.weights for step in left])
        try:
            check_ids(ids, self._experts)
        except TensorError:
            ends = np.cumsum([step.rows for step in left])[:-1]
            each = list(zip(left, np.split(ids, ends), np.split(weights, ends), strict=True))
            right = [one for one in each if self._right(one[0], one[1])]
            left = [step for step, _, _ in right]
            if left:
                ids = np.concatenate([some for _, some, _ in right])
                weights = np.concatenate([some for _, _, some in right])
        return left, (ids, torch.from_numpy(weights))

    def _right(self, step: HostStep, ids: NDArray[np.int32]) -> bool:
        """Whether a step chooses experts that there are; it has ended where not."""
        try:
            check_ids(ids, self._experts)
        except TensorError as error:
            step.fail(error, self._observe)
            return False
        return True

    def _count(self, layer: int, more: int) -> None:
        with self._lock:
            self._under_way[layer] += more
