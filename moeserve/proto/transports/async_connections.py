"""`AsyncDataConnection`: a data connection of a client on asyncio, with the frames of `DataConnection`."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import cast

from google.protobuf.message import DecodeError

from moeserve.proto import moe_pb2
from moeserve.proto.credentials import Credentials
from moeserve.proto.errors import MoeError, lane_late
from moeserve.proto.timeouts import bounded
from moeserve.proto.transports.data_connections import (
    LET_IN,
    Reply,
    Request,
    check_call,
    gone_error,
    host_of,
    job_id_of,
    most_of,
    reply_of,
    request_frame,
)
from moeserve.proto.transports.frames import Incoming
from moeserve.proto.transports.kept import Kept, seconds_to_open

Frame = tuple[bytes, memoryview | None]
"""A message, and the data behind it."""


class AsyncDataConnection(asyncio.BufferedProtocol):
    """One connection to a lane, for one call at a time."""

    def __init__(self) -> None:
        self._loop = loop = asyncio.get_running_loop()
        self._process = os.getpid()
        self._transport: asyncio.Transport | None = None
        self._first = bytearray(len(LET_IN))  # what lets it in
        self._let_in: asyncio.Future[None] | None = loop.create_future()  # None: it is
        self._incoming = Incoming()
        # of the call that is under way: its answer, None where none comes any more
        self._answer: asyncio.Future[Frame | None] | None = None
        self._flows: asyncio.Future[None] | None = None  # None: what is written is sent at once, or soon
        self._gone = ""  # why it is of no use any more

    @classmethod
    async def open(
        cls,
        host: str,
        made: moe_pb2.OpenDataConnectionReply,
        timeout: float,
        credentials: Credentials | None = None,
    ) -> AsyncDataConnection:
        """A connection to the lane at `host` that answered so, over TLS where `credentials` say whom to
        trust. Raises OSError, and ValueError for keys that are none.
        """
        context = name = None
        async with asyncio.timeout(timeout):
            if credentials is not None and credentials.ca:
                context = await asyncio.to_thread(credentials.context)
                name = credentials.server_name or host
            loop = asyncio.get_running_loop()
            _, opened = await loop.create_connection(cls, host, made.port, ssl=context, server_hostname=name)
            try:
                await opened._show(made.secret)
            except BaseException:
                opened.close()
                raise
        return opened

    async def _show(self, secret: bytes) -> None:
        """Shows the secret that lets it in."""
        assert self._transport is not None and self._let_in is not None
        self._transport.write(secret)
        await self._let_in
        self._let_in = None
        if self._gone:
            raise ConnectionRefusedError(f"the lane does not take this connection: {self._gone}")

    @property
    def fresh(self) -> bool:
        """Whether the lane keeps it, as far as is seen here, and this process and loop made it."""
        own = self._process == os.getpid() and self._loop is asyncio.get_running_loop()
        return own and not self.closed

    @property
    def closed(self) -> bool:
        """Whether it is of no use any more."""
        return bool(self._gone)

    async def ask(self, request: Request, timeout: float) -> Reply:
        """Makes a call that has so many seconds. Raises MoeError; where that is not said by the lane, and
        where nobody waits for the reply any more, the connection is closed.
        """
        if not self.fresh or self._transport is None:
            raise gone_error(self._gone or "another process or event loop made this connection")
        answer = self._answer = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(bounded(timeout)):
                frame_out = request_frame(request, timeout)
                self._incoming.most = most_of(frame_out)
                for part in frame_out:
                    self._transport.write(part)
                if self._flows is not None:
                    await self._flows
                frame = await answer
            if frame is None:
                raise gone_error(self._gone)
            message, data = frame
            came = moe_pb2.ForwardStreamReply.FromString(message)
            check_call(came, job_id_of(request))
        except TimeoutError:
            self.close()
            raise lane_late(timeout) from None
        except (DecodeError, ConnectionError) as wrong:
            self.close()
            raise gone_error(str(wrong)) from wrong
        except BaseException:  # also where its caller waits no more
            self.close()
            raise
        finally:
            self._answer = None
        return reply_of(came, data)

    def close(self) -> None:
        """Ends it; a call that is under way is given up by the lane. After a fork it is left to the process
        that made it, whose event loop the child's copy of it would reach.
        """
        if self._process != os.getpid() or self._transport is None:
            self._gone = self._gone or "another process made it"
        elif self._loop.is_closed():  # nobody who waits can be told any more; the lane can
            self._gone = self._gone or "its event loop is closed"
            there = self._transport.get_extra_info("socket")  # None of uvloop, which ends all with itself
            with suppress(OSError):  # it has ended
                if there is not None:
                    there.shutdown(socket.SHUT_RDWR)
        elif self._loop is _running():
            self._lost("it was closed")
            self._transport.abort()
        else:
            self._loop.call_soon_threadsafe(self.close)

    def _lost(self, why: str) -> None:
        self._gone = self._gone or why
        for waits in (self._let_in, self._flows):
            if waits is not None and not waits.done():
                waits.set_result(None)
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(None)

    # -- by the event loop ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is connected."""
        self._transport = cast(asyncio.Transport, transport)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go."""
        return memoryview(self._first) if self._let_in is not None else self._incoming.place

    def buffer_updated(self, nbytes: int) -> None:
        """So many came."""
        if (let_in := self._let_in) is not None:
            if self._first == LET_IN and not let_in.done():
                let_in.set_result(None)
            else:
                self.close()
            return
        try:
            frame = self._incoming.took(nbytes)
        except (ValueError, MemoryError) as wrong:
            self._lost(str(wrong))
            self.close()
            return
        if self._answer is None:
            self.close()  # nobody has asked
        elif frame is not None and not self._answer.done():
            self._answer.set_result(frame)

    def connection_lost(self, exc: Exception | None) -> None:
        """It ended, at whichever end."""
        self._lost(str(exc or "it closed the connection"))

    def pause_writing(self) -> None:
        """The lane takes what is written slowly."""
        self._flows = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        """It has taken most of it."""
        if self._flows is not None and not self._flows.done():
            self._flows.set_result(None)
        self._flows = None


def _running() -> asyncio.AbstractEventLoop | None:
    """The event loop that calls, if any."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


class AsyncDataConnections:
    """The connections of a client to one lane, for one event loop."""

    def __init__(
        self,
        address: str,
        ask: Callable[[float], Awaitable[moe_pb2.OpenDataConnectionReply]],
        credentials: Credentials | None = None,
    ) -> None:
        """The arguments are those of `DataConnections`."""
        self._host = host_of(address)
        self._ask = ask
        self._kept = Kept[AsyncDataConnection]()
        self._used = set[AsyncDataConnection]()
        self._credentials = credentials

    @property
    def likely(self) -> bool:
        """Whether `take` gives one, as far as is known."""
        return self._kept.likely

    async def take(self, timeout: float) -> AsyncDataConnection | None:
        """One that nobody uses, or a new one; None where calls go by gRPC."""
        found = self._kept.idle()
        if found is None and self._kept.may_open:
            seconds = seconds_to_open(timeout)
            try:
                made = await self._ask(seconds)
                found = await AsyncDataConnection.open(self._host, made, seconds, self._credentials)
            except (MoeError, OSError, ValueError) as error:  # an older lane, out of reach, or new keys
                self._kept.refused(error, seconds)
        if found is None:
            return None
        if self._kept.closed:  # while it was opened
            found.close()
        self._used.add(found)
        return found

    def give(self, connection: AsyncDataConnection) -> None:
        """Keeps one whose call was answered."""
        self._used.discard(connection)
        self._kept.give(connection)

    def close(self) -> None:
        """Closes all; calls under way end as Unavailable."""
        self._kept.close()
        for connection in list(self._used):
            connection.close()
