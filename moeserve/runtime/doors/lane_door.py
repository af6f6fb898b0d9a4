"""`LaneDoor`: a rank's own data endpoint. It checks requests, hands their rows to the lane, and answers."""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc

from moeserve.proto import moe_pb2, moe_pb2_grpc
from moeserve.proto.host import usable_cores
from moeserve.proto.transports.carried import Carried
from moeserve.runtime.doors.calls.data_connection import DATA_CONNECTION
from moeserve.runtime.doors.calls.data_connections import Offer
from moeserve.runtime.doors.calls.lane_stream import LaneStream, Started
from moeserve.runtime.doors.calls.lease_calls import LeaseCalls
from moeserve.runtime.doors.calls.rows import Leave, RowAdmission, RowLimits
from moeserve.runtime.doors.deadlines import Observe, seconds_left, waited_out
from moeserve.runtime.doors.failures import GrpcStatus, guarded, status_of
from moeserve.runtime.doors.payloads.regions import Regions
from moeserve.runtime.doors.request import CheckedRequest, RequestReader, transport_of
from moeserve.runtime.errors import CallerLeft, DeadlinePassed, GroupUnavailable
from moeserve.runtime.rank.lanes.lane import Lane
from moeserve.runtime.rank.lanes.lane_call import LaneCall
from moeserve.runtime.rank.transfers.transfers import AHEAD_BYTES
from moeserve.runtime.step import Stamp

log = logging.getLogger(__name__)

NOT_THE_FRONT_DOOR = GrpcStatus(
    "FAILED_PRECONDITION",
    "not_the_front_door",
    "a lane runs experts; the service's own address (server.host and server.port) answers this",
)
"""How a lane refuses the calls of the front door."""


NO_DATA_CONNECTIONS = GrpcStatus(
    "FAILED_PRECONDITION",
    "no_data_connections",
    "this lane takes calls by gRPC alone: server.data_connections is off",
)
"""How a lane refuses connections past gRPC."""

ASIDE_BYTES = 1 << 20
"""Answers of this size on are copied by threads of their own while other calls are under way: to wake one
takes as long as to copy 0.5 MB.
"""

ASIDE_THREADS = max(2, min(8, usable_cores() // 2))


class LaneDoor(moe_pb2_grpc.LaneServiceServicer):
    """Answers LaneService for one rank: Forward, ForwardStream and shared-memory regions.

    Callers of the same host may also send requests over the lease of a region, and all over data connections,
    past gRPC.
    """

    carries = True  # Forward takes and gives messages with large data beside them

    def __init__(
        self,
        reader: RequestReader,
        lane: Lane,
        regions: Regions,
        weights_version: Callable[[], int],
        observe: Observe,
    ) -> None:
        self.admission = RowAdmission(RowLimits())  # of rows; its owner may set another before calls come
        self._stopping = ""  # why no further call is taken from streams and over leases
        self._reader = reader
        self._lane = lane
        self._regions = regions
        self._weights_version = weights_version
        self._observe = observe
        self._aside = ThreadPoolExecutor(ASIDE_THREADS, "aside")  # holds no more than the lane holds calls
        self.offer_connection: Offer | None = None  # for calls past gRPC; None: none is taken
        self.leases = LeaseCalls(self, observe)
        regions.take_call = self.leases.take_packet

    @property
    def stopping(self) -> str:
        """Why no further call is taken from streams, over leases, and from device lanes; empty: they are."""
        return self._stopping

    def has_calls(self, own: int) -> bool:
        """Whether calls wait for steps beside so many: steps of device lanes are calls, too, as long as those
        count them.
        """
        return self._lane.in_flight > own

    def drain(self, reason: str) -> None:
        """Refuses calls that come on streams and over leases from now on; those taken go on. Unary calls are
        for the endpoint to refuse, which knows when they began.
        """
        self._stopping = reason

    def Forward(
        self,
        request: moe_pb2.ForwardRequest | Carried[moe_pb2.ForwardRequest],
        context: grpc.ServicerContext,
    ) -> moe_pb2.ForwardReply | Carried[moe_pb2.ForwardReply]:
        """Runs one batch and waits for its answer."""
        data = None
        if isinstance(request, Carried):
            data = request.data
            request = request.message
        started, transport, code = time.perf_counter(), transport_of(request), "OK"
        leave: Leave = _not_held
        remaining = seconds_left(context)
        deadline = math.inf if remaining is None else time.monotonic() + remaining

        def enter(rows: int) -> None:
            nonlocal leave
            leave = self._enter(rows, context.peer(), deadline)

        try:
            asked = self._reader.read(request, deadline, data, enter)
            try:
                return self._run(asked, context)
            finally:
                asked.close()
        except Exception as error:
            status = status_of(error)
            code = status.code
            status.abort(context)
        finally:
            leave(code)
            self._observe("Forward", transport, code, time.perf_counter() - started)

    def _enter(self, rows: int, peer: str, deadline: float) -> Leave:
        """Lets in the rows of a request, which are there; returns what ends that. Raises LaneFull, and
        DeadlinePassed where its time is over, at a lane that is full as well as at one that holds nothing.

        More rows than a lane ever takes are for the lane to refuse, and none are answered without it.
        """
        if not 0 < rows <= self._lane.most_rows:
            return _not_held
        if deadline <= time.monotonic():
            raise DeadlinePassed("the call's time was over before its rows were let in")
        return self.admission.enter(peer, rows, deadline)

    def _run(
        self, asked: CheckedRequest, context: grpc.ServicerContext
    ) -> moe_pb2.ForwardReply | Carried[moe_pb2.ForwardReply]:
        if not asked.batch.hidden.shape[0]:
            return self._empty(asked)
        call = self._lane.submit(asked.batch)
        if not context.add_callback(lambda: self.leave(call)):  # the RPC is over already
            self.leave(call)  # nor must a thread wait for an answer that nobody takes
        if not call.wait(asked.batch.deadline - time.monotonic()):
            call.give_up(DeadlinePassed(f"layer {asked.batch.layer}: no answer within the deadline"))
        return asked.reply_beside(*call.result())

    def ForwardStream(
        self, request_iterator: Iterator[moe_pb2.ForwardRequest], context: grpc.ServicerContext
    ) -> Iterator[moe_pb2.ForwardStreamReply]:
        """Runs batches as they arrive; replies come as they are ready, under their job ids."""
        replies: queue.SimpleQueue[moe_pb2.ForwardStreamReply | None] = queue.SimpleQueue()
        stream = LaneStream(self, replies, context.peer())
        if not context.add_callback(stream.left):  # the RPC is over already
            stream.left()
        threading.Thread(
            target=stream.consume, args=(request_iterator,), name="forward-stream", daemon=True
        ).start()
        while (reply := replies.get()) is not None:
            yield reply

    def begin_beside(
        self,
        request: moe_pb2.ForwardRequest,
        ended: Callable[[moe_pb2.ForwardStreamReply], None],
        peer: str,
        method: str,
    ) -> Started:
        """Starts a request as `begin` does, in another thread where that takes long. Gives it up by `give_up`
        of what it returns; `ended` gets a reply all the same.
        """
        started = Started(self.leave)

        def begin() -> None:
            try:
                started.take(self.begin(request, ended, peer, method))
            except BaseException as error:
                log.exception("a step of a device lane could not be begun")
                failed = GrpcStatus("INTERNAL", "internal", f"{type(error).__name__}: {error}").as_message()
                ended(moe_pb2.ForwardStreamReply(job_id=request.job_id, error=failed))

        self.aside(request, begin)
        return started

    def aside(self, request: moe_pb2.ForwardRequest, begin: Callable[[], None]) -> None:
        """Begins a call by another thread where that takes long."""
        if self._heavy(request):
            self._aside.submit(begin)
        else:
            begin()

    def _heavy(self, request: moe_pb2.ForwardRequest) -> bool:
        """Whether to begin a call takes long: its reader computes, or its rows go to the device at once, and
        the host has to copy them first as their region is not registered.
        """
        region = request.hidden.region
        copied = region.size >= AHEAD_BYTES and not self._regions.reached(region.name)
        return copied or self._reader.heavy(request)

    def begin(
        self,
        request: moe_pb2.ForwardRequest,
        ended: Callable[[moe_pb2.ForwardStreamReply], None],
        peer: str,
        method: str = "ForwardStream",
    ) -> LaneCall | None:
        """Starts a request of `peer`; `ended` gets its reply, from whichever thread ends it.

        method: as metrics name it. Returns the call, or None for a request that has ended already.
        """
        started = time.perf_counter()
        deadline = time.monotonic() + request.timeout_ms / 1000 if request.timeout_ms else math.inf
        # over a data connection rows come from afar, and lie in a region of its own
        transport = "inline" if method == DATA_CONNECTION else transport_of(request)
        leave: Leave = _not_held
        of_region: Started | None = None
        taken_back: Callable[[], None] = _nothing

        def end(outcome: Callable[[], moe_pb2.ForwardReply]) -> None:
            reply, code = moe_pb2.ForwardStreamReply(job_id=request.job_id), "OK"
            try:
                reply.reply.CopyFrom(outcome())
            except Exception as error:
                status = status_of(error)
                code = status.code
                reply.error.CopyFrom(status.as_message())
            seconds = time.perf_counter() - started
            taken_back()
            leave(code)
            ended(reply)
            self._observe(method, transport, code, seconds)  # after the answer has left

        def fail(error: Exception) -> moe_pb2.ForwardReply:
            raise error

        def enter(rows: int) -> None:
            nonlocal leave
            leave = self._enter(rows, peer, deadline)

        try:
            if self._stopping:
                raise GroupUnavailable(self._stopping)
            asked = self._reader.read(request, deadline, None, enter)
        except Exception as error:
            end(lambda error=error: fail(error))  # type: ignore[misc]
            return None

        def reply(call: LaneCall) -> None:
            end(lambda: asked.reply(*call.result()))
            asked.close()

        def answer(call: LaneCall) -> None:
            copied = 0 if call.in_place or call.error is not None else asked.request.hidden.nbytes
            if copied < ASIDE_BYTES or not self._lane.in_flight:
                reply(call)
            else:  # other callers' answers do not wait until it is copied
                self._aside.submit(reply, call)

        if not asked.batch.hidden.shape[0]:
            end(lambda: self._empty(asked))
            asked.close()
            return None
        if method == "ForwardStream" and request.HasField("output"):
            # a stream may carry others' calls, too: who gives one of them up lets go of where its answer goes
            of_region = Started(self.leave)
            taken_back = self._regions.when_left(request.output.name, of_region.give_up)
        try:
            call = self._lane.submit(asked.batch, answer)
        except Exception as error:
            asked.close()
            end(lambda error=error: fail(error))  # type: ignore[misc]
            return None
        if of_region is not None:
            of_region.take(call)
        return call

    def leave(self, call: LaneCall) -> None:
        """The caller is gone: the call ends, and with it the hold on the caller's memory."""
        late = _is_late(call)
        self._lane.cancel(call)
        if late:
            call.give_up(DeadlinePassed("no answer within the deadline"))
        else:
            call.give_up(CallerLeft("the caller left before its answer was there"))

    def _empty(self, asked: CheckedRequest) -> moe_pb2.ForwardReply:
        if self._lane.closed is not None:
            raise self._lane.unavailable()
        return asked.reply(asked.batch.hidden, Stamp(0, self._weights_version()))

    def OpenDataConnection(
        self, request: moe_pb2.OpenDataConnectionRequest, context: grpc.ServicerContext
    ) -> moe_pb2.OpenDataConnectionReply:
        """Takes one connection of this caller for calls past gRPC."""
        offer = self.offer_connection
        if offer is None:
            NO_DATA_CONNECTIONS.abort(context)
        return guarded(context, lambda: offer(context))

    # -- shared memory
    # ----------------------------------------------------------------------------------------------

    def CreateRegion(
        self, request: moe_pb2.CreateRegionRequest, context: grpc.ServicerContext
    ) -> moe_pb2.CreateRegionReply:
        """Makes a sealed region of this rank's host."""
        name, size = guarded(context, lambda: self._regions.create(request.size, context.peer()))
        return moe_pb2.CreateRegionReply(name=name, size=size, socket=self._regions.socket)

    def RegisterRegion(
        self, request: moe_pb2.RegisterRegionRequest, context: grpc.ServicerContext
    ) -> moe_pb2.RegisterRegionReply:
        """Registers an object by name, where the configuration allows it."""
        guarded(
            context, lambda: self._regions.register(request.name, request.key, request.offset, request.size)
        )
        return moe_pb2.RegisterRegionReply()

    def ListRegions(
        self, request: moe_pb2.ListRegionsRequest, context: grpc.ServicerContext
    ) -> moe_pb2.ListRegionsReply:
        """The regions that this connection made, and those that anyone registered by name."""
        rows = [
            moe_pb2.RegionInfo(name=r.name, size=r.size, in_use=r.in_use, named=r.named)
            for r in self._regions.list()
            if r.named or r.maker == context.peer()
        ]
        return moe_pb2.ListRegionsReply(regions=rows)

    def ReleaseRegion(
        self, request: moe_pb2.ReleaseRegionRequest, context: grpc.ServicerContext
    ) -> moe_pb2.ReleaseRegionReply:
        """Forgets the region whose whole name the caller knows; calls that hold it finish."""
        guarded(context, lambda: self._regions.release(request.name))
        return moe_pb2.ReleaseRegionReply()


def _is_late(call: LaneCall) -> bool:
    """Whether who leaves a call has waited for it until its deadline."""
    now = time.monotonic()
    return any(waited_out(job.deadline - now, job.deadline - job.created) for job in call.jobs)


def _not_held(code: str) -> None:
    """Does nothing: the call's rows were not counted."""


def _nothing() -> None:
    """Does nothing: nobody waits for the end of a region's lease."""
