"""`RegionCalls`: calls to a lane on this host over the connection that leases a region from it.

A request whose rows and answer lie in regions is a few hundred bytes. Sent as one packet over a Unix socket
it wakes the lane's process at once, where a gRPC stream takes some three threads on either side.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time

from moeserve.proto import moe_pb2
from moeserve.proto.errors import Unavailable, lane_late, outcome
from moeserve.proto.timeouts import bounded, milliseconds

PACKET_BYTES = 1 << 16
"""The longest request or reply: ids and weights of 1000 tokens with 8 experts each."""


class RegionCalls:
    """Calls over one lease, one at a time: after a `send` that was True comes one `receive` or `leave`."""

    def __init__(self, lease: socket.socket) -> None:
        self._lease = lease  # not blocking
        self._readable = select.poll()
        self._readable.register(lease, select.POLLIN)
        self._busy = threading.Lock()
        self._under_way: str | None = None  # the job id of the call that has it
        self._seconds = self._deadline = 0.0
        self._process = os.getpid()

    def send(self, request: moe_pb2.ForwardRequest, timeout: float) -> bool:
        """Sends `request`; False when it is too long, another call is under way here, or another process made
        the lease, before it was forked.

        timeout: seconds. Raises Unavailable when the lane's process is gone.
        """
        request.timeout_ms = milliseconds(timeout)
        packet = request.SerializeToString()
        if self._process != os.getpid() or len(packet) > PACKET_BYTES:
            return False
        if not self._busy.acquire(blocking=False):
            return False
        self._under_way, self._seconds = request.job_id, bounded(timeout)
        self._deadline = time.monotonic() + self._seconds
        try:
            self._lease.send(packet)
        except BlockingIOError:
            self.leave(request.job_id)
            return False
        except OSError as failed:
            self.leave(request.job_id)
            raise _gone(str(failed)) from failed
        except BaseException:
            self.leave(request.job_id)
            raise
        return True

    def receive(self, job_id: str, spin: float = 0.0) -> moe_pb2.ForwardReply:
        """The reply to `job_id`; one to an earlier call that was left is thrown away. Raises MoeError.

        spin: seconds for which it looks again and again before it sleeps. Between two looks it gives the
        interpreter up.
        """
        try:
            while True:
                reply = moe_pb2.ForwardStreamReply.FromString(self._packet(spin))
                if reply.job_id == job_id:
                    return outcome(reply)
        finally:
            self.leave(job_id)

    def leave(self, job_id: str) -> None:
        """Gives up the call of this id; its reply will be thrown away. One that has ended, as by a signal's
        handler that raised in `receive`, has no lease: another call may have it.
        """
        if self._under_way == job_id:
            self._under_way = None
            self._busy.release()

    def _packet(self, spin: float) -> bytes:
        now = time.monotonic()
        until = min(self._deadline, now + spin)
        while now < until and not self._readable.poll(0):
            now = time.monotonic()
        left = self._deadline - now
        if left <= 0 or not self._readable.poll(left * 1000):
            raise lane_late(self._seconds)
        try:
            packet = self._lease.recv(PACKET_BYTES)
        except OSError as failed:
            raise _gone(str(failed)) from failed
        if not packet:
            raise _gone("it closed the lease of the region")
        return packet


def _gone(why: str) -> Unavailable:
    return Unavailable("UNAVAILABLE", "region_lost", f"the lane's process is gone or stopping: {why}")
