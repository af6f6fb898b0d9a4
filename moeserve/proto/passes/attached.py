"""`AttachedLane`: a caller's end of a device lane, on which it runs passes. Needs numpy and grpcio.

lane = AttachedLane.attach("127.0.0.1:50051", Wanted("decoder-0", rows=64))
with lane.begin([0, 1, 2]) as run:
    for layer in (0, 1, 2):
        run.post(0, hidden, Choice(ids, weights))  # of this layer; stage 0
        hidden = hidden + run.take(0)
"""

from __future__ import annotations

import os
import re
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol

from moeserve.proto import moe_pb2, moe_pb2_grpc
from moeserve.proto.channel import MAX_MESSAGE_BYTES
from moeserve.proto.client.lanes import check_serving
from moeserve.proto.client.patience import Patience, check_process
from moeserve.proto.client.sync_link import Link
from moeserve.proto.credentials import Credentials
from moeserve.proto.errors import (
    InvalidArgument,
    MoeError,
    NotFound,
    Overloaded,
    Unavailable,
)
from moeserve.proto.host import host_id
from moeserve.proto.passes import mailbox as m
from moeserve.proto.passes.expected import Expected
from moeserve.proto.passes.mailbox import MailboxLayout, fence
from moeserve.proto.passes.memory import LaneMemory
from moeserve.proto.passes.running import Announced, Pass
from moeserve.proto.tensors import known
from moeserve.proto.timeouts import bounded, checked
from moeserve.proto.transports.awake import MOST_AWAKE, awake_seconds

DETACH_SECONDS = 5.0
"""For a rank to answer that a lane is detached."""

SHORTEST_SECONDS = 1e-3
"""The least timeout of what is asked for at the end of the time."""

WORDS, HALF_WORDS = 1 << 64, 1 << 32
"""How many numbers a word of a mailbox can be, and a field of AttachLaneRequest."""

ANY_WIRE = "auto"
"""Asks for rows in the wire that the rank's layers take."""

_COUNT = re.compile(r"[0-9]{1,9}\Z")

REST_LOOK_SECONDS = 0.002
"""Between looks whether a pass that was left has ended."""


@dataclass(frozen=True)
class Wanted:
    """What a caller asks for. name: its own; rank: whose lane, None = one of this host's, by the name."""

    name: str
    rows: int = 64  # most of a step
    stages: int = 1  # most steps under way at once
    dtype: str = "bf16"  # of hidden states and answers: fp32, bf16, fp16
    device: str = "cpu"  # that the rows come from: `cpu`, or `cuda:` and a GPU's UUID
    answers_handle: bytes = field(default=b"", repr=False)  # CUDA IPC, of a GPU's memory for answers
    rows_wire: str = ""  # of a GPU's rows: empty: as they are; `auto`; or a wire by name
    model: str = ""
    rank: int | None = None
    any_rank: bool = False  # or another of this host's, where all lanes of the first are taken
    timeout: float = 60.0  # seconds for attaching, and for an answer
    spin: float | None = None  # seconds awake for an answer, when it is expected; None: as cores are to spare
    credentials: Credentials | None = field(default=None, repr=False)
    buffers: int = 1  # of answers, of rows in host memory: one may stay in each

    def __post_init__(self) -> None:
        if self.spin is not None and not 0 <= self.spin <= MOST_AWAKE:  # nor where it is NaN
            raise ValueError(f"spin={self.spin} must be 0 to {MOST_AWAKE:g} seconds")
        Patience(self.timeout)  # which says what is wrong with it
        for name in ("rows", "stages", "buffers"):
            if not 0 <= getattr(self, name) < HALF_WORDS:
                raise ValueError(f"{name}={getattr(self, name)} is no number of 32 bits from 0 on")


class Way(Protocol):
    """How a lane's caller reaches its rank for all that is no step."""

    def detach(self, mailbox: str, seconds: float) -> None:
        """Has the rank end the lane of this mailbox, and waits so long for its answer. It never fails."""

    def close(self) -> None:
        """It is not needed any more."""


class _Link:
    """By gRPC."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._stub = moe_pb2_grpc.DeviceLaneServiceStub(link.channel)  # type: ignore[no-untyped-call]

    def attach(self, wanted: Wanted, seconds: float) -> moe_pb2.AttachLaneReply:
        made: moe_pb2.AttachLaneReply = self._link.unary(self._stub.AttachLane, request_for(wanted), seconds)
        return made

    def detach(self, mailbox: str, seconds: float) -> None:
        with suppress(MoeError):  # the rank sees that the leases end
            self._link.unary(self._stub.DetachLane, moe_pb2.DetachLaneRequest(mailbox=mailbox), seconds)

    def close(self) -> None:
        self._link.close()


def request_for(wanted: Wanted) -> moe_pb2.AttachLaneRequest:
    """What a rank is asked."""
    return moe_pb2.AttachLaneRequest(
        model=wanted.model,
        name=wanted.name,
        device=wanted.device,
        dtype=known("dtype", wanted.dtype).code,
        rows=wanted.rows,
        stages=wanted.stages,
        answers_handle=wanted.answers_handle,
        rows_wire=wanted.rows_wire,
        answer_buffers=wanted.buffers,
    )


class AttachedLane:
    """A device lane. One thread uses it; one pass runs on it at a time. `close` detaches it."""

    def __init__(self, way: Way, wanted: Wanted, made: moe_pb2.AttachLaneReply) -> None:
        """made: what the rank has answered to `request_for(wanted)`. Raises MoeError where it does not hand
        the lane's memory over; then the lane is not detached.
        """
        self.wanted = wanted
        self.layers = tuple(made.layers)  # that passes may name
        self.patience = made.patience_seconds
        self.sizes = made.hidden, made.experts, made.top_k
        self.rows_wire: str = made.rows_wire  # in which a GPU's rows are to come; empty: as they are
        self.goes_ahead: bool = made.goes_ahead  # its steps may be launched before their rows are there
        self.mailbox_handle = made.mailbox_handle  # CUDA IPC, of the rank's memory for a GPU's rows
        rows = wanted.rows if wanted.device == "cpu" else 1  # of a GPU's, only words lie in host memory
        self.layout = MailboxLayout.of((rows, wanted.stages), self.sizes, wanted.dtype, wanted.buffers)
        self.memory = LaneMemory(self.layout, made)
        self._way = way
        self.regions = made.mailbox, made.answers  # of the rank, by their whole names
        self._detached = False
        awake = awake_seconds() if wanted.spin is None else wanted.spin
        self._expected = [Expected(awake) for _ in range(wanted.stages)]

    @classmethod
    def attach(cls, address: str, wanted: Wanted, timeout: float | None = None) -> AttachedLane:
        """Attaches to a rank of the service at `address` that shares memory with this process.

        timeout: seconds for all of it; None: `wanted.timeout`.

        Raises MoeError with reason `name_taken`, `lanes_taken`, `device_refused`; InvalidArgument for sizes
        that do not fit; NotFound where no rank is on this host; Unavailable where the service does not serve,
        or the rank is away.
        """
        until = time.monotonic() + bounded(wanted.timeout if timeout is None else checked("timeout", timeout))
        lanes = _lanes_of(address, wanted, _left(until))
        for lane in lanes:
            link = _Link(Link(lane.address, MAX_MESSAGE_BYTES, wanted.credentials))
            try:
                return cls._attached(link, wanted, _left(until))
            except BaseException as failed:
                link.close()
                full = isinstance(failed, Overloaded) and wanted.any_rank
                if not full or lane is lanes[-1]:
                    raise
        raise AssertionError("there is always a lane to try")

    @classmethod
    def _attached(cls, link: _Link, wanted: Wanted, seconds: float) -> AttachedLane:
        made = link.attach(wanted, seconds)
        try:
            return cls(link, wanted, made)
        except BaseException:  # the name is free again at once
            link.detach(made.mailbox, DETACH_SECONDS)
            raise

    @property
    def alive(self) -> bool:
        """Whether the rank's process keeps the lane."""
        return self.memory.alive

    @property
    def number(self) -> int:
        """Of the pass that was announced last; 0: none was."""
        return self.memory.box[m.ANNOUNCED]

    def begin(
        self,
        layers: Sequence[int],
        *,
        stages: int = 1,
        standing: bool = False,
        any_weights: bool = False,
        weights_version: int = 0,
        timeout: float | None = None,
    ) -> Pass:
        """Announces a pass over `layers` in this order; each of its stages goes through them by itself.

        standing: it goes through them again and again, without another announcement, until it is left.
        any_weights: its steps may have different versions of the weights. weights_version: the one that they
        must have, 0 = the first one's. What the rank knows to be wrong is told by the first `take`; raises
        InvalidArgument for what no rank takes, and RuntimeError after a fork. A pass that still runs is left
        before, for which it waits so many seconds (`Wanted.timeout` by default). Raises as `Pass.leave`.
        """
        if wrong := _wrong_pass(layers, stages, weights_version):
            raise InvalidArgument("INVALID_ARGUMENT", "bad_pass", wrong)
        if timeout is not None:
            timeout = checked("timeout", timeout)
        check_process(self.memory.process)
        box, last = self.memory.box, self._announced()
        if last is not None:
            last.leave(timeout)
        number = self.number % m.LAST_NUMBER + 1
        flags = (m.STANDING if standing else 0) | (m.ANY_WEIGHTS if any_weights else 0)
        box[m.STEPS], box[m.STAGES], box[m.FLAGS] = len(layers), stages, flags
        box[m.WANTED_VERSION] = weights_version
        for at, layer in enumerate(layers):
            box[m.LAYERS + at] = layer
        fence()
        box[m.ANNOUNCED] = number
        self.memory.ring()
        return self._pass(Announced(number, tuple(layers), stages))

    def _pass(self, announced: Announced) -> Pass:
        return Pass(self.memory, announced, bounded(self.wanted.timeout), self._expected)

    def _announced(self) -> Pass | None:
        """The pass that was announced last, unless it has ended. By the words that its rank reads: whoever
        announced it may have been interrupted before it knew.
        """
        last = self.number
        return self._pass(Announced(last, (0,), 1)) if last and self.memory.out[m.ENDED] != last else None

    def rest(self, seconds: float) -> bool:
        """Leaves the pass that runs, and waits for its end so long at most. Whether it has ended: the rank
        writes no answer any more.
        """
        run, until = self._announced(), time.monotonic() + checked("seconds", seconds)
        if run is None:
            return True
        run.give_up()
        while run.status is None and self.memory.process == os.getpid() and time.monotonic() < until:
            time.sleep(REST_LOOK_SECONDS)
        return run.status is not None

    def detach(self, seconds: float = DETACH_SECONDS) -> None:
        """Has the rank end the lane, and a pass that runs; its memory stays mapped here until `close`.

        It never fails: a rank that is gone has no lane. seconds: for its answer; 0: it is not asked, and
        ends the lane when it sees that this process has let go of the memory.
        """
        seconds = checked("seconds", seconds)
        if self._detached:
            return
        self._detached = True
        if seconds > 0 and self.memory.process == os.getpid():  # after a fork it is its parent's
            self._way.detach(self.regions[0], seconds)

    def close(self, seconds: float = DETACH_SECONDS) -> None:
        """Detaches the lane as `detach` does, and unmaps its memory."""
        self.detach(seconds)
        self.memory.close()
        self._way.close()

    def __enter__(self) -> AttachedLane:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _wrong_pass(layers: Sequence[int], stages: int, version: int) -> str:
    """What cannot even be said of a pass; empty: all can."""
    if not 0 < len(layers) <= m.MOST_LAYERS:
        return f"{len(layers)} layers; a pass has 1 to {m.MOST_LAYERS}"
    if outside := [layer for layer in layers if not 0 <= layer < WORDS]:
        return f"layer {outside[0]} is not one of 0 to {WORDS - 1}"
    if stages < 1:
        return f"{stages} stages; a pass has at least 1"
    if stages > m.MOST_STAGES:
        return f"{stages} stages; a pass has at most {m.MOST_STAGES}"
    return "" if 0 <= version < WORDS else f"weights_version={version} is not one of 0 to {WORDS - 1}"


def _left(until: float) -> float:
    """Seconds until then, and what a call of gRPC takes at least."""
    return max(SHORTEST_SECONDS, until - time.monotonic())


def _place_of(name: str) -> int:
    """A number for the name, the same in each process; of names that count, as decoder-0 and decoder-1, one
    after another: of a checksum alone the last bits are alike for several of these.
    """
    counted = _COUNT.search(name)
    count = "" if counted is None else counted[0]
    return zlib.crc32(name.removesuffix(count).encode()) + int(count or 0)


def _lanes_of(address: str, wanted: Wanted, seconds: float) -> list[moe_pb2.Lane]:
    """The lanes to attach to, the first first: the rank that is named, or those of this host, by the caller's
    name. Callers of one name so meet at one rank, which takes only one of them, and others are spread.
    """
    door = Link(address, MAX_MESSAGE_BYTES, wanted.credentials)
    try:
        topology = check_serving(door.unary(door.front.GetTopology, moe_pb2.GetTopologyRequest(), seconds))
    finally:
        door.close()
    here: str = host_id()
    lanes = [lane for lane in topology.lanes if here and lane.host_id == here]
    if wanted.rank is not None:
        lanes = [lane for lane in lanes if lane.rank == wanted.rank]
    if lanes:
        first = _place_of(wanted.name) % len(lanes)
        return [*lanes[first:], *lanes[:first]]
    if wanted.rank is not None and wanted.rank in topology.away:
        text = f"rank {wanted.rank} of {address} is away, and waited for; attach again when it is there"
        raise Unavailable("UNAVAILABLE", "no_lane", text)
    which = "no rank" if wanted.rank is None else f"not rank {wanted.rank}"
    raise NotFound(
        "NOT_FOUND", "no_lane", f"{which} of {address} shares memory with this process; call it by MoeClient"
    )
