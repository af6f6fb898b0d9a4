"""The way to one address: its channel, idle streams and regions; and an attempt at one part of a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
from numpy.typing import NDArray

from moeserve.proto import moe_pb2, moe_pb2_grpc
from moeserve.proto.channel import connect
from moeserve.proto.client.payload import Inline, Payload
from moeserve.proto.client.stream import StreamPool
from moeserve.proto.errors import MoeError, Unavailable, from_rpc
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
    """One attempt at one part of a batch: `finish` or `abandon` it, once.

    topology: by which its lane was picked; None when not even that was known.
    """

    def __init__(
        self, sent: Sent, payload: Payload | None, topology: moe_pb2.GetTopologyReply | None
    ) -> None:
        self.topology = topology
        self._sent: Sent | None = sent
        self._payload = payload

    def finish(self, into: NDArray[Any] | None) -> tuple[moe_pb2.ForwardReply, NDArray[Any]]:
        """Waits for the reply; returns it with its rows, which are written `into` when that is given.

        Raises MoeError, and TensorError for an answer that is not like the question. Then the attempt is
        over as well.
        """
        if self._sent is None:
            raise RuntimeError("an attempt was finished twice")
        try:
            reply = self._sent.wait()
        except MoeError:
            self._sent = None
            raise
        self._sent = None
        if self._payload is None:
            raise RuntimeError("a reply came to a request that was not sent")
        answer = self._payload.answer(reply, into)
        self._payload.done()
        self._payload = None
        return reply, answer

    def abandon(self) -> None:
        """Gives up what is still under way; after `finish` this does nothing more."""
        if self._sent is not None:
            self._sent.cancel()
        if self._payload is not None:
            self._payload.abandon()
        self._sent = self._payload = None


class Link:
    """The way to one address. Safe to use from any thread."""

    def __init__(self, address: str, max_message_bytes: int) -> None:
        self.address = address
        self.channel = connect(address, max_message_bytes)
        self.stub = moe_pb2_grpc.MoeServiceStub(self.channel)  # type: ignore[no-untyped-call]
        self.regions = RegionPool()
        self.streams = StreamPool(self.stub)
        self.closed = False

    def unary(self, name: str, request: Any, timeout: float) -> Any:
        """Calls the method `name`; raises MoeError."""
        try:
            return getattr(self.stub, name)(request, timeout=timeout)
        except grpc.RpcError as failed:
            raise self.known(from_rpc(failed)) from failed
        except ValueError as closed:
            raise self._closed() from closed

    def region(self, size: int, timeout: float) -> RemoteRegion:
        """An idle region of `size` bytes, or a new one. Raises MoeError."""
        region = self.regions.take(size)
        if region is not None:
            return region
        return RemoteRegion.open(self.unary("CreateRegion", moe_pb2.CreateRegionRequest(size=size), timeout))

    def send(self, request: moe_pb2.ForwardRequest, payload: Payload, timeout: float, *, alone: bool) -> Sent:
        """Puts the rows where `payload` has them and sends `request`: inline unary, what lies in regions over
        their bell, or by stream where that cannot take it. A part that is `alone` may be sent only when it
        is waited for: a blocking unary call needs no other thread, and is a tenth faster.
        """
        payload.fill(request)
        if isinstance(payload, Inline):
            if alone:
                return Sent(lambda: self._forward(request, timeout), _nothing)
            return self._send_unary(request, timeout)
        bell = payload.bell
        if bell is not None and bell.ring(request, timeout):
            return Sent(lambda: bell.answer(request.job_id), bell.leave)
        stream = self.streams.take()
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

    def _forward(self, request: moe_pb2.ForwardRequest, timeout: float) -> moe_pb2.ForwardReply:
        reply: moe_pb2.ForwardReply = self.unary("Forward", request, timeout)
        return reply

    def _closed(self) -> Unavailable:
        return Unavailable("UNAVAILABLE", "", f"the channel to {self.address} is closed")

    def _send_unary(self, request: moe_pb2.ForwardRequest, timeout: float) -> Sent:
        try:
            future = self.stub.Forward.future(request, timeout=timeout)
        except ValueError as closed:
            raise self._closed() from closed

        def wait() -> moe_pb2.ForwardReply:
            try:
                reply: moe_pb2.ForwardReply = future.result()
            except grpc.FutureCancelledError as cancelled:
                raise self.known(MoeError("CANCELLED", "", "the call was cancelled here")) from cancelled
            except grpc.RpcError as failed:
                raise self.known(from_rpc(failed)) from failed
            return reply

        return Sent(wait, future.cancel)

    def known(self, failed: MoeError) -> MoeError:
        """`failed`, or Unavailable when it only says that this link was closed because its lane is gone."""
        if failed.code == "CANCELLED" and self.closed:
            return Unavailable("UNAVAILABLE", "", f"the lane at {self.address} left the group")
        return failed

    def close(self) -> None:
        """Closes the channel and gives back everything idle; calls that run here end as Unavailable."""
        self.closed = True
        self.streams.close()
        self.regions.close()
        self.channel.close()


def _nothing() -> None:
    """Nothing was sent yet."""
