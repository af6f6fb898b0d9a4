"""`Pass`: what a caller runs on its device lane: steps whose rows it posts, and whose answers it takes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moeserve.proto.client.batch import Choice, Logits
from moeserve.proto.client.patience import check_process
from moeserve.proto.errors import (
    DeadlineExceeded,
    InvalidArgument,
    MoeError,
    Unavailable,
    WeightsChanged,
)
from moeserve.proto.passes import mailbox as m
from moeserve.proto.passes.expected import SHORTEST_SLEEP, Expected
from moeserve.proto.passes.mailbox import Status, fence, tag_of
from moeserve.proto.passes.memory import LaneMemory, Room, Specs
from moeserve.proto.tensors import Array, Plain, TensorError, in_place, known, plain
from moeserve.proto.timeouts import checked
from moeserve.proto.transports.copies import copy_into

NO_TAG = 1 << 64
"""What no word is."""

PART_BYTES, PARTED_BYTES = 4 << 20, 8 << 20
"""Of hidden states that are copied before the rank is told of them, where it begins with those that are
there; and of the fewest for which that pays, as of the smallest answer that is copied while the rest of it
comes, of which an owner tells so.
"""

PARTLY_SECONDS = 0.001
"""For which the next rows of an answer are looked for again and again; then for its end."""

ALIVE_SECONDS = 0.05
"""Between looks whether the rank's process is still there, while an answer is waited for."""


class PassLate(MoeError, TimeoutError):
    """The rows of a step did not come in time, and the pass has ended. It may be begun again."""


LOST = "this device lane is no more: its rank is gone, or it was detached or closed; attach another one"
"""Of a pass whose lane has ended, which nobody has told it."""

_NOTHING = "stage {} has no step under way; post its rows first"

Columns = tuple[Plain, Plain | None, Plain | None, Plain | None]
"""Hidden states, and ids, weights and logits as far as there are any."""


class Announced(NamedTuple):
    """What a rank was told of a pass."""

    number: int
    layers: tuple[int, ...]
    stages: int


class Pass:
    """A pass that was announced. `post` and `take` alternate for each stage; other stages go on meanwhile."""

    def __init__(
        self, memory: LaneMemory, announced: Announced, timeout: float, expected: Sequence[Expected]
    ) -> None:
        """timeout: seconds for an answer, where its taker names none. expected: when it comes, by stage."""
        self.number, self.layers = announced.number, announced.layers
        self._memory, self._timeout, stages = memory, timeout, announced.stages
        self._steps = [0] * stages  # of each stage, that were taken
        self._rows: list[int | None] = [None] * stages  # of the step under way
        self._buffers = [0] * stages  # of its answer
        self._expected = expected

    def layer(self, stage: int) -> int:
        """The layer whose rows a stage brings next, or has brought."""
        return self.layers[self._steps[stage] % len(self.layers)]

    def under_way(self, stage: int) -> bool:
        """Whether a step of the stage is."""
        return self._rows_of(stage) is not None

    def _rows_of(self, stage: int) -> int | None:
        """Of the step that is under way. Raises ValueError for a stage that the pass does not have."""
        if not 0 <= stage < len(self._rows):
            raise ValueError(f"stage {stage} is not one of 0 to {len(self._rows) - 1}, those of this pass")
        return self._rows[stage]

    @property
    def stages(self) -> int:
        """How many it has."""
        return len(self._steps)

    def post(self, stage: int, hidden: Array, route: Choice | Logits) -> None:
        """Brings the rows of the stage's next step: `hidden` [T, H] of the lane's dtype, with ids int32 or
        int64 and weights, or logits, of float32. They are copied. Raises TensorError.
        """
        bf16 = self._memory.layout.dtype.name == "bf16"
        rows = plain(hidden, "hidden", dtype="bf16" if bf16 else "")
        count = rows.storage.shape[0] if rows.storage.ndim else 0
        self.room(stage, count)  # or there is none for so many
        self.post_columns(stage, count, columns_of(rows, route, self._memory.specs(count)))

    def post_columns(
        self, stage: int, count: int, columns: Columns, *, placed: bool = False, buffer: int = 0
    ) -> None:
        """Does as `post` with what `columns_of` gave. placed: hidden states lie there already. buffer: in
        which the answer is wanted, of those that the lane has.
        """
        (into, *there), (hidden, *route) = self.room(stage, count), columns
        for place, column in zip(there, route, strict=True):
            if column is not None:
                copy_into(place.storage, column.storage)
        logits = columns[3] is not None
        if placed or not self._memory.fills or hidden.spec.nbytes < PARTED_BYTES:
            if not placed:
                copy_into(into.storage, hidden.storage)
            self.send(stage, count, logits=logits, buffer=buffer)
            return
        self.send(stage, count, logits=logits, filled=False, buffer=buffer)
        box, filled = self._memory.box, self._memory.layout.header(stage) + m.FILLED
        parts = hidden.spec.nbytes // PART_BYTES
        for part in range(parts):
            start, stop = count * part // parts, count * (part + 1) // parts
            copy_into(into.storage[start:stop], hidden.storage[start:stop])
            fence()
            box[filled] = stop + 1
        self._memory.ring()

    def room(self, stage: int, count: int) -> Room:
        """Memory for `count` rows of the stage's next step, to be filled before `send`: hidden states, and
        ids int32 with weights float32, or logits float32. Raises TensorError for more than the lane takes,
        and RuntimeError after a fork.
        """
        check_process(self._memory.process)
        if self._rows_of(stage) is not None:
            raise ValueError(f"stage {stage} has a step under way; take its answer first")
        if count > (most := self._memory.layout.rows):
            raise TensorError("hidden", f"{count} rows; this lane was attached with {most} at most")
        return self._memory.room(stage, count)

    def send(
        self, stage: int, count: int, *, logits: bool = False, filled: bool = True, buffer: int = 0
    ) -> None:
        """Says that the stage's rows are in their `room`: its next step may begin. filled: hidden states are,
        too; else they follow at once, and the header's FILLED says how many are there. buffer: the answer's.
        """
        check_process(self._memory.process)
        box, head = self._memory.box, self._memory.layout.header(stage)
        box[head + m.LAYER], box[head + m.STAGE], box[head + m.COUNT] = self.layer(stage), stage, count
        box[head + m.KIND], box[head + m.FILLED] = m.LOGITS if logits else m.CHOICE, not filled
        box[head + m.BUFFER] = self._buffers[stage] = buffer
        self._rows[stage] = count
        fence()
        box[head + m.TAG] = tag_of(self.number, self._steps[stage])
        self._memory.ring()
        self._expected[stage].sent(count)

    def take(self, stage: int, timeout: float | None = None, *, out: Array | None = None) -> NDArray[Any]:
        """The answer [T, H] of the stage's step, in the storage type of its dtype (bfloat16 as uint16 bits).

        out: dense host memory [T, H] of the lane's dtype in which the answer is wanted; None: new memory,
        which takes longer to get than to fill where it is large. Raises TensorError for another one, and what
        the pass ended with: PassLate; Unavailable where the service could not answer; WeightsChanged;
        InvalidArgument for a wrong announcement or step; DeadlineExceeded: nothing came. Some rows of the
        answer may lie in `out` then.
        """
        return self.take_plain(stage, timeout, out=out).storage

    def take_plain(self, stage: int, timeout: float | None = None, *, out: Array | None = None) -> Plain:
        """Does as `take`; the array with its dtype."""
        into, rows = None, self._rows_of(stage)
        if out is not None and rows is not None:
            into = in_place(out, "out", self._memory.layout.hidden_spec(rows))
        if into is None:
            if rows is None:
                raise ValueError(_NOTHING.format(stage))
            spec = self._memory.layout.hidden_spec(rows)
            into = Plain(spec.dtype, np.empty(spec.shape, spec.dtype.storage))
        self.take_into(stage, into, timeout)
        return into

    def take_into(self, stage: int, into: Plain, timeout: float | None = None) -> None:
        """Waits as `take` does, and copies the answer `into` an array like it; a large one while the rest of
        it comes. What is there already is not copied.
        """
        rows = self._rows_of(stage)
        if rows is None:
            raise ValueError(_NOTHING.format(stage))
        there = self._memory.answer(stage, rows, self._buffers[stage])
        if into is there or into.address == there.address:
            self.arrived(stage, timeout)
            return
        until = time.monotonic() + self._limit(timeout)
        copied, expected = 0, self._expected[stage]
        if self._memory.fills and there.spec.nbytes >= PARTED_BYTES:
            copied = self._take_parts(stage, (into, there), timeout)
            expected = Expected(expected.awake)  # it comes soon; and the first part is what is expected
        self._arrived(stage, max(0.0, until - time.monotonic()), expected)
        copy_into(into.storage[copied:], there.storage[copied:])

    def _take_parts(self, stage: int, both: tuple[Plain, Plain], timeout: float | None) -> int:
        """Copies rows of an answer that are there before its end is, as far as they come; how many. both:
        into which memory, and from where.
        """
        memory, tag = self._memory, tag_of(self.number, self._steps[stage])
        out, head = memory.out, memory.layout.answer_header(stage)
        into, there = (one.storage for one in both)

        def found() -> int:
            return min(m.rows_answered(out[head + m.ANSWERED], tag), len(there))

        self._wait((head + m.TAG, tag), timeout, self._expected[stage], sooner=found)
        copied, since = 0, time.monotonic()
        while out[head + m.TAG] != tag and time.monotonic() - since < PARTLY_SECONDS:
            if (rows := found()) > copied:
                fence()
                copy_into(into[copied:rows], there[copied:rows])
                copied, since = rows, time.monotonic()
            else:
                time.sleep(0.0 if self._expected[stage].awake else SHORTEST_SLEEP)
        return copied

    def arrived(self, stage: int, timeout: float | None = None) -> Plain:
        """Waits as `take` does; the answer where it lies, until the stage's rows are sent again."""
        return self._arrived(stage, timeout, self._expected[stage])

    def _arrived(self, stage: int, timeout: float | None, expected: Expected) -> Plain:
        rows = self._rows_of(stage)
        if rows is None:
            raise ValueError(_NOTHING.format(stage))
        memory = self._memory
        tag, head = tag_of(self.number, self._steps[stage]), memory.layout.answer_header(stage) + m.TAG
        self._wait((head, tag), timeout, expected)
        fence()
        self._steps[stage] += 1
        self._rows[stage] = None
        return memory.answer(stage, rows, self._buffers[stage])

    def version(self, stage: int) -> int:
        """The version of the weights that made the stage's last answer."""
        return int(self._memory.out[self._memory.layout.answer_header(stage) + m.VERSION])

    def epoch(self, stage: int) -> int:
        """The epoch in which the stage's last answer was made."""
        return int(self._memory.out[self._memory.layout.answer_header(stage) + m.EPOCH])

    def wait(self, timeout: float | None = None) -> None:
        """Waits until the pass has ended, and raises what it ended with, unless that is OK."""
        self._wait((m.ENDED, NO_TAG), timeout, Expected(0.0), ends=True)

    @property
    def status(self) -> Status | None:
        """How the pass ended; None while it runs."""
        out = self._memory.out
        if out[m.ENDED] != self.number:
            return None
        fence()
        return Status(out[m.STATUS])

    def leave(self, timeout: float | None = None) -> None:
        """Ends the pass and waits for that. Steps under way are given up. Raises DeadlineExceeded where it
        has not ended in time, and Unavailable where the rank is gone. After a fork it does nothing.
        """
        limit = self._limit(timeout)
        if self.status is None and self._memory.process == os.getpid():
            self.give_up()
            try:
                self._wait((m.ENDED, NO_TAG), limit, Expected(0.0), ends=True)
            except MoeError:
                if self.status is None:  # the rank is gone; else it ended in another way just then
                    raise

    def _limit(self, timeout: float | None) -> float:
        """Seconds to wait, the pass's own where none are named. Raises ValueError for what no wait can be."""
        return self._timeout if timeout is None else checked("timeout", timeout)

    def _wait(
        self,
        word: tuple[int, int],
        timeout: float | None,
        expected: Expected,
        *,
        ends: bool = False,
        sooner: Callable[[], int] = int,
    ) -> None:
        """Until a word of the answers is what is wanted, or the pass has ended. word: its place, and what is
        wanted. ends: the end is what is waited for. sooner: whether enough is there before that.
        """
        started = looked = time.monotonic()
        limit = self._limit(timeout)
        out, (at, wanted) = self._memory.out, word
        looks, slept = 0, False
        while (found := out[at]) != wanted and not sooner():
            status = self.status
            if status is not None:
                if out[at] == wanted:  # it ended after this answer
                    return
                if status is Status.OK and ends:
                    return
                raise _failure(status, self._memory.text())
            looks, now = looks + 1, time.monotonic()
            if now - looked > ALIVE_SECONDS:
                looked = now
                if not self._memory.alive:
                    raise Unavailable("UNAVAILABLE", "lane_lost", LOST)
            if now - started > limit:
                text = f"pass {self.number}: nothing came within {limit:g} s"
                raise DeadlineExceeded("DEADLINE_EXCEEDED", "deadline", text)
            if seconds := expected.sleep(now, looks):
                slept = not self._memory.words.sleep(at, found, seconds, None if ends else wanted)
            else:
                time.sleep(0)
                slept = False
        expected.came(awaited=looks > 0, slept=slept)

    def give_up(self) -> None:
        """Ends the pass, and does not wait for that: an answer of a step under way may still be written.
        After a fork it does nothing.
        """
        if self._memory.process == os.getpid():
            self._memory.give_up(self.number)

    def __enter__(self) -> Pass:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        if raised is None:
            self.leave()
        else:
            self.give_up()


def columns_of(rows: Plain, route: Choice | Logits, specs: Specs) -> Columns:
    """Hidden states, ids, weights and logits as a lane takes them. Raises TensorError."""
    hidden, *wanted = specs
    if rows.spec != hidden:
        raise TensorError("hidden", f"{rows.spec}; this lane takes {hidden}")
    given: dict[str, Plain] = {}
    if isinstance(route, Choice):
        ids = plain(route.experts, "ids")
        if ids.dtype.name == "int64":
            ids = narrowed(ids)
        given = {"ids": ids, "weights": plain(route.weights, "weights")}
    else:
        given = {"logits": plain(route.logits, "logits")}
    for name, spec in zip(("ids", "weights", "logits"), wanted, strict=True):
        if name in given and given[name].spec != spec:
            raise TensorError(name, f"{given[name].spec}; this lane takes {spec}")
    return rows, given.get("ids"), given.get("weights"), given.get("logits")


def narrowed(ids: Plain) -> Plain:
    """Ids int64 as int32. Raises TensorError for one that is none."""
    narrow = ids.storage.astype(np.int32)
    if not np.array_equal(narrow, ids.storage):
        raise TensorError("ids", "an id is not one of int32")
    return Plain(known("ids", "int32"), narrow)


def cut_of(columns: Columns, start: int, stop: int) -> Columns:
    """Rows [start, stop) of each."""
    hidden, *route = columns
    ids, weights, logits = (None if column is None else column.rows(start, stop) for column in route)
    return hidden.rows(start, stop), ids, weights, logits


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
