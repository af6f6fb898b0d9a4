"""`LeaseCalls`: calls that come as packets over the leases of regions, past gRPC."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

from google.protobuf.message import DecodeError

from moeserve.proto import moe_pb2
from moeserve.runtime.doors.calls.lane_stream import Begins, Started
from moeserve.runtime.doors.deadlines import Observe, uncounted
from moeserve.runtime.doors.failures import status_of
from moeserve.runtime.doors.operations import BadRequest
from moeserve.runtime.errors import LaneFull, pushback

log = logging.getLogger(__name__)

REGION_CALL = "RegionCall"
"""How metrics of requests name these calls."""


class BeginsAside(Begins, Protocol):
    """What they need of their door."""

    def aside(self, request: moe_pb2.ForwardRequest, begin: Callable[[], None]) -> None:
        """Begins a call by another thread where that takes long."""


class LeaseCalls:
    """Those of one door. A lease has one call under way."""

    def __init__(self, door: BeginsAside, observe: Observe = uncounted) -> None:
        """observe: is told of calls that are refused here, before their door sees them."""
        self._door, self._observe = door, observe
        self._leases: dict[Callable[[bytes], None], Started] = {}  # the call under way of each, by its answer

    def take_packet(
        self, packet: bytes, answer: Callable[[bytes], None], peer: str = "unix:"
    ) -> Callable[[], None]:
        """Starts the ForwardRequest in `packet`, which came over a region's lease from the process `peer`.

        `answer` gets the bytes of its ForwardStreamReply, and tells leases apart: it is the same for all
        packets of one. A lease has one call under way: whoever sends another has left the one before, which
        is given up; where that does not end at once, the packet is refused. Returns what gives up the call
        that is under way then.
        """
        began, request, wrong = time.perf_counter(), moe_pb2.ForwardRequest(), ""
        try:
            request.MergeFromString(packet)
        except DecodeError:
            wrong = f"{len(packet)} bytes over a region's lease are no ForwardRequest"
        if not wrong and not request.HasField("output"):
            wrong = "output: a call over a region's lease needs a region for its answer"
        earlier = self._leases.get(answer)
        if earlier is not None:
            earlier.give_up()
            earlier = self._leases.get(answer)
        refused = BadRequest(wrong) if wrong else None if earlier is None else _one_call()
        if refused is not None:
            status = status_of(refused)
            self._observe(REGION_CALL, "shared_memory", status.code, time.perf_counter() - began)
            reply = moe_pb2.ForwardStreamReply(job_id=request.job_id, error=status.as_message())
            answer(reply.SerializeToString())
            return _nothing if earlier is None else earlier.give_up
        started = self._leases[answer] = Started(self._door.leave)

        def ended(reply: moe_pb2.ForwardStreamReply) -> None:
            self._leases.pop(answer, None)  # before the caller has the reply, and sends its next packet
            answer(reply.SerializeToString())

        def begin() -> None:
            try:
                started.take(self._door.begin(request, ended, peer, REGION_CALL))
            except BaseException:
                self._leases.pop(answer, None)
                log.exception("a call over a region's lease could not be begun")
                raise

        self._door.aside(request, begin)  # others' packets come by the same thread, and do not wait for it
        return started.give_up


def _one_call() -> LaneFull:
    text = "the call before, over the same lease, has yet to end; a lease has one call under way"
    return LaneFull(text, pushback(1))


def _nothing() -> None:
    """Does nothing: there is no call to give up."""
