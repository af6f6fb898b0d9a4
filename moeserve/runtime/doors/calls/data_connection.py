"""`DataConnection`: one caller's connection to a lane past gRPC, and the thread that reads it.

It has one call under way: its thread reads the request and begins the call, and whoever ends that sends the
answer, as far as the connection takes it at once. The rest is sent by the connection's thread, so that a
caller who does not read holds nobody up.

Rows are received in a region of the rank's, which a device reads and writes, and the answer is sent from
there: to the door they are a call in shared memory. Where the rank launches steps before their rows are
there, a connection has a device lane of it, over which its thread makes the calls itself (`ConnectionLane`).
"""

from __future__ import annotations

import logging
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from moeserve.proto import moe_pb2
from moeserve.proto.transports.awake import Awake
from moeserve.proto.transports.fine_poll import FinePoll
from moeserve.proto.transports.frames import Buffers, Connection, FrameReader, frame_of, sent_of
from moeserve.runtime.doors.calls.admission import Admission
from moeserve.runtime.doors.calls.connection_lane import ConnectionLane, OwnLanes
from moeserve.runtime.doors.calls.connection_region import ConnectionRegion
from moeserve.runtime.doors.calls.framing import check_framing
from moeserve.runtime.doors.calls.lane_stream import Begins, Started
from moeserve.runtime.doors.deadlines import Observe, waited_out
from moeserve.runtime.doors.failures import status_of
from moeserve.runtime.doors.operations import BadRequest
from moeserve.runtime.doors.payloads.regions import Regions
from moeserve.runtime.doors.payloads.wake import Wake
from moeserve.runtime.errors import DeadlinePassed, GroupUnavailable, LaneFull
from moeserve.runtime.keys.grants import Refused
from moeserve.runtime.keys.guard import Still, let_in

log = logging.getLogger(__name__)

ASIDE_BYTES = 1 << 18
"""Answers from this size on are sent by the connection's thread: who ends calls has others to end."""

ANSWERED = 2
"""Times a request's bytes count for it: its answer is about as large."""

DATA_CONNECTION = "DataConnection"
"""How metrics of requests name these calls."""


class Late(OSError):
    """The other end did not do its part in time."""


@dataclass(frozen=True, eq=False)
class Terms:
    """What all connections of a lane have in common."""

    door: Begins
    regions: Regions
    admission: Admission
    most_bytes: int  # of one message with its data
    rooms: threading.BoundedSemaphore  # of which each region takes one
    lanes: OwnLanes | None  # None: calls go over none
    observe: Observe  # is told of calls that are refused here


class _Asked:
    """A request that is read, what is wrong with its message, and the bytes that count for it on its way.

    It counts by what has come of it: who claims much in a header, and sends nothing, keeps no call out.
    """

    def __init__(self, admission: Admission, peer: str) -> None:
        self.request, self.wrong = moe_pb2.ForwardRequest(), ""
        self._admission, self._peer = admission, peer
        self._held = 0
        self._parsed = False

    def came(self, nbytes: int) -> None:
        """So many bytes more have come, for which there has to be room. Raises LaneFull."""
        nbytes *= ANSWERED
        self._admission.enlarge(self._peer, self._held, nbytes)
        self._held += nbytes

    def check_room(self, nbytes: int) -> None:
        """Raises LaneFull where there is no room for so many bytes behind what came: they get no memory."""
        self._admission.enlarge(self._peer, self._held, ANSWERED * nbytes)()

    def entered(self, nbytes: int) -> Callable[[], None]:
        """All of its bytes are there: it is a call. Returns what ends it. Raises LaneFull."""
        leave = self._admission.enter(self._peer, ANSWERED * nbytes, self._held)
        self._held = 0
        return leave

    def gone(self) -> None:
        """It comes to nothing."""
        held, self._held = self._held, 0
        self._admission.let_go(held)

    def parse(self, message: bytes) -> None:
        """Parses its message, once."""
        if self._parsed:
            return
        self._parsed = True
        try:
            check_framing(message, forward=True)
            self.request.MergeFromString(message)
        except DecodeError as error:
            self.wrong = f"{len(message)} bytes over a data connection are no ForwardRequest: {error}"


class DataConnection:
    """One caller's connection, by the thread that runs it."""

    def __init__(self, of: Terms, connection: Connection, peer: str, still: Still = let_in) -> None:
        """still: is asked at each call. Who is let in no more has its connection closed: it may open another
        with what is granted now.
        """
        self._still = still
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._of, self._connection, self.peer = of, connection, peer
        self._reader, self._wake = FrameReader(connection), Wake()
        self._limits = of.admission.limits
        self._poll = FinePoll((connection, self._wake))
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(connection, select.POLLIN)
        self._writable.register(connection, select.POLLOUT)
        self._call: Started | None = None  # that is under way
        self._answering = False  # an answer is not sent whole
        self._left: Buffers = []  # of an answer that is to be sent by this connection's thread
        self._ending = False
        self._began = 0.0  # when the request came that was read last
        self._region = ConnectionRegion(of.regions, of.rooms)
        self._lane = ConnectionLane(of.lanes, peer, self._limits.rest_seconds)
        self._awake = Awake(0.0 if of.lanes is None else of.lanes.spin)
        self._lock = threading.Lock()

    @property
    def busy(self) -> bool:
        """Whether a call is under way, or its answer is not sent whole."""
        return self._call is not None or self._answering

    def run(self) -> None:
        """Takes calls until the caller leaves. Raises OSError and ValueError where it does not keep to the
        form, or does its part too late.
        """
        self._connection.settimeout(0)
        sockets = self._connection.fileno()
        while True:
            rests = self._region.held or self._lane.held
            limit = self._limits.rest_seconds * 1000 if rests else None
            if self._lane.takes and not self.busy:  # its caller is alone, and may call at once
                found = self._awake.wait(self._poll, limit)
            else:
                found = self._poll(limit)
            ready = {which for which, _ in found}
            if self._ending:
                return
            if not ready and not self.busy:
                self._region.close()
                self._lane.close()
            if self._wake.fileno() in ready:
                self._wake.clear()
                self._send_left()
            if sockets in ready:
                with self._lock:
                    if self._call is not None:  # the answer is not on its way: nothing may come
                        raise ConnectionAbortedError("its caller left, or sent more, before the answer")
                if not self._take():
                    return

    def _take(self) -> bool:
        """Reads a request and begins its call; False where the caller has left."""
        self._began = time.monotonic()
        until = self._began + self._limits.request_seconds

        def wait() -> None:
            self._wait(self._readable, until, "its message did not come within server.request_seconds")

        header = self._reader.header(wait)
        if header is None:
            return False
        try:
            self._still()
        except Refused as refused:
            raise ConnectionRefusedError(str(refused)) from refused
        nbytes = header[1] + header[2]
        if nbytes > self._of.most_bytes:
            most = self._of.most_bytes
            raise ValueError(f"a frame of {nbytes} bytes, and server.max_message_bytes is {most}")
        asked = _Asked(self._of.admission, self.peer)
        try:
            message, data = self._reader.body(
                header, wait, lambda *more: self._room(asked, *more), asked.came
            )
            asked.parse(message)
            leave = asked.entered(nbytes)
        except LaneFull as full:
            asked.gone()
            self._reader.skip(wait)
            self._refuse(asked.request.job_id, full)
            return True
        except BaseException:
            asked.gone()
            raise
        request, wrong = asked.request, asked.wrong
        if request.hidden.WhichOneof("payload") == "region" or request.HasField("output"):
            wrong = wrong or "hidden: a call over a data connection brings its rows, and takes its answer"
        if data is not None and request.hidden.WhichOneof("payload") is not None:
            wrong = wrong or "hidden: data behind a message that has them already"
        if wrong:
            leave()
            self._refuse(request.job_id, BadRequest(wrong))
        elif data is not None and self._lane.takes:
            self._over_lane(request, leave)
        else:
            try:
                if data is not None:
                    self._region.place(request, data)
            except BaseException:
                leave()
                raise
            self._begin(request, leave)
        return True

    def _room(self, asked: _Asked, message: bytes, nbytes: int) -> memoryview:
        """Memory for the rows behind a message."""
        asked.check_room(nbytes)
        asked.parse(message)
        room = None if asked.wrong else self._lane.room(asked.request, nbytes)
        return self._region.rows(nbytes) if room is None else room

    def _over_lane(self, request: moe_pb2.ForwardRequest, leave: Callable[[], None]) -> None:
        """Makes a call over the lane, by this thread; as one of the door's where the lane gives no answer.
        Raises OSError where its caller has left.
        """
        lanes, started, code = self._of.lanes, time.perf_counter(), "OK"
        assert lanes is not None
        self._region.rest(self._limits.rest_seconds)  # it may be needed again, when others call
        over = moe_pb2.ForwardStreamReply(job_id=request.job_id)
        with self._lock:
            self._answering = True
        try:
            reply = self._lane.answered(request, lambda: not (self._ending or self._readable.poll(0)))
            if reply is None:
                self._lane.place(request)
            else:
                over.reply.CopyFrom(reply)
        except (DeadlinePassed, GroupUnavailable) as failed:
            status = status_of(failed)
            code, reply = status.code, moe_pb2.ForwardReply()
            over.error.CopyFrom(status.as_message())
        except OSError:
            leave()
            took, whole = time.perf_counter() - started, request.timeout_ms / 1000 or None
            late = whole is not None and waited_out(whole - took, whole)
            lanes.observe(DATA_CONNECTION, "inline", "DEADLINE_EXCEEDED" if late else "CANCELLED", took)
            raise
        except BaseException:
            leave()
            raise
        if reply is None:
            self._begin(request, leave)
            return
        leave()
        data = None if over.HasField("error") else self._lane.answer()
        self._left = sent_of(self._connection, frame_of(over.SerializeToString(), data))
        self._send_left()
        self._awake.begins()
        lanes.observe(DATA_CONNECTION, "inline", code, time.perf_counter() - started)

    def _begin(self, request: moe_pb2.ForwardRequest, leave: Callable[[], None]) -> None:
        door, over = self._of.door, list[bool]()  # not empty once the call has ended
        started = Started(door.leave)

        def ended(reply: moe_pb2.ForwardStreamReply) -> None:
            over.append(True)
            leave()
            self._answer(reply)

        with self._lock:
            self._answering = True
        try:
            started.take(door.begin(request, ended, self.peer, DATA_CONNECTION))
        except BaseException:
            if not over:
                leave()
            raise
        with self._lock:
            if not over:
                self._call = started

    def _refuse(self, job_id: str, error: Exception) -> None:
        status = status_of(error)
        self._of.observe(DATA_CONNECTION, "inline", status.code, time.monotonic() - self._began)
        self._answer(moe_pb2.ForwardStreamReply(job_id=job_id, error=status.as_message()))

    def _answer(self, reply: moe_pb2.ForwardStreamReply) -> None:
        """Sends a reply, or leaves that to the connection's thread; from any thread."""
        with self._lock:
            self._call = None  # before the caller has the reply, and sends its next request
            if self._ending:
                return
            if reply.HasField("error"):
                self._region.doubted = self._lane.doubted = True
            data = self._answer_of(reply.reply)
            left = frame_of(reply.SerializeToString(), data)
            if sum(part.nbytes for part in left) < ASIDE_BYTES:
                try:
                    left = sent_of(self._connection, left)
                except OSError as failed:  # its thread sees the same
                    log.debug("a reply could not be sent: %s", failed)
                    left = []
            self._left, self._answering = left, bool(left)
        if left:
            self._wake.ring()

    def _answer_of(self, reply: moe_pb2.ForwardReply) -> memoryview | None:
        """The answer of a reply that lies in the connection's memory; it is in the reply no more."""
        if not self._lane.holds(reply.hidden.region):
            return self._region.answer(reply)
        reply.hidden.ClearField("region")
        return self._lane.answer()

    def _send_left(self) -> None:
        with self._lock:
            left, self._left = self._left, []
        until = time.monotonic() + self._limits.unread_seconds
        while left:
            left = sent_of(self._connection, left)
            if self._ending:
                return
            if left:
                self._wait(self._writable, until, "its caller took no reply within server.unread_seconds")
        self._answering = False

    def _wait(self, ready: select.poll, until: float, why: str) -> None:
        left = until - time.monotonic()
        if left <= 0 or not ready.poll(left * 1000):
            raise Late(why)
        if self._ending:
            raise Late("the lane is stopping")

    def end(self) -> None:
        """Ends it, from any thread."""
        self._ending = True
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            log.debug("a data connection was closed already: %s", error)
        self._wake.ring()

    def close(self) -> None:
        """The call under way is given up; by the connection's thread, as its last."""
        with self._lock:
            self._ending, call = True, self._call
            self._call, self._left, self._answering = None, [], False
        if call is not None:
            call.give_up()
        self._region.close()
        self._lane.close()
        self._wake.close()
