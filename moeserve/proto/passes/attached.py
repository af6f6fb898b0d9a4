"""`AttachedLane`: a caller's end of a device lane, and `Pass`, what it runs on it. Needs numpy and grpcio.

lane = AttachedLane.attach("127.0.0.1:50051", Wanted("decoder-0", rows=64))
with lane.begin([0, 1, 2]) as run:
    for layer in (0, 1, 2):
        run.post(0, hidden, Choice(ids, weights))  # of this layer; stage 0
        hidden = hidden + run.take(0)
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeserve.proto import moe_pb2, moe_pb2_grpc
from moeserve.proto.channel import MAX_MESSAGE_BYTES
from moeserve.proto.client.batch import Choice, Logits
from moeserve.proto.client.lanes import check_serving
from moeserve.proto.client.sync_link import Link
from moeserve.proto.credentials import Credentials
from moeserve.proto.errors import (
    DeadlineExceeded,
    InvalidArgument,
    MoeError,
    NotFound,
    Unavailable,
    WeightsChanged,
)
from moeserve.proto.host_id import host_id
from moeserve.proto.passes import mailbox as m
from moeserve.proto.passes.mailbox import MailboxLayout, Status, fence, tag_of
from moeserve.proto.tensors import Array, Plain, Spec, TensorError, known, plain
from moeserve.proto.transports.shared_memory import RemoteRegion

SPINS = 50
"""Looks at an answer's tag one right after the other; later ones come after an eighth of the wait."""

LONGEST_LOOK = 0.001
ALIVE_SECONDS = 0.05
"""Between looks whether the rank's process is still there, while an answer is waited for."""


class PassLate(MoeError, TimeoutError):
    """The rows of a step did not come in time, and the pass has ended. It may be begun again."""


@dataclass(frozen=True)
class Wanted:
    """What a caller asks for. name: its own; rank: whose lane, None = one of this host's, by the name."""

    name: str
    rows: int = 64  # most of a step
    stages: int = 1  # most steps under way at once
    dtype: str = "bf16"  # of hidden states and answers: fp32, bf16, fp16
    device: str = "cpu"  # that the rows come from
    model: str = ""
    rank: int | None = None
    timeout: float = 60.0  # seconds for attaching, and for an answer
    credentials: Credentials | None = field(default=None, repr=False)


class AttachedLane:
    """A device lane. One thread uses it; one pass runs on it at a time. `close` detaches it."""

    def __init__(self, link: Link, wanted: Wanted, made: moe_pb2.AttachLaneReply) -> None:
        self.wanted = wanted
        self.layers = tuple(made.layers)  # that passes may name
        self.patience = made.patience_seconds
        self.layout = MailboxLayout.of(
            (wanted.rows, wanted.stages), (made.hidden, made.experts, made.top_k), wanted.dtype
        )
        self._link, self._name = link, made.mailbox
        self._mailbox = RemoteRegion.open(_region(made.mailbox, made.mailbox_bytes, made.socket))
        try:
            self._answers = RemoteRegion.open(_region(made.answers, made.answers_bytes, made.socket))
        except BaseException:
            self._mailbox.close()
            raise
        self.box = self._mailbox.bytes().cast("Q")
        self.out = self._answers.bytes().cast("Q")
        self.number = 0  # of the last pass
        self._running: Pass | None = None

    @classmethod
    def attach(cls, address: str, wanted: Wanted) -> AttachedLane:
        """Attaches to a rank of the service at `address` that shares memory with this process.

        Raises MoeError with reason `name_taken`, `lanes_taken`, `device_refused`; InvalidArgument for sizes
        that do not fit; NotFound where no rank is on this host; Unavailable where the service does not serve.
        """
        lane = _lane_of(address, wanted)
        link = Link(lane.address, MAX_MESSAGE_BYTES, wanted.credentials)
        try:
            return cls._attached(link, wanted)
        except BaseException:
            link.close()
            raise

    @classmethod
    def _attached(cls, link: Link, wanted: Wanted) -> AttachedLane:
        stub = moe_pb2_grpc.DeviceLaneServiceStub(link.channel)  # type: ignore[no-untyped-call]
        request = moe_pb2.AttachLaneRequest(
            model=wanted.model,
            name=wanted.name,
            device=wanted.device,
            dtype=known("dtype", wanted.dtype).code,
            rows=wanted.rows,
            stages=wanted.stages,
        )
        made = link.unary(stub.AttachLane, request, wanted.timeout)
        try:
            return cls(link, wanted, made)
        except BaseException:  # the name is free again at once
            with suppress(MoeError):
                link.unary(stub.DetachLane, moe_pb2.DetachLaneRequest(mailbox=made.mailbox), DETACH_SECONDS)
            raise

    @property
    def alive(self) -> bool:
        """Whether the rank's process keeps the lane."""
        return self._mailbox.alive and self._answers.alive

    def begin(
        self,
        layers: Sequence[int],
        *,
        stages: int = 1,
        standing: bool = False,
        any_weights: bool = False,
        weights_version: int = 0,
    ) -> Pass:
        """Announces a pass over `layers` in this order; each of its stages goes through them by itself.

        standing: it goes through them again and again, without another announcement, until it is left.
        any_weights: its steps may have different versions of the weights. weights_version: the one that they
        must have, 0 = the first one's. What is wrong is told by the first `take`. A pass that still runs is
        left before.
        """
        if not 0 < len(layers) <= m.MOST_LAYERS:
            raise InvalidArgument(
                "INVALID_ARGUMENT", "bad_pass", f"{len(layers)} layers; a pass has 1 to {m.MOST_LAYERS}"
            )
        if self._running is not None:
            self._running.leave()
        number = self.number = self.number % m.LAST_NUMBER + 1
        flags = (m.STANDING if standing else 0) | (m.ANY_WEIGHTS if any_weights else 0)
        box = self.box
        box[m.STEPS], box[m.STAGES], box[m.FLAGS] = len(layers), stages, flags
        box[m.WANTED_VERSION] = weights_version
        for at, layer in enumerate(layers):
            box[m.LAYERS + at] = layer
        fence()
        box[m.ANNOUNCED] = number
        self._running = Pass(self, number, tuple(layers), stages)
        return self._running

    def view(self, place: int, spec: Spec) -> Plain:
        """Memory of the mailbox."""
        return self._mailbox.view(place, spec)

    def answer(self, stage: int, rows: int) -> Plain:
        """Memory that holds a stage's answer."""
        return self._answers.view(self.layout.answer(stage), self.layout.hidden_spec(rows))

    @property
    def memory(self) -> tuple[memoryview, memoryview]:
        """All bytes of the mailbox and of the answers, mapped for as long as the lane."""
        return self._mailbox.bytes(), self._answers.bytes()

    def text(self) -> str:
        """What the rank said of the pass that ended last."""
        length = min(self.out[m.TEXT_BYTES], m.MOST_TEXT)
        return bytes(self._answers.bytes()[m.TEXT : m.TEXT + length]).decode(errors="replace")

    def close(self) -> None:
        """Detaches the lane; a pass that runs ends. It never fails: a rank that is gone has no lane."""
        stub = moe_pb2_grpc.DeviceLaneServiceStub(self._link.channel)  # type: ignore[no-untyped-call]
        request = moe_pb2.DetachLaneRequest(mailbox=self._name)
        with suppress(MoeError):  # the rank sees that the leases end
            self._link.unary(stub.DetachLane, request, DETACH_SECONDS)
        self._mailbox.close()
        self._answers.close()
        self._link.close()

    def __enter__(self) -> AttachedLane:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


DETACH_SECONDS = 5.0
"""For a rank to answer that a lane is detached."""


class Pass:
    """A pass that was announced. `post` and `take` alternate for each stage; other stages go on meanwhile."""

    def __init__(self, lane: AttachedLane, number: int, layers: tuple[int, ...], stages: int) -> None:
        self.number, self.layers = number, layers
        self._lane = lane
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

    def first(self, stage: int) -> bool:
        """Whether a stage is at the first layer, of a round."""
        return self._steps[stage] % len(self.layers) == 0

    def post(self, stage: int, hidden: Array, route: Choice | Logits) -> None:
        """Brings the rows of the stage's next step: `hidden` [T, H] of the lane's dtype, with ids int32 or
        int64 and weights, or logits, of float32. They are copied. Raises TensorError.
        """
        lane, layout = self._lane, self._lane.layout
        rows = plain(hidden, "hidden", dtype=lane.wanted.dtype if lane.wanted.dtype == "bf16" else "")
        count = rows.storage.shape[0] if rows.storage.ndim else 0
        if rows.spec != layout.hidden_spec(count):
            raise TensorError("hidden", f"{rows.spec}; this lane takes {layout.hidden_spec(count)}")
        room, columns = self.room(stage, count), (rows, *self._columns(route, count))
        for into, column in zip(room, columns, strict=True):
            if column is not None:
                np.copyto(into.storage, column.storage)
        self.send(stage, count, logits=isinstance(route, Logits))

    def room(self, stage: int, count: int) -> tuple[Plain, Plain, Plain, Plain]:
        """Memory for `count` rows of the stage's next step, to be filled before `send`: hidden states, and
        ids int32 with weights float32, or logits float32. Raises TensorError for more than the lane takes.
        """
        if self._rows[stage] is not None:
            raise ValueError(f"stage {stage} has a step under way; take its answer first")
        lane, layout = self._lane, self._lane.layout
        if count > layout.rows:
            raise TensorError("hidden", f"{count} rows; this lane was attached with {layout.rows} at most")
        specs = (layout.hidden_spec(count), *layout.route_specs(count))
        places = layout.columns(stage)
        hidden, ids, weights, logits = (lane.view(*one) for one in zip(places, specs, strict=True))
        return hidden, ids, weights, logits

    def send(self, stage: int, count: int, *, logits: bool = False) -> None:
        """Says that the stage's rows are in their `room`: its next step may begin."""
        box, head = self._lane.box, self._lane.layout.header(stage)
        box[head + m.LAYER], box[head + m.STAGE], box[head + m.COUNT] = self.layer(stage), stage, count
        box[head + m.KIND] = m.LOGITS if logits else m.CHOICE
        fence()
        box[head + m.TAG] = tag_of(self.number, self._steps[stage])
        self._rows[stage] = count

    def _columns(self, route: Choice | Logits, count: int) -> tuple[Plain | None, Plain | None, Plain | None]:
        """Ids, weights and logits as the mailbox holds them."""
        specs = dict(zip(("ids", "weights", "logits"), self._lane.layout.route_specs(count), strict=True))
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
        return Plain(found.dtype, found.storage.copy())

    def arrived(self, stage: int, timeout: float | None = None) -> Plain:
        """Waits as `take` does; the answer where it lies, until the stage's rows are sent again."""
        rows = self._rows[stage]
        if rows is None:
            raise ValueError(f"stage {stage} has no step under way; post its rows first")
        lane = self._lane
        tag, head = tag_of(self.number, self._steps[stage]), lane.layout.answer_header(stage) + m.TAG
        self._wait(lambda: lane.out[head] == tag, timeout)
        fence()
        self._rows[stage] = None
        self._steps[stage] += 1
        return lane.answer(stage, rows)

    def version(self, stage: int) -> int:
        """The version of the weights that made the stage's last answer."""
        return int(self._lane.out[self._lane.layout.answer_header(stage) + m.VERSION])

    def wait(self, timeout: float | None = None) -> None:
        """Waits until the pass has ended, and raises what it ended with, unless that is OK."""
        self._wait(lambda: False, timeout, ends=True)

    @property
    def status(self) -> Status | None:
        """How the pass ended; None while it runs."""
        out = self._lane.out
        if out[m.ENDED] != self.number:
            return None
        fence()
        return Status(out[m.STATUS])

    def leave(self) -> None:
        """Ends the pass and waits for that. Steps under way are given up."""
        if self.status is None:
            self._lane.box[m.GIVEN_UP] = self.number
            try:
                self._wait(lambda: False, None, ends=True)
            except MoeError:
                if self.status is None:  # the rank is gone; else it ended in another way just then
                    raise

    def _wait(self, there: Any, timeout: float | None, *, ends: bool = False) -> None:
        """Until `there`, or the pass has ended. ends: that is what is waited for."""
        started = looked = time.monotonic()
        limit = self._lane.wanted.timeout if timeout is None else timeout
        spins = 0
        while not there():
            status = self.status
            if status is not None:
                if there():  # it ended after this answer
                    return
                if status is Status.OK and ends:
                    return
                raise _failure(status, self._lane.text())
            spins += 1
            if spins < SPINS:
                time.sleep(0)
                continue
            now = time.monotonic()
            if now - looked > ALIVE_SECONDS:
                looked = now
                if not self._lane.alive:
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
            self._lane.box[m.GIVEN_UP] = self.number


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


def _lane_of(address: str, wanted: Wanted) -> moe_pb2.Lane:
    """The lane to attach to: the rank that is named, or one of this host's, by the caller's name. Callers of
    one name so meet at one rank, which takes only one of them, and others are spread.
    """
    door = Link(address, MAX_MESSAGE_BYTES, wanted.credentials)
    try:
        topology = check_serving(
            door.unary(door.front.GetTopology, moe_pb2.GetTopologyRequest(), wanted.timeout)
        )
    finally:
        door.close()
    here: str = host_id()
    lanes = [lane for lane in topology.lanes if here and lane.host_id == here]
    if wanted.rank is not None:
        lanes = [lane for lane in lanes if lane.rank == wanted.rank]
    if lanes:
        return lanes[zlib.crc32(wanted.name.encode()) % len(lanes)]
    which = "no rank" if wanted.rank is None else f"not rank {wanted.rank}"
    raise NotFound(
        "NOT_FOUND", "no_lane", f"{which} of {address} shares memory with this process; call it by MoeClient"
    )


def _region(name: str, size: int, socket: str) -> moe_pb2.CreateRegionReply:
    return moe_pb2.CreateRegionReply(name=name, size=size, socket=socket)
