"""The way to one address, with its channel, idle streams and regions; and attempts at one part of a call."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from moeserve.proto import moe_pb2, moe_pb2_grpc
from moeserve.proto.channel import connect
from moeserve.proto.client.call import PartCall
from moeserve.proto.client.patience import Clock, check_process
from moeserve.proto.client.payload import InlineRows, Payload
from moeserve.proto.client.stream import ForwardStream, StreamPool
from moeserve.proto.credentials import Credentials
from moeserve.proto.errors import MoeError, Overloaded, Unavailable, from_rpc
from moeserve.proto.timeouts import bounded
from moeserve.proto.transports.carried import CARRIED_BYTES, FORWARD, Carried, packed, unpacking
from moeserve.proto.transports.data_connections import BESIDE_BYTES, DataConnection, DataConnections
from moeserve.proto.transports.shared_memory import RegionPool, RemoteRegion


@dataclass(frozen=True, eq=False)
class Sent:
    """A request on its way.

    `wait` gives the reply or raises MoeError; `cancel` gives it up, instead of `wait`.
    """

    wait: Callable[[], moe_pb2.ForwardReply]
    cancel: Callable[[], object]

    @classmethod
    def failed(cls, error: MoeError) -> Sent:
        """A request that could not even be sent."""

        def wait() -> moe_pb2.ForwardReply:
            raise error

        return cls(wait, lambda: None)


class Attempt:
    """One attempt at one part of a call: `finish` or `abandon` it, once.

    payload: None for a request that could not even be made.
    """

    def __init__(self, part: PartCall[Link], sent: Sent, payload: Payload | None) -> None:
        self._part = part
        self._sent: Sent | None = sent
        self._payload = payload

    def finish(self) -> None:
        """Waits for the reply and gives it to the part.

        Raises MoeError, and TensorError for an answer that is not like the question. Then the attempt is
        over as well.
        """
        if self._sent is None:
            raise RuntimeError("an attempt was finished twice")
        try:
            reply = self._sent.wait()
        except MoeError as failed:
            self._sent = None
            self._part.failed(failed)
            raise
        self._sent = None
        if self._payload is None:
            raise RuntimeError("a reply came to a request that was not sent")
        self._part.answered(reply, self._payload)
        self._payload.done()
        self._payload = None

    def abandon(self) -> None:
        """Gives up what is still under way; after `finish` this does nothing more."""
        if self._sent is not None:
            self._sent.cancel()
        if self._payload is not None:
            self._payload.abandon()
        self._sent = self._payload = None


class Link:
    """The channel, the idle streams and the idle regions of one address. Safe to use from any thread."""

    def __init__(self, address: str, max_message_bytes: int, credentials: Credentials | None = None) -> None:
        self.address = address
        self.channel = connect(address, max_message_bytes, credentials)
        self.lane = moe_pb2_grpc.LaneServiceStub(self.channel)  # type: ignore[no-untyped-call]
        self.front = moe_pb2_grpc.FrontServiceStub(self.channel)  # type: ignore[no-untyped-call]
        self.admin = moe_pb2_grpc.AdminServiceStub(self.channel)  # type: ignore[no-untyped-call]
        self._carry = self.channel.unary_unary(
            FORWARD, request_serializer=packed, response_deserializer=unpacking(moe_pb2.ForwardReply)
        )
        self.regions = RegionPool()
        self.streams = StreamPool(self.lane)
        self._lock = threading.Lock()
        self._regions = weakref.WeakSet[RemoteRegion]()  # that were made, also for tensors of the caller
        self._data = DataConnections(address, self._ask_connection, credentials)
        self.closed = self._ended = False
        self._process = os.getpid()

    def unary(self, method: Callable[..., Any], request: Any, timeout: float) -> Any:
        """Calls `method` of one of the stubs; raises MoeError."""
        check_process(self._process)
        try:
            return method(request, timeout=bounded(timeout))
        except grpc.RpcError as failed:
            raise self.known(from_rpc(failed, self.address, timeout)) from failed
        except ValueError as closed:
            raise self._closed() from closed

    def region(self, size: int, timeout: float) -> RemoteRegion:
        """An idle region of `size` bytes, or a new one. Raises MoeError."""
        region = self.regions.take(size)
        if region is not None:
            return region
        request = moe_pb2.CreateRegionRequest(size=size)
        try:
            made = self.unary(self.lane.CreateRegion, request, timeout)
        except Overloaded:
            self.regions.give_back()  # idle regions of other sizes, which take the lane's room
            raise
        region = RemoteRegion.open(made, self.address)
        with self._lock:
            self._regions.add(region)
            ended = self._ended
        if ended:  # meanwhile
            region.end()
        return region

    @property
    def carries_from(self) -> int:
        """How many bytes of rows are carried beside their message at least."""
        return BESIDE_BYTES if self._data.likely else CARRIED_BYTES

    def send(self, request: moe_pb2.ForwardRequest, payload: Payload, clock: Clock, *, alone: bool) -> Sent:
        """Sends `request`, whose rows lie where `payload` has them: inline over a data connection, or as a
        unary call where the lane has none; rows in regions over the region's lease, or on a stream where the
        lease cannot take it.

        A part that is `alone` is sent only when it is waited for: a blocking unary call needs no other
        thread, and is a tenth faster.
        """
        check_process(self._process)
        timeout, spin = clock.remaining, clock.patience.spin or 0.0
        if isinstance(payload, InlineRows):
            message = payload.sent(request)
            if (connection := self.connection(clock)) is not None:
                return self.past_grpc(connection, message, payload, clock)
            if alone:
                return Sent(lambda: payload.received(self.unary(self._carry, message, timeout)), _nothing)
            sent = self._future(self._carry, message, timeout)
            return Sent(lambda: payload.received(sent.wait()), sent.cancel)
        calls = payload.calls
        try:
            if calls is not None and calls.send(request, timeout):
                return Sent(lambda: calls.receive(request.job_id, spin), lambda: calls.leave(request.job_id))
            stream = self._stream()
        except Unavailable as lost:
            raise payload.lost(lost) from lost
        stream.send(request, timeout)

        def wait() -> moe_pb2.ForwardReply:
            try:
                reply = stream.receive(request.job_id)
            except MoeError as failed:
                self.streams.give(stream)
                raise self.known(failed) from failed
            except BaseException:
                stream.close()
                raise
            self.streams.give(stream)
            return reply

        return Sent(wait, stream.close)

    def _stream(self) -> ForwardStream:
        try:
            return self.streams.take()
        except ValueError as closed:
            raise self._closed() from closed

    def connection(self, clock: Clock) -> DataConnection | None:
        """A data connection for one call; None where the lane has none."""
        return self._data.take(clock.remaining)

    def give(self, connection: DataConnection) -> None:
        """Takes back a connection over which nothing was sent."""
        self._data.give(connection)

    def past_grpc(
        self,
        connection: DataConnection,
        message: moe_pb2.ForwardRequest | Carried[moe_pb2.ForwardRequest],
        payload: InlineRows,
        clock: Clock,
    ) -> Sent:
        """Sends a request over a data connection, which is kept for the next where it is answered."""
        try:
            connection.send(message, clock.remaining)
        except BaseException:
            self._data.drop(connection)
            raise

        def wait() -> moe_pb2.ForwardReply:
            try:
                came = connection.receive(clock.patience.spin)
            finally:
                self._data.give(connection)
            return payload.received(came)

        return Sent(wait, lambda: self._data.drop(connection))

    def _ask_connection(self, timeout: float) -> moe_pb2.OpenDataConnectionReply:
        reply: moe_pb2.OpenDataConnectionReply = self.unary(
            self.lane.OpenDataConnection, moe_pb2.OpenDataConnectionRequest(), timeout
        )
        return reply

    def forward(self, request: moe_pb2.ForwardRequest, timeout: float | None) -> Sent:
        """Sends `request` to the lane as a unary call, without waiting. timeout: seconds, None = no deadline.

        Raises Unavailable where this link was closed.
        """
        return self._future(self.lane.Forward, request, timeout)

    def _future(self, method: Any, request: Any, timeout: float | None) -> Sent:
        try:
            future = method.future(request, timeout=None if timeout is None else bounded(timeout))
        except ValueError as closed:
            raise self._closed() from closed

        def wait() -> moe_pb2.ForwardReply:
            try:
                reply: moe_pb2.ForwardReply = future.result()
            except grpc.FutureCancelledError as cancelled:
                raise self.known(MoeError("CANCELLED", "", "the call was cancelled here")) from cancelled
            except grpc.RpcError as failed:
                seconds = timeout or 0.0  # without a deadline it does not end by one
                raise self.known(from_rpc(failed, self.address, seconds)) from failed
            return reply

        return Sent(wait, future.cancel)

    def known(self, failed: MoeError) -> MoeError:
        """`failed`, or Unavailable when it only says that this link was closed because its lane is gone."""
        if failed.code == "CANCELLED" and self.closed:
            return Unavailable("UNAVAILABLE", "", f"the lane at {self.address} left the group")
        return failed

    def close(self, *, ending: bool = False) -> None:
        """Closes the channel, where calls end as Unavailable, and gives back everything idle. ending: its
        client is closed, and all else under way ends alike; else a lane that leaves still answers that.
        """
        with self._lock:
            self.closed, self._ended = True, ending
            regions = list(self._regions) if ending else []
        self._data.close(ending=ending)
        for region in regions:
            region.end()
        self.streams.close()
        self.regions.close()
        self.channel.close()

    def _closed(self) -> Unavailable:
        return Unavailable("UNAVAILABLE", "", f"the channel to {self.address} is closed")


def _nothing() -> None:
    """Does nothing: nothing was sent yet."""
