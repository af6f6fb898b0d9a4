"""`ConnectionLane`: a device lane of the rank's own, over which the calls of one data connection go.

A call that is a message is read, let in, ordered, gathered, launched and answered by three threads, which
take longer than many a step. Over a lane the connection's thread receives the rows where the device looks for
them, and sends the answer from where the device has written it: the step was launched before. To the rank it
is a caller of its host with rows in host memory, and all that is true of those is true of it.

That is worth it while one connection calls alone. Steps of several are calls over a lane as well, which its
rank looks for, and whose connections' threads look for answers: they take the interpreter from one another.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from moeserve.proto import moe_pb2
from moeserve.proto.client.patience import Clock, Patience
from moeserve.proto.errors import DeadlineExceeded, MoeError
from moeserve.proto.passes.attached import DETACH_SECONDS, AttachedLane, Wanted, request_for
from moeserve.proto.passes.called_lane import CalledLane, Rounds, room_for
from moeserve.proto.passes.mailbox import MailboxLayout
from moeserve.proto.passes.refusals import Refusals
from moeserve.proto.passes.running import Columns, Pass, narrowed
from moeserve.proto.tensors import Plain, Spec, TensorError, as_numpy, describe_into, dtype_of, known
from moeserve.proto.timeouts import LONGEST_SECONDS
from moeserve.runtime.doors.deadlines import Observe
from moeserve.runtime.doors.device_errors import DeviceRefused, LanesTaken, NameTaken, UnknownLane
from moeserve.runtime.doors.payloads.errors import RegionLimit
from moeserve.runtime.doors.payloads.regions import Regions
from moeserve.runtime.errors import DeadlinePassed, GroupUnavailable

log = logging.getLogger(__name__)

FEWEST_CALLS = 10
"""Of a connection that a lane could take, with the one for which it is attached: that takes as long as some
calls, and by then it is known over which layers they go round (`Rounds`), so that a standing pass begins at
once. Those count, too, that came while others called.
"""

ATTACHED_SECONDS = 0.25
"""That a call has to have left for which a lane is attached: on a GPU that has taken 40 ms."""

ALONE_SECONDS = 0.25
"""For which no other connection of the rank has called, and no step or run has come of another lane of the
group, when a connection's calls go over its lane.
"""

LOOK_SECONDS = 0.25
"""Between looks whether a caller whose answer is waited for is still there."""

LEAVE_SECONDS = 0.25
"""For a pass that gave no answer to end, so that nothing is written to the lane any more."""

ANY = "", None
"""For which lanes a refusal counts."""

Route = tuple[Plain | None, Plain | None, Plain | None]
"""Ids, weights and logits."""


class Alone:
    """Which connection of a rank has called last, and since when no other one has. From any thread.

    In a group of several, two lanes whose steps are launched ahead wait for each other's callers in turns.
    """

    def __init__(self, others_at: Callable[[], float] = lambda: -math.inf) -> None:
        """others_at: when a step or run came last of other lanes of the group."""
        self._others_at = others_at
        self._last: object = None
        self._since = -math.inf

    def is_(self, connection: object) -> bool:
        """Notes a call of a connection; whether it has called alone for a while."""
        now = time.monotonic()
        if connection is not self._last:
            self._since = now if self._last is not None else -math.inf  # before the first there was none
            self._last = connection
        return now - max(self._since, self._others_at()) >= ALONE_SECONDS


REFUSALS = (DeviceRefused, LanesTaken, NameTaken, RegionLimit, TensorError, MoeError)


@dataclass(frozen=True, eq=False)
class OwnLanes:
    """What data connections may have of their rank's device lanes, and what lanes take."""

    attach: Callable[[moe_pb2.AttachLaneRequest, str], moe_pb2.AttachLaneReply]
    detach: Callable[[str], None]  # by the name of the mailbox
    model: str
    layers: frozenset[int]
    sizes: tuple[int, int, int]  # hidden size, experts, experts a token
    dtype: str  # of hidden states that need no conversion
    rows: int  # of a step, at most
    regions: Regions
    rooms: threading.BoundedSemaphore  # of which each lane takes one: the others are for callers of the host
    stopping: Callable[[], str]  # why no further call is taken; empty: they are
    observe: Observe
    alone: Alone = field(default_factory=Alone)
    spin: float = 0.0  # seconds for which an answer, and the next call, are looked for again and again
    launched: bool = True  # only lanes whose steps are launched before their rows: others save nothing


class _Here:
    """How this process reaches the rank that it is."""

    def __init__(self, of: OwnLanes) -> None:
        self._of = of

    def detach(self, mailbox: str, seconds: float) -> None:
        try:
            self._of.detach(mailbox)
        except UnknownLane as gone:  # the rank stops
            log.debug("a lane of a data connection: %s", gone)

    def close(self) -> None:
        """There is nothing to close."""


class ConnectionLane:
    """One connection's, by its thread; attached when several calls came that it takes."""

    def __init__(self, of: OwnLanes | None, peer: str, rest_seconds: float = math.inf) -> None:
        """of: None: calls go another way. rest_seconds: after which a lane goes that was not used."""
        self._of, self._peer, self._rest_seconds = of, peer, rest_seconds
        self._line: CalledLane | None = None
        self._columns: Columns | None = None  # of the call whose rows are received
        self._calls = 0  # that a lane could take
        self._rounds = Rounds()  # over whose layers they went
        self.doubted = False  # a call with rows in its memory went another way, and has no answer
        self._refusals = Refusals()

    @property
    def held(self) -> bool:
        """Whether there is one."""
        return self._line is not None

    @property
    def takes(self) -> bool:
        """Whether the rows that `room` was last asked for go over it."""
        return self._columns is not None

    def room(self, request: moe_pb2.ForwardRequest, nbytes: int) -> memoryview | None:
        """Memory of the lane for so many bytes of a request's rows; None where they go another way. No call
        is under way.
        """
        self._columns = None
        alone, rows = self._alone(), self._rows(request, nbytes)
        if not rows:
            return None
        self._calls += 1
        if not alone or (line := self._line_for(rows, request.timeout_ms / 1000 or math.inf)) is None:
            now = time.monotonic()  # nearly: when it is answered, is not known here
            self._rounds.called(request.layer, now, now)
            return None
        hidden, *places = line.lane.memory.room(0, rows)
        route = _route(request, places)
        if route is None:  # what is wrong with it is said by the door
            return None
        self._columns = hidden, *route
        return hidden.storage.data.cast("B")

    def _alone(self) -> bool:
        """Whether no other connection has called lately; else its pass ends, and its lane after a while."""
        if self._of is None or self._of.alone.is_(self):
            return True
        if (line := self._line) is not None:
            if line.used_at < time.monotonic() - self._rest_seconds:
                self.close()
            else:
                line.drop()
        return False

    def _rows(self, request: moe_pb2.ForwardRequest, nbytes: int) -> int:
        """How many rows of a lane's a request brings; 0 where it is not for a lane."""
        of, hidden = self._of, request.hidden
        if of is None or request.layer not in of.layers or request.model not in ("", of.model):
            return 0
        if len(hidden.shape) != 2 or hidden.shape[1] != of.sizes[0] or request.HasField("output"):
            return 0
        dtype, rows = known("dtype", of.dtype), int(hidden.shape[0])
        alike = hidden.dtype == dtype.code and nbytes == rows * of.sizes[0] * dtype.storage.itemsize
        return rows if alike and 0 < rows <= of.rows and not of.stopping() else 0

    def _line_for(self, rows: int, seconds: float) -> CalledLane | None:
        """The lane, if it takes so many rows; it is attached after some calls, for one that has the time."""
        line = self._line
        if line is not None and self.doubted:
            self.doubted = False
            if self._of is not None and any(self._of.regions.holds(name) > 1 for name in line.lane.regions):
                self.close()  # its memory goes when nothing touches it
                line = None
        if line is not None and self._kept(line) and rows <= line.lane.wanted.rows:
            return line
        if self._calls < FEWEST_CALLS or seconds < ATTACHED_SECONDS:
            return None
        if not self._refusals.asks(ANY, rows, several=False):
            return None
        self.close()
        self._line = self._attached(rows)
        if self._line is None:
            self._refusals.refused(several=False)
        return self._line

    def _kept(self, line: CalledLane) -> bool:
        """Whether the rank has not detached it."""
        return self._of is not None and all(name in self._of.regions for name in line.lane.regions)

    def _attached(self, rows: int) -> CalledLane | None:
        of = self._of
        assert of is not None
        wanted = Wanted(
            f"connection-{uuid.uuid4().hex[:16]}",
            rows=room_for(rows, of.rows),
            dtype=of.dtype,
            spin=of.spin,
        )
        layout = MailboxLayout.of((wanted.rows, 1), of.sizes, of.dtype)
        needed = layout.mailbox_bytes + layout.answers_bytes
        if 2 * (of.regions.bytes + needed) > of.regions.limits.max_bytes:  # half of them stays others'
            return None
        if not of.rooms.acquire(blocking=False):
            return None
        try:
            made = of.attach(request_for(wanted), self._peer)
            try:
                line = CalledLane(AttachedLane(_Here(of), wanted, made), self._rounds, placed=True)
            except BaseException:
                of.detach(made.mailbox)
                raise
        except REFUSALS as refused:
            of.rooms.release()
            log.debug("a data connection has no device lane now: %s", refused)
            return None
        except BaseException:
            of.rooms.release()
            raise
        if of.launched and not line.lane.goes_ahead:
            line.close(DETACH_SECONDS)
            of.rooms.release()
            return None
        return line

    def answered(
        self, request: moe_pb2.ForwardRequest, there: Callable[[], bool]
    ) -> moe_pb2.ForwardReply | None:
        """The reply to a call whose rows are received, without its data, which `answer` gives; None where the
        lane gives none, and the call goes another way.

        there: whether its caller waits. Raises DeadlinePassed, GroupUnavailable, and ConnectionAbortedError
        where the caller does not.
        """
        line, columns = self._line, self._columns
        if line is None or columns is None:
            raise RuntimeError("no rows were received for a lane")
        clock = Clock(Patience(timeout=request.timeout_ms / 1000 or LONGEST_SECONDS))
        found: tuple[Pass, None] | None = None
        try:
            found = line.asked(
                request.layer,
                columns,
                request.weights_version,
                clock,
                lambda run: _await(run, clock, there),
            )
        except DeadlineExceeded as late:
            text = f"layer {request.layer}: no answer within the deadline"
            raise DeadlinePassed(text) from late
        except ConnectionAbortedError:
            self.close()  # nobody waits until its pass has ended
            raise
        finally:
            if found is None and self._line is line:
                self._rest(line, request.layer)
        if found is None:
            return None
        run, _ = found
        reply = moe_pb2.ForwardReply(epoch=run.epoch(0), weights_version=run.version(0))
        describe_into(reply.hidden, columns[0].spec)
        return reply

    def _rest(self, line: CalledLane, layer: int) -> None:
        """The rank writes no answer to the lane any more; else it is closed. Raises GroupUnavailable."""
        try:
            line.rest(layer, Clock(Patience(timeout=LEAVE_SECONDS)))
        except DeadlineExceeded as late:
            self.close()
            raise GroupUnavailable("a step of this connection's device lane has not ended") from late

    def place(self, request: moe_pb2.ForwardRequest) -> None:
        """Says in a request that goes another way where its rows were received."""
        line, columns = self._line, self._columns
        if line is None or columns is None:
            raise RuntimeError("no rows were received for a lane")
        rows, lane = columns[0].storage, line.lane
        if not self._kept(line):
            request.hidden.data = rows.tobytes()
            self.close()
            return
        places = (request.hidden.region, lane.layout.columns(0)[0]), (request.output, lane.layout.answer(0))
        for name, (place, offset) in zip(lane.regions, places, strict=True):
            place.name, place.offset, place.size = name, offset, rows.nbytes

    def answer(self) -> memoryview:
        """The answer to the last call, which stays until the rows of the next are asked for."""
        line, columns = self._line, self._columns
        if line is None or columns is None:
            raise RuntimeError("no call was answered")
        return line.lane.memory.answer(0, len(columns[0].storage)).storage.data.cast("B")

    def holds(self, region: moe_pb2.Region) -> bool:
        """Whether that is where its answers lie."""
        return self._line is not None and region.name == self._line.lane.regions[1]

    def close(self) -> None:
        """Detaches it."""
        line, self._line, self._columns = self._line, None, None
        if line is not None and self._of is not None:
            line.close(DETACH_SECONDS)
            self._of.rooms.release()


def _await(run: Pass, clock: Clock, there: Callable[[], bool]) -> None:
    """Waits for the answer of the run's only stage. Raises MoeError, and ConnectionAbortedError."""
    while True:
        try:
            run.arrived(0, min(LOOK_SECONDS, clock.remaining))
        except DeadlineExceeded as late:
            if not clock.remaining:
                raise
            if not there():
                raise ConnectionAbortedError("its caller left, or sent more, before the answer") from late
        else:
            return


def _route(request: moe_pb2.ForwardRequest, places: list[Plain]) -> Route | None:
    """Ids, weights and logits as far as a request brings them; None where they are not like their places."""
    ids, weights, logits = places
    if request.WhichOneof("route") == "logits":
        found = _column(request.logits, logits)
        return None if found is None else (None, None, found)
    chosen, weighed = _column(request.choice.ids, ids), _column(request.choice.weights, weights)
    return None if chosen is None or weighed is None else (chosen, weighed, None)


def _column(message: moe_pb2.Tensor, place: Plain) -> Plain | None:
    """What a message has for a place of the lane; None where it is not like it."""
    dtype, shape = dtype_of(message), tuple(message.shape)
    if dtype is None or shape != place.storage.shape:
        return None
    try:
        found = as_numpy(message.data, Spec(dtype, shape), "route")
        if dtype.name == "int64":
            found = narrowed(found)
    except TensorError:
        return None
    return found if found.dtype is place.dtype else None
