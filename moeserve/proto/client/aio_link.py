"""The way to one address on asyncio: its channel, one stream for all calls, idle regions and connections."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

import grpc
from grpc import aio

from moeserve.proto import moe_pb2, moe_pb2_grpc
from moeserve.proto.channel import opened
from moeserve.proto.client.patience import Clock, check_process
from moeserve.proto.credentials import Credentials, KeyedChannel
from moeserve.proto.errors import MoeError, Overloaded, Unavailable, from_message, from_rpc, lane_late
from moeserve.proto.timeouts import bounded, milliseconds
from moeserve.proto.transports.async_connections import AsyncDataConnections
from moeserve.proto.transports.carried import CARRIED_BYTES, FORWARD, packed, unpacking
from moeserve.proto.transports.data_connections import BESIDE_BYTES, Reply, Request
from moeserve.proto.transports.shared_memory import RegionPool, RemoteRegion


class AsyncForwardStream:
    """One stream to one lane for any number of calls at once; replies find their call by job id."""

    def __init__(self, stub: Any) -> None:
        self._call = stub.ForwardStream()
        self._waiting: dict[str, asyncio.Future[moe_pb2.ForwardStreamReply]] = {}
        self._writing = asyncio.Lock()
        self._writes = set[asyncio.Task[None]]()
        self._reader = asyncio.create_task(self._read())

    @property
    def alive(self) -> bool:
        """Whether another call may be made."""
        return not self._reader.done()

    async def ask(self, request: moe_pb2.ForwardRequest, timeout: float) -> moe_pb2.ForwardReply:
        """Sends `request` and waits for its reply, `timeout` seconds at most. Raises MoeError."""
        request.timeout_ms = milliseconds(timeout)
        answer: asyncio.Future[moe_pb2.ForwardStreamReply] = asyncio.get_running_loop().create_future()
        self._waiting[request.job_id] = answer
        try:
            async with asyncio.timeout(bounded(timeout)):
                await self._written(request)
                reply = await answer
        except TimeoutError:
            raise lane_late(timeout) from None
        except grpc.RpcError as failed:
            raise from_rpc(failed) from failed
        except asyncio.InvalidStateError as over:
            raise Unavailable("UNAVAILABLE", "", "the lane ended the stream") from over
        finally:
            self._waiting.pop(request.job_id, None)
            if answer.done() and not answer.cancelled():
                answer.exception()  # it is known, whoever waits
        if reply.WhichOneof("outcome") == "error":
            raise from_message(reply.error)
        return reply.reply

    async def _written(self, request: moe_pb2.ForwardRequest) -> None:
        """Writes `request` by a task of the stream: gRPC ends the stream of everybody where a write is
        cancelled, as a call is whose caller waits no longer.
        """
        write = asyncio.create_task(self._write(request))
        self._writes.add(write)
        write.add_done_callback(self._wrote)
        await asyncio.shield(write)

    def _wrote(self, write: asyncio.Task[None]) -> None:
        self._writes.discard(write)
        if not write.cancelled():
            write.exception()  # it is known, whoever waits

    async def _write(self, request: moe_pb2.ForwardRequest) -> None:
        async with self._writing:
            if request.job_id in self._waiting:  # somebody waits for it still
                await self._call.write(request)

    async def close(self) -> None:
        """Ends the stream; calls that are on it end as Unavailable."""
        self._call.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def _read(self) -> None:
        ended: MoeError = Unavailable("UNAVAILABLE", "", "the lane ended the stream")
        try:
            while isinstance(reply := await self._call.read(), moe_pb2.ForwardStreamReply):
                answer = self._waiting.pop(reply.job_id, None)
                if answer is not None and not answer.done():
                    answer.set_result(reply)
        except grpc.RpcError as failed:
            ended = from_rpc(failed)
        except asyncio.CancelledError:
            ended = Unavailable("UNAVAILABLE", "", "the stream was closed")
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(ended)
        self._waiting.clear()


class AsyncLink:
    """The channel, the stream, the idle regions and connections of one address, for one event loop."""

    def __init__(self, address: str, max_message_bytes: int, credentials: Credentials | None = None) -> None:
        self.address = address
        self.channel = opened(aio, address, max_message_bytes, credentials)
        self.lane = moe_pb2_grpc.LaneServiceStub(self.channel)  # type: ignore[no-untyped-call]
        self.front = moe_pb2_grpc.FrontServiceStub(self.channel)  # type: ignore[no-untyped-call]
        self.admin = moe_pb2_grpc.AdminServiceStub(self.channel)  # type: ignore[no-untyped-call]
        self._carry = self.channel.unary_unary(
            FORWARD, request_serializer=packed, response_deserializer=unpacking(moe_pb2.ForwardReply)
        )
        self.regions = RegionPool()
        self._data = AsyncDataConnections(address, self._ask_connection, credentials)
        self.closed = False
        self._stream: AsyncForwardStream | None = None
        self._process = os.getpid()

    async def unary(self, method: Callable[..., Any], request: Any, timeout: float) -> Any:
        """Calls `method` of one of the stubs; raises MoeError."""
        check_process(self._process)
        try:
            return await method(request, timeout=bounded(timeout))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self.closed and task is not None and not task.cancelling():
                raise Unavailable("UNAVAILABLE", "", f"the lane at {self.address} left the group") from None
            raise
        except grpc.RpcError as failed:
            raise self._known(from_rpc(failed, self.address, timeout)) from failed
        except aio.UsageError as closed:
            raise Unavailable("UNAVAILABLE", "", f"the channel to {self.address} is closed") from closed

    @property
    def carries_from(self) -> int:
        """How many bytes of rows are carried beside their message at least."""
        return BESIDE_BYTES if self._data.likely else CARRIED_BYTES

    async def past_grpc(self, message: Request, clock: Clock) -> Reply:
        """Asks over a data connection, or as a unary call where the lane gives none; raises MoeError."""
        check_process(self._process)
        if (connection := await self._data.take(clock.remaining)) is None:
            reply: Reply = await self.unary(self._carry, message, clock.remaining)
            return reply
        try:
            return await connection.ask(message, clock.remaining)
        finally:
            self._data.give(connection)

    async def _ask_connection(self, timeout: float) -> moe_pb2.OpenDataConnectionReply:
        reply: moe_pb2.OpenDataConnectionReply = await self.unary(
            self.lane.OpenDataConnection, moe_pb2.OpenDataConnectionRequest(), timeout
        )
        return reply

    async def ask(self, request: moe_pb2.ForwardRequest, timeout: float) -> moe_pb2.ForwardReply:
        """Asks on the stream that all calls share; raises MoeError."""
        check_process(self._process)
        if self._stream is None or not self._stream.alive:
            self._stream = AsyncForwardStream(self.lane)
        try:
            return await self._stream.ask(request, timeout)
        except MoeError as failed:
            raise self._known(failed) from failed

    async def region(self, size: int, timeout: float) -> RemoteRegion:
        """An idle region of `size` bytes, or a new one. Raises MoeError."""
        region = self.regions.take(size)
        if region is not None:
            return region
        request = moe_pb2.CreateRegionRequest(size=size)
        try:
            made = await self.unary(self.lane.CreateRegion, request, timeout)
        except Overloaded:
            self.regions.give_back()  # idle regions of other sizes, which take the lane's room
            raise
        return await asyncio.to_thread(RemoteRegion.open, made, self.address)

    def forget(self) -> None:
        """Gives back what needs no event loop: that of this link has ended, and its calls with it."""
        self.closed = True
        self.regions.close()
        self._data.close()

    async def close(self) -> None:
        """Closes the channel and gives back everything idle; calls that run here end as Unavailable."""
        self.closed = True
        self.regions.close()
        self._data.close()
        if self._stream is not None:
            await self._stream.close()
        keyed = isinstance(self.channel, KeyedChannel)
        for channel in self.channel.channels() if keyed else [self.channel]:
            await channel.close(None)

    def _known(self, failed: MoeError) -> MoeError:
        if failed.code == "CANCELLED" and self.closed:
            return Unavailable("UNAVAILABLE", "", f"the lane at {self.address} left the group")
        return failed
