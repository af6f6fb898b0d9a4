"""Data connections of a client on asyncio: its bytes, its limits, and other ends that lie, stall or leave."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from data_doors import MOST, SECONDS, Door, Encryption, job, rows, until
from made_certificates import Authority

from moeserve.proto import moe_pb2
from moeserve.proto.credentials import Credentials
from moeserve.proto.errors import DeadlineExceeded, InvalidArgument, MoeError, Overloaded, Unavailable
from moeserve.proto.transports.async_connections import AsyncDataConnection, AsyncDataConnections
from moeserve.proto.transports.carried import Carried
from moeserve.proto.transports.data_connections import LET_IN, SECRET_BYTES
from moeserve.proto.transports.frames import FIRST_BYTES, HEADER, MAGIC, Incoming, frame_of
from moeserve.runtime.doors.calls.admission import Admission, DoorLimits
from moeserve.runtime.doors.calls.data_connections import DataConnections
from moeserve.runtime.doors.failures import status_of
from moeserve.runtime.doors.operations import BadRequest


class Ends:
    """Both ends of a lane's data connections."""

    def __init__(self, encryption: Encryption) -> None:
        self.trusts, self.door = encryption.trusts, Door()
        limits = DoorLimits(
            calls=4, streams=8, nbytes=8 * MOST, request_seconds=SECONDS, unread_seconds=SECONDS
        )
        self.admission = Admission(limits)
        self.lane = DataConnections(
            "127.0.0.1",
            self.door,  # type: ignore[arg-type]
            self.door.regions,
            self.admission,
            MOST,
            keys=encryption.keys,
        )

    async def opened(self) -> AsyncDataConnection:
        return await AsyncDataConnection.open("127.0.0.1", self.offer(), 5.0, self.trusts)

    def offer(self) -> moe_pb2.OpenDataConnectionReply:
        return self.lane.offer("ipv4:1.2.3.4:5")

    async def answers(self, data: bytes, **fields: object) -> None:
        """The door answers the call that comes next."""
        await asyncio.to_thread(lambda: self.door.reply(data, **fields))

    def close(self) -> None:
        self.lane.close()
        assert until(lambda: not self.door.regions.list() and not self.door.regions.bytes)
        self.door.regions.close()
        assert until(lambda: self.admission.held == (0, 0, 0)) and not self.lane._there


@pytest.fixture(params=["plain", "tls"])
def ends(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ends]:
    made = Ends(Encryption.tls(tmp_path) if request.param == "tls" else Encryption.none())
    yield made
    made.close()


def run(act: Callable[[], Awaitable[None]]) -> None:
    """Runs it in a loop of its own, in which nothing may be left behind or go wrong unseen."""

    async def whole() -> None:
        wrong = list[object]()
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: wrong.append(context))
        async with asyncio.timeout(30):
            await act()
        await asyncio.sleep(0.05)
        assert not wrong
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(whole())


@pytest.mark.parametrize("size", [1, 7, HEADER.size, 40, 1000, FIRST_BYTES, 10 * FIRST_BYTES])
def test_frames_are_read_in_pieces_of_any_size(size: int) -> None:
    incoming, random = Incoming(), np.random.default_rng(size)
    for message, data in ((0, 0), (5, 0), (40, 9), (0, 70_000), (200_000, 0), (65_520, 3), (70_000, 90_000)):
        sent, more = random.bytes(message), random.bytes(data)
        whole = b"".join(frame_of(sent, memoryview(more) if data else None))
        at, found = 0, None
        while at < len(whole):
            assert found is None
            piece = whole[at : at + min(size, len(incoming.place))]
            incoming.place[: len(piece)] = piece
            found, at = incoming.took(len(piece)), at + len(piece)
        assert found is not None and found[0] == sent
        assert (b"" if found[1] is None else bytes(found[1])) == more


def test_what_is_no_frame_is_told() -> None:
    for bytes_ in (b"HTTP/1.1 400 Bad", HEADER.pack(MAGIC, 2, 0) + b"abc"):
        incoming = Incoming()
        incoming.place[: len(bytes_)] = bytes_
        with pytest.raises(ValueError, match="frame"):
            incoming.took(len(bytes_))


@pytest.mark.parametrize("count", [1, 5000, (1 << 16) - 60, 300_000, MOST - 100])
def test_a_call_is_answered_with_data_of_any_size(ends: Ends, count: int) -> None:
    async def act() -> None:
        connection = await ends.opened()
        for turn in range(3):
            answer = os.urandom(count)
            asked = asyncio.create_task(connection.ask(rows(count), 5.0))
            await ends.answers(answer, reply=moe_pb2.ForwardReply(epoch=turn + 1))
            reply = await asked
            assert isinstance(reply, Carried) and reply.message.epoch == turn + 1
            assert bytes(reply.data) == answer
            assert ends.door.rows() == np.arange(count, dtype=np.uint8).tobytes()
        assert connection.fresh
        asked = asyncio.create_task(connection.ask(job(), 5.0))
        await ends.answers(b"", error=status_of(BadRequest("layer 9")).as_message())
        with pytest.raises(InvalidArgument, match="layer 9"):
            await asked
        assert connection.fresh, "the lane has said so, and goes on"
        connection.close()
        with pytest.raises(Unavailable):
            await connection.ask(job(), 5.0)

    run(act)


def test_who_waits_no_longer_has_its_call_given_up(ends: Ends) -> None:
    async def act() -> None:
        late, left, other = [await ends.opened() for _ in range(3)]
        with pytest.raises(DeadlineExceeded):
            await late.ask(rows(5000), 0.1)
        leaving = asyncio.create_task(left.ask(rows(5000), 5.0))
        assert await asyncio.to_thread(until, lambda: len(ends.door.asked) == 2)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        closing = asyncio.create_task(other.ask(rows(5000), 5.0))
        assert await asyncio.to_thread(until, lambda: len(ends.door.asked) == 3)
        other.close()
        with pytest.raises(Unavailable, match="it was closed"):
            await closing
        assert late.closed and left.closed and other.closed
        assert await asyncio.to_thread(until, lambda: len(ends.door.left) == 3)

    run(act)
    for _, ended, _ in ends.door.asked:
        ended(moe_pb2.ForwardStreamReply())


def test_a_loop_that_was_closed_within_a_call_leaves_a_connection_that_can_be_closed(ends: Ends) -> None:
    loop = asyncio.new_event_loop()
    one = loop.run_until_complete(ends.opened())
    call = loop.create_task(one.ask(job("left"), 5.0))
    loop.run_until_complete(asyncio.sleep(0.01))
    loop.close()
    one.close()
    assert one.closed and not call.done()
    assert until(lambda: len(ends.door.left) == 1), "the lane gives the call up"
    ends.door.reply()
    call._log_destroy_pending = False  # type: ignore[attr-defined]


def test_a_connection_whose_loop_ended_it_has_no_socket_and_can_be_closed() -> None:
    """As with uvloop, which closes what is open in a loop, and gives no socket of it then."""

    async def made() -> AsyncDataConnection:
        return AsyncDataConnection()

    loop = asyncio.new_event_loop()
    one = loop.run_until_complete(made())
    one._transport = asyncio.Transport()
    loop.close()
    one.close()
    assert one.closed


def test_a_lane_that_goes_is_told_at_once(ends: Ends) -> None:
    async def act() -> None:
        idle, busy = await ends.opened(), await ends.opened()
        asked = asyncio.create_task(busy.ask(rows(5000), 20.0))
        assert await asyncio.to_thread(until, lambda: bool(ends.door.asked))
        began = time.monotonic()
        await asyncio.to_thread(ends.lane.close)
        with pytest.raises(Unavailable):
            await asked
        for _ in range(100):
            await asyncio.sleep(0.01)
            if idle.closed:
                break
        assert idle.closed and not idle.fresh and time.monotonic() - began < 5.0

    run(act)
    ends.door.asked[-1][1](moe_pb2.ForwardStreamReply())


def test_calls_of_one_loop_go_over_connections_of_their_own(ends: Ends) -> None:
    ends.door.at_once = moe_pb2.ForwardStreamReply(reply=moe_pb2.ForwardReply(epoch=3))
    asked = list[float]()

    async def ask(seconds: float) -> moe_pb2.OpenDataConnectionReply:
        asked.append(seconds)
        return ends.offer()

    async def act() -> None:
        client = AsyncDataConnections(f"127.0.0.1:{ends.lane.port}", ask, ends.trusts)

        async def calls() -> None:
            for _ in range(20):
                connection = await client.take(5.0)
                assert connection is not None
                try:
                    reply = await connection.ask(rows(6000), 5.0)
                finally:
                    client.give(connection)
                assert isinstance(reply, moe_pb2.ForwardReply) and reply.epoch == 3

        await asyncio.gather(*[calls() for _ in range(3)])
        assert len(asked) == 3 and client.likely and len(client._kept._idle) == 3
        held = await client.take(5.0)
        client._kept._idle.clear()
        opening = asyncio.create_task(client.take(5.0))
        await asyncio.sleep(0)
        client.close()
        assert held is not None and held.closed and await client.take(5.0) is None
        late = await opening
        assert late is not None and late.closed and len(asked) == 4

    run(act)


@pytest.mark.parametrize(
    ("error", "seconds"),
    [(Overloaded("RESOURCE_EXHAUSTED", "", "full"), 1.0), (MoeError("UNIMPLEMENTED", "", "older"), 30.0)],
)
def test_a_lane_without_connections_is_asked_seldom(error: MoeError, seconds: float) -> None:
    asked = list[float]()

    async def ask(within: float) -> moe_pb2.OpenDataConnectionReply:
        asked.append(within)
        raise error

    async def act() -> None:
        client = AsyncDataConnections("127.0.0.1:1", ask)
        assert await client.take(0.4) is None and await client.take(5.0) is None
        assert asked == [0.2] and not client.likely, "half of its time is for the way by gRPC"
        assert seconds - 1 < client._kept._again - time.monotonic() <= seconds
        client._kept._again = 0.0  # it is over
        assert await client.take(5.0) is None and len(asked) == 2

    run(act)


def test_who_speaks_another_tongue_or_is_a_stranger_is_not_taken_for_the_lane(
    ends: Ends, tmp_path: Path
) -> None:
    stranger = Credentials(ca=Authority(tmp_path / "stranger", "stranger").path)

    async def act() -> None:
        wrong = moe_pb2.OpenDataConnectionReply(port=ends.lane.port, secret=bytes(SECRET_BYTES))
        with pytest.raises(OSError, match="does not take this connection"):
            await AsyncDataConnection.open("127.0.0.1", wrong, 5.0, ends.trusts)
        for trusts in (stranger, None if ends.trusts is not None else stranger):
            began = time.monotonic()
            with pytest.raises(OSError):
                await AsyncDataConnection.open("127.0.0.1", ends.offer(), 1.0, trusts)
            assert time.monotonic() - began < 3.0
        connection = await ends.opened()
        connection.close()

    run(act)


@asynccontextmanager
async def liar(say: Callable[[socket.socket], None]) -> AsyncIterator[AsyncDataConnection]:
    """A connection to an end that lets in whoever comes, reads its request, and then says what it likes."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with listener, listener.accept()[0] as there:
            there.settimeout(5.0)
            there.recv(SECRET_BYTES, socket.MSG_WAITALL)
            there.sendall(LET_IN)
            say(there)

    thread = threading.Thread(target=serve)
    thread.start()
    made = moe_pb2.OpenDataConnectionReply(port=listener.getsockname()[1], secret=bytes(SECRET_BYTES))
    connection = await AsyncDataConnection.open("127.0.0.1", made, 5.0)
    try:
        yield connection
    finally:
        connection.close()
        await asyncio.to_thread(thread.join, 10)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    "lie",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        HEADER.pack(MAGIC, 4, 0) + b"\xff\xff\xff\xff",
        HEADER.pack(MAGIC, 0, 1 << 60),
        HEADER.pack(MAGIC, 2, 0) + b"abcd",
        HEADER.pack(MAGIC, 100, 0),
        b"",
    ],
    ids=["http", "no message", "no room", "more behind it", "a part", "nothing"],
)
def test_an_end_that_lies_ends_the_call_and_the_connection(lie: bytes) -> None:
    def say(there: socket.socket) -> None:
        there.recv(1 << 20)
        there.sendall(lie)

    async def act() -> None:
        async with liar(say) as connection:
            with pytest.raises(Unavailable, match="gone or stopping"):
                await connection.ask(job(), 5.0)
            assert connection.closed

    run(act)


def test_an_end_that_speaks_unasked_is_left() -> None:
    async def act() -> None:
        async with liar(lambda there: there.sendall(HEADER.pack(MAGIC, 0, 0))) as connection:
            for _ in range(200):
                await asyncio.sleep(0.01)
                if connection.closed:
                    break
            assert connection.closed and not connection.fresh

    run(act)


def test_an_end_that_does_not_read_is_left_in_time() -> None:
    ending = threading.Event()

    async def act() -> None:
        async with liar(lambda there: ending.wait(10)) as connection:
            began = time.monotonic()
            with pytest.raises(DeadlineExceeded):
                await connection.ask(rows(64 << 20), 0.4)
            assert 0.3 < time.monotonic() - began < 3.0 and connection.closed
            ending.set()

    run(act)
