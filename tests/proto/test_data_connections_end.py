"""Data connections whose other end is slow, silent or lies, and clients that are closed meanwhile."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager

import grpc
import numpy as np
import pytest
from proto_fake import FakeService, rows
from struck import Stop, struck

from moeserve.proto import moe_pb2, moe_pb2_grpc
from moeserve.proto.client import AsyncMoeClient, MoeClient, Patience
from moeserve.proto.client.patience import Clock
from moeserve.proto.client.sync_link import Link
from moeserve.proto.errors import DeadlineExceeded, MoeError, Unavailable
from moeserve.proto.transports.carried import Carried
from moeserve.proto.transports.data_connections import LET_IN, DataConnection, DataConnections
from moeserve.proto.transports.frames import HEADER, MAGIC

CLOSED = r"client_closed\): this client of .* is closed"


@contextmanager
def pair() -> Iterator[tuple[DataConnection, socket.socket]]:
    """A connection, and its other end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
        connection = DataConnection(ours)
        try:
            yield connection, theirs
        finally:
            connection.close()
            theirs.close()


def test_a_deadline_that_passes_while_rows_are_sent_is_one():
    with pair() as (connection, _):
        data = np.zeros(64 << 20, np.uint8).data  # more than the system holds
        with pytest.raises(DeadlineExceeded):
            connection.send(Carried(moe_pb2.ForwardRequest(job_id="a"), data), 0.2)


@pytest.mark.parametrize("sizes", [(1 << 31, 0), (16, 1 << 40)], ids=["message", "data"])
def test_a_lane_that_claims_more_than_the_answer_is_not_believed(sizes):
    with pair() as (connection, theirs):
        connection.send(moe_pb2.ForwardRequest(job_id="a"), 20.0)
        theirs.sendall(HEADER.pack(MAGIC, *sizes))
        with pytest.raises(Unavailable, match=r"a frame of \d+ bytes, where \d+ are awaited at most"):
            connection.receive()


@pytest.mark.parametrize("kind", [Stop, TimeoutError, KeyboardInterrupt])
def test_what_a_signals_handler_raises_is_for_who_called(kind):
    with pair() as (connection, _):
        connection.send(moe_pb2.ForwardRequest(job_id="a"), 20.0)
        with struck(kind), pytest.raises(kind):
            connection.receive()
        assert connection.closed, "its answer is another call's"


def test_a_call_without_time_for_a_connection_leaves_others_theirs():
    asked: list[float] = []

    def ask(seconds: float) -> moe_pb2.OpenDataConnectionReply:
        asked.append(seconds)
        raise DeadlineExceeded("DEADLINE_EXCEEDED", "", "the lane did not answer in time")

    connections = DataConnections("127.0.0.1:1", ask)
    for seconds in (0.002, 0.002, 1.0, 5.0):
        assert connections.take(seconds) is None
    assert asked == [0.001, 0.001, 0.5], "a lane that has had its time is left in peace"


def test_a_fork_leaves_its_parents_connections_and_regions(service: FakeService):
    client = MoeClient(service.address)
    output = client.allocate(0, (2, 4), "fp32")
    with pair() as (connection, theirs):
        connection.send(moe_pb2.ForwardRequest(job_id="a"), 20.0)
        theirs.recv(1 << 16)
        if not (child := os.fork()):  # which closes what it has from its parent
            connection.end()
            connection.close()
            output.region.end()
            output.close()
            os._exit(0)
        os.waitpid(child, 0)
        theirs.setblocking(False)
        with pytest.raises(BlockingIOError):
            theirs.recv(1)
    assert output.region.alive
    client.close()


def test_calls_of_a_lane_that_leaves_go_on(silent: Silent):
    """A client that finds it gone from the topology closes what is idle alone."""
    link = Link(silent.address, 1 << 20)
    clock = Clock(Patience(timeout=60.0))
    connection = link.connection(clock)
    assert connection is not None
    connection.send(moe_pb2.ForwardRequest(job_id="a"), 60.0)
    with futures.ThreadPoolExecutor(1) as pool:
        asked = pool.submit(connection.receive)
        assert silent.asked.acquire(timeout=20)
        link.close()
        with pytest.raises(TimeoutError):
            asked.result(0.3)
        link.close(ending=True)
        with pytest.raises(Unavailable):
            asked.result(20)


class Silent(
    moe_pb2_grpc.FrontServiceServicer, moe_pb2_grpc.AdminServiceServicer, moe_pb2_grpc.LaneServiceServicer
):
    """A service of one lane that takes calls over data connections, and operations, and answers none."""

    def __init__(self) -> None:
        self.server = grpc.server(futures.ThreadPoolExecutor(8))
        for add in ("Front", "Admin", "Lane"):
            getattr(moe_pb2_grpc, f"add_{add}ServiceServicer_to_server")(self, self.server)
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.server.start()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.connections: list[socket.socket] = []
        self.asked, self.over = threading.Semaphore(0), threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            self.connections.append(connection)
            connection.recv(32, socket.MSG_WAITALL)
            connection.sendall(LET_IN)
            connection.recv(1)
            self.asked.release()

    def GetTopology(self, request, context):
        lane = moe_pb2.Lane(rank=0, address=self.address, capacity=1024)
        return moe_pb2.GetTopologyReply(serving=True, lanes=[lane])

    def OpenDataConnection(self, request, context):
        return moe_pb2.OpenDataConnectionReply(port=self.listener.getsockname()[1], secret=b"x" * 32)

    def Reload(self, request, context):
        self.asked.release()
        self.over.wait(60)
        return moe_pb2.ReloadReply()

    def stop(self) -> None:
        self.over.set()
        self.listener.close()
        for connection in self.connections:
            connection.close()
        self.server.stop(0).wait()


@pytest.fixture
def silent() -> Iterator[Silent]:
    made = Silent()
    yield made
    made.stop()


@pytest.mark.parametrize(
    "ask",
    [lambda client: client.forward(3, *rows(2)), lambda client: client.reload("/checkpoint")],
    ids=["call", "operation"],
)
def test_what_is_under_way_ends_with_its_client(silent: Silent, ask: Callable[[MoeClient], object]):
    """An operation does not say that a lane has left, by which its caller would ask for it again."""
    client = MoeClient(silent.address, timeout=60)
    with futures.ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, client)
        assert silent.asked.acquire(timeout=20)
        began = time.monotonic()
        client.close()
        with pytest.raises(MoeError, match=CLOSED):
            asked.result(20)
        assert time.monotonic() - began < 10


def test_an_operation_under_way_ends_with_its_asynchronous_client(silent: Silent):
    import asyncio

    async def run() -> None:
        client = AsyncMoeClient(silent.address, timeout=60)
        asked = asyncio.create_task(client.reload("/checkpoint"))
        assert await asyncio.to_thread(silent.asked.acquire, timeout=20)
        await client.close()
        with pytest.raises(MoeError, match=CLOSED):
            await asyncio.wait_for(asked, 10)

    asyncio.run(run())
