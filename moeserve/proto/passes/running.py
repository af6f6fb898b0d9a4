"""`Pass`: what a caller runs on its device lane: steps whose rows it posts, and whose answers it takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moeserve.proto.client.batch import Choice, Logits
from moeserve.proto.errors import (
    DeadlineExceeded,
    InvalidArgument,
    MoeError,
    Unavailable,
    WeightsChanged,
)
from moeserve.proto.passes import mailbox as m
from moeserve.proto.passes.mailbox import Status, fence, tag_of
from moeserve.proto.passes.memory import LaneMemory
from moeserve.proto.tensors import Array, Plain, TensorError, copy_into, known, plain

SPINS = 50
"""Looks at an answer's tag one right after the other; later ones come after an eighth of the wait."""

LONGEST_LOOK = 0.001
ALIVE_SECONDS = 0.05
"""Between looks whether the rank's process is still there, while an answer is waited for."""


class PassLate(MoeError, TimeoutError):
    """The rows of a step did not come in time, and the pass has ended. It may be begun again."""


class Announced(NamedTuple):
    """What a rank was told of a pass."""

    number: int
    layers: tuple[int, ...]
    stages: int


class Pass:
    """A pass that was announced. `post` and `take` alternate for each stage; other stages go on meanwhile."""

    def __init__(self, memory: LaneMemory, announced: Announced, timeout: float) -> None:
        """timeout: seconds for an answer, where its taker names none."""
        self.number, self.layers = announced.number, announced.layers
        self._memory, self._timeout, stages = memory, timeout, announced.stages
        self._steps = [0] * stages  # of each stage, that were taken
        self._rows: list[int | None] = [None] * stages  # of the step under way

    def layer(self, stage: int) -> int:
        """The layer whose rows a stage brings next, or has brought."""
        return self.layers[self._steps[stage] % len(self.layers)]

    def under_way(self, stage: int) -> bool:
        """Whether a step of the stage is."""
        return self._rows[stage] is not None

    @property
    def stages(self) -> int:
        """How many it has."""
        return len(self._steps)

    def post(self, stage: int, hidden: Array, route: Choice | Logits) -> None:
        """Brings the rows of the stage's next step: `hidden` [T, H] of the lane's dtype, with ids int32 or
        int64 and weights, or logits, of float32. They are copied. Raises TensorError.
        """
        layout = self._memory.layout
        rows = plain(hidden, "hidden", dtype="bf16" if layout.dtype.name == "bf16" else "")
        count = rows.storage.shape[0] if rows.storage.ndim else 0
        if rows.spec != layout.hidden_spec(count):
            raise TensorError("hidden", f"{rows.spec}; this lane takes {layout.hidden_spec(count)}")
        room, columns = self.room(stage, count), (rows, *self._columns(route, count))
        for into, column in zip(room, columns, strict=True):
            if column is not None:
                copy_into(into.storage, column.storage)
        self.send(stage, count, logits=isinstance(route, Logits))

    def room(self, stage: int, count: int) -> tuple[Plain, Plain, Plain, Plain]:
        """Memory for `count` rows of the stage's next step, to be filled before `send`: hidden states, and
        ids int32 with weights float32, or logits float32. Raises TensorError for more than the lane takes.
        """
        if self._rows[stage] is not None:
            raise ValueError(f"stage {stage} has a step under way; take its answer first")
        memory, layout = self._memory, self._memory.layout
        if count > layout.rows:
            raise TensorError("hidden", f"{count} rows; this lane was attached with {layout.rows} at most")
        specs = (layout.hidden_spec(count), *layout.route_specs(count))
        places = layout.columns(stage)
        hidden, ids, weights, logits = (memory.view(*one) for one in zip(places, specs, strict=True))
        return hidden, ids, weights, logits

    def send(self, stage: int, count: int, *, logits: bool = False) -> None:
        """Says that the stage's rows are in their `room`: its next step may begin."""
        box, head = self._memory.box, self._memory.layout.header(stage)
        box[head + m.LAYER], box[head + m.STAGE], box[head + m.COUNT] = self.layer(stage), stage, count
        box[head + m.KIND] = m.LOGITS if logits else m.CHOICE
        fence()
        box[head + m.TAG] = tag_of(self.number, self._steps[stage])
        self._rows[stage] = count

    def _columns(self, route: Choice | Logits, count: int) -> tuple[Plain | None, Plain | None, Plain | None]:
        """Ids, weights and logits as the mailbox holds them."""
        specs = dict(zip(("ids", "weights", "logits"), self._memory.layout.route_specs(count), strict=True))
        if isinstance(route, Choice):
            ids = plain(route.experts, "ids")
            if ids.dtype.name == "int64":
                ids = Plain(known("ids", "int32"), ids.storage.astype(np.int32))
            given: dict[str, Plain] = {"ids": ids, "weights": plain(route.weights, "weights")}
        else:
            given = {"logits": plain(route.logits, "logits")}
        for name, column in given.items():
            if column.spec != specs[name]:
                raise TensorError(name, f"{column.spec}; this lane takes {specs[name]}")
        return given.get("ids"), given.get("weights"), given.get("logits")

    def take(self, stage: int, timeout: float | None = None) -> NDArray[Any]:
        """The answer [T, H] of the stage's step, in the storage type of its dtype (bfloat16 as uint16 bits).

        Raises what the pass ended with: PassLate; Unavailable where the service could not answer;
        WeightsChanged; InvalidArgument for a wrong announcement or step; DeadlineExceeded: nothing came.
        """
        return self.take_plain(stage, timeout).storage

    def take_plain(self, stage: int, timeout: float | None = None) -> Plain:
        """Does as `take`; the array with its dtype."""
        found = self.arrived(stage, timeout)
        storage = np.empty_like(found.storage)
        copy_into(storage, found.storage)
        return Plain(found.dtype, storage)

    def arrived(self, stage: int, timeout: float | None = None) -> Plain:
        """Waits as `take` does; the answer where it lies, until the stage's rows are sent again."""
        rows = self._rows[stage]
        if rows is None:
            raise ValueError(f"stage {stage} has no step under way; post its rows first")
        memory = self._memory
        tag, head = tag_of(self.number, self._steps[stage]), memory.layout.answer_header(stage) + m.TAG
        self._wait(lambda: memory.out[head] == tag, timeout)
        fence()
        self._rows[stage] = None
        self._steps[stage] += 1
        return memory.answer(stage, rows)

    def version(self, stage: int) -> int:
        """The version of the weights that made the stage's last answer."""
        return int(self._memory.out[self._memory.layout.answer_header(stage) + m.VERSION])

    def wait(self, timeout: float | None = None) -> None:
        """Waits until the pass has ended, and raises what it ended with, unless that is OK."""
        self._wait(lambda: False, timeout, ends=True)

    @property
    def status(self) -> Status | None:
        """How the pass ended; None while it runs."""
        out = self._memory.out
        if out[m.ENDED] != self.number:
            return None
        fence()
        return Status(out[m.STATUS])

    def leave(self) -> None:
        """Ends the pass and waits for that. Steps under way are given up."""
        if self.status is None:
            self._memory.box[m.GIVEN_UP] = self.number
            try:
                self._wait(lambda: False, None, ends=True)
            except MoeError:
                if self.status is None:  # the rank is gone; else it ended in another way just then
                    raise

    def _wait(self, there: Callable[[], bool], timeout: float | None, *, ends: bool = False) -> None:
        """Until `there`, or the pass has ended. ends: that is what is waited for."""
        started = looked = time.monotonic()
        limit = self._timeout if timeout is None else timeout
        spins = 0
        while not there():
            status = self.status
            if status is not None:
                if there():  # it ended after this answer
                    return
                if status is Status.OK and ends:
                    return
                raise _failure(status, self._memory.text())
            spins += 1
            if spins < SPINS:
                time.sleep(0)
                continue
            now = time.monotonic()
            if now - looked > ALIVE_SECONDS:
                looked = now
                if not self._memory.alive:
                    raise Unavailable("UNAVAILABLE", "lane_lost", "the rank of this device lane is gone")
            if now - started > limit:
                text = f"pass {self.number}: nothing came within {limit:g} s"
                raise DeadlineExceeded("DEADLINE_EXCEEDED", "deadline", text)
            time.sleep(min(LONGEST_LOOK, (now - started) / 8))

    def __enter__(self) -> Pass:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        if raised is None:
            self.leave()
        else:
            self._memory.box[m.GIVEN_UP] = self.number


def _failure(status: Status, text: str) -> MoeError:
    """What a pass raises that ended so. The text begins with a word why."""
    reason, _, said = text.partition(": ")
    match status:
        case Status.LATE:
            return PassLate("DEADLINE_EXCEEDED", reason, said)
        case Status.OTHER_WEIGHTS:
            return WeightsChanged("UNAVAILABLE", reason, said)
        case Status.REFUSED:
            return InvalidArgument("INVALID_ARGUMENT", reason, said)
        case Status.OK:
            return MoeError("CANCELLED", "left", "the pass was left before this answer was there")
        case _:
            return Unavailable("UNAVAILABLE", reason if said else "detached", said or text)
