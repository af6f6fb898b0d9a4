"""`StepGraphs`: small steps of a GPU rank as CUDA graphs; launching them one by one costs more than they do.

A step of up to `most_rows` rows a lane is padded to the next power of two and replayed from a graph of its
layer and size. Every member sees the same row counts in a step's header, so all take the same graph.

A graph is recorded with padded rows of every lane that the group has room for, reserved ones too, so that
none is recorded again when a lane is taken or left. Lanes that launch nothing in a step are absent from it:
its dispatcher is told of them before the graph is replayed.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moeserve.dispatch.members import Members
from moeserve.runtime.rank.transfers.step_room import StepRoom
from moeserve.runtime.step import LaneInput, LaneRows, empty_input

log = logging.getLogger(__name__)

Compute = Callable[[LaneRows, tuple[int, ...]], Tensor]
"""One layer's step: rows and how many each lane brings -> answer `[T, H]`; in a graph it reads no count."""

Replay = Callable[[], None]
Capture = Callable[[Callable[[], None]], Replay]
"""Records what a function queues, without running it, and gives what runs it."""


class Key(NamedTuple):
    """Which graph: the decoder layer, rows of a lane, and whatever else the recorded work depends on."""

    layer: int
    rows: int
    form: Hashable  # of the columns
    kind: Hashable


class Recorded(NamedTuple):
    """A graph whose input lies in its place: what replays it, and where its answer `[T, H]` is then.

    The next replay of any graph may write the answer over.
    """

    replay: Replay
    answer: Tensor


@dataclass(frozen=True)
class GraphStep:
    """A step that may come from a graph, as one member sees it."""

    layer: int
    kind: Hashable
    lane_rows: tuple[int, ...]  # by lane, reserved ones too
    absent: tuple[int, ...] = ()  # lanes that launch nothing in it
    brings: bool = True  # whether this member has a lane

    @property
    def padded(self) -> int:
        """Rows of every lane in its graph."""
        return padded_rows(max(self.lane_rows))

    @property
    def launched(self) -> tuple[int, ...]:
        """Rows of each lane where the step is launched padded, and not replayed: absent lanes bring none."""
        return tuple(0 if lane in self.absent else self.padded for lane in range(len(self.lane_rows)))

    @property
    def recorded(self) -> tuple[int, ...]:
        """Rows of each lane in its graph."""
        return (self.padded,) * len(self.lane_rows)


def absent_lanes(members: Members, lane_rows: tuple[int, ...]) -> tuple[int, ...]:
    """Lanes that launch nothing in a step: those it does not name, unless an owner has them, and reserved
    ones.
    """
    if members.equal:  # every lane is an owner's
        return ()
    launching = {members.at(seat).lane for seat in members.in_step(lane_rows)}
    return tuple(lane for lane in range(members.max_lanes) if lane not in launching)


def padded_rows(rows: int) -> int:
    """Rows of every lane in the graph of a step to whose fullest lane `rows` come; at least 1."""
    return 1 << (max(rows, 1) - 1).bit_length()


OWN_ANSWER_ROWS = 64
"""Graphs of up to so many rows keep an answer each. Those of more copy theirs to one place for all layers:
1024 rows of 7168 bf16 are 14.7 MB, and a model has 60 layers.
"""


def _nothing() -> None:
    """What is done before a replay that nobody has to be told of."""


class StepGraphs:
    """Graphs of one member in one generation of its group; dropped when the dispatchers are closed."""

    def __init__(self, most_rows: int, device: str, capture: Capture | None = None) -> None:
        self.most_rows = most_rows
        self.recording = False  # what is computed now becomes part of a graph
        self._device = device
        self._cuda = CudaCapture()
        self._capture = capture or self._cuda
        self._inputs: dict[tuple[int, Hashable], LaneRows] = {}  # by rows and form
        self._rooms: dict[tuple[int, Hashable], StepRoom] = {}  # by rows and form: the inputs with choices
        self._outputs: dict[Hashable, Tensor] = {}  # by shape and dtype
        self._answers: dict[Key, Tensor | None] = {}  # None: it was launched once, and is not recorded yet
        self._replays: dict[Key, Replay | None] = {}  # None: it could not be recorded

    @property
    def pool(self) -> Any:
        """The id of the memory pool that the graphs share; None before the first is recorded."""
        return self._cuda.pool

    def __len__(self) -> int:
        return sum(replay is not None for replay in self._replays.values())

    def run(
        self, step: GraphStep, rows: LaneRows, compute: Compute, before_replay: Callable[[], None] = _nothing
    ) -> Tensor:
        """The answer `[T, H]` of `rows`, as `compute` gives it for them; a new tensor.

        The first step of a size runs as it is and warms its kernels, the second is recorded, and from then
        on it is replayed, after `before_replay`. What cannot be recorded goes on running as it is, padded
        alike, with a warning.
        """
        own, padded = rows.hidden.shape[0], step.padded
        form = _form(rows)
        key = Key(step.layer, padded, form, step.kind)
        inputs = self._filled(rows, padded if step.brings else 0, form)
        if key not in self._answers:
            answer = compute(inputs, step.launched)
            self._answers[key] = self._shared_output(answer)
            return answer[:own]
        if key not in self._replays:
            self._replays[key] = self._recorded(key, inputs, step.recorded, compute)
        replay = self._replays[key]
        if replay is None:
            return compute(inputs, step.launched)[:own].clone()
        before_replay()
        replay()
        found = self._answers[key]
        assert found is not None
        return found[:own].clone()

    def recorded(self, step: GraphStep, rows: LaneRows) -> Recorded | None:
        """The graph of a step whose rows are filled into its `room`; None where it is not recorded yet.

        It stays true as long as this does and the layer is not forgotten.
        """
        form = _form(rows)
        key = Key(step.layer, step.padded, form, step.kind)
        replay, answer = self._replays.get(key), self._answers.get(key)
        if replay is None or answer is None or not self._in_place(rows, step.padded, form):
            return None
        return Recorded(replay, answer[: rows.hidden.shape[0]])

    def _in_place(self, rows: LaneRows, padded: int, form: Hashable) -> bool:
        """Whether `rows` are the first of a `room`, which is filled; also where they are none."""
        room, count = self._rooms.get((padded, form)), rows.hidden.shape[0]
        if room is None:
            return False
        same = count > 0 and rows.hidden.data_ptr() == room.rows.hidden.data_ptr()
        return room.parts.get(count) is rows or same

    def _shared_output(self, answer: Tensor) -> Tensor | None:
        """Where graphs of many rows leave their answers, all layers in one place; None for those of few,
        which keep their own.
        """
        if answer.shape[0] <= OWN_ANSWER_ROWS:
            return None
        return self._outputs.setdefault((*answer.shape, answer.dtype), torch.empty_like(answer))

    def room(self, padded: int, widths: tuple[int, int], dtype: torch.dtype) -> StepRoom:
        """The fixed input of graphs of `padded` rows with choices, to be filled before `run` is given rows of
        it. widths: H and K.
        """
        hidden, top_k = widths
        form = _form(empty_input(hidden, top_k, dtype))
        room = self._rooms.get((padded, form))
        if room is None:
            room = StepRoom.of(torch.zeros((padded, hidden), dtype=dtype, device=self._device), top_k)
            room.routes.zero_()
            self._rooms[padded, form], self._inputs[padded, form] = room, room.rows
        return room

    def forget(self, layer: int) -> None:
        """Drops the graphs of `layer`, for which what they recorded has changed."""
        self._answers = {key: answer for key, answer in self._answers.items() if key.layer != layer}
        self._replays = {key: replay for key, replay in self._replays.items() if key.layer != layer}

    def _recorded(
        self, key: Key, inputs: LaneRows, lanes: tuple[int, ...], compute: Compute
    ) -> Replay | None:
        output = self._answers[key]

        def step() -> None:
            self.recording = True
            try:
                answer = compute(inputs, lanes)
            finally:
                self.recording = False
            if output is None:
                self._answers[key] = answer
            else:
                output.copy_(answer)

        try:
            return self._capture(step)
        except RuntimeError as error:
            log.warning("layer %d, %d rows: no CUDA graph, steps are launched: %s", *key[:2], error)
            return None

    def _filled(self, rows: LaneRows, padded: int, form: Hashable) -> LaneRows:
        """The fixed input of `padded` rows, holding `rows`; those past them are not valid."""
        inputs = self._inputs.get((padded, form))
        if inputs is not None and self._in_place(rows, padded, form):
            return inputs
        if inputs is None and isinstance(rows, LaneInput):
            widths = (rows.hidden.shape[1], rows.experts.shape[1])
            inputs = self.room(padded, widths, rows.hidden.dtype).rows
        elif inputs is None:
            inputs = rows.each(
                lambda column: column.new_zeros((padded, *column.shape[1:]), device=self._device)
            )
            self._inputs[padded, form] = inputs
        inputs.valid.zero_()
        for into, column in zip(inputs.columns(), rows.columns(), strict=True):
            into[: column.shape[0]].copy_(column, non_blocking=True)
        return inputs


def _form(rows: LaneRows) -> Hashable:
    """What a graph's input is like, but for its rows."""
    return (type(rows), *((column.dtype, column.shape[1:]) for column in rows.columns()))


class CudaCapture:
    """Graphs that share one memory pool: they run one after another, and answers are copied out at once."""

    def __init__(self) -> None:
        self.pool: Any = None  # torch names no public type for its handle

    def __call__(self, work: Callable[[], None]) -> Replay:
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            # other threads go on: experts are copied in while steps are recorded
            with (
                _no_collection(),
                torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"),
            ):
                work()
        except RuntimeError:
            self.pool = None  # torch leaves it as one that is recorded to, and would refuse every later graph
            raise
        replay: Replay = graph.replay
        return replay


@contextmanager
def _no_collection() -> Iterator[None]:
    """A context without Python's collector of cycles: a graph that it finds is destroyed by whatever thread
    it runs in, and CUDA refuses that to a thread that records, and ends the recording.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
