"""What clients refuse, and at once: tensors of another service or of nobody, layers that are none; and that
neither the size of an answer nor another caller decides whether a call is well.
"""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest
from proto_fake import FAR, FakeService, rows

from moeserve.proto import moe_pb2
from moeserve.proto.client import AsyncMoeClient, MoeClient, Patience
from moeserve.proto.client.aio_link import AsyncForwardStream
from moeserve.proto.client.payload import Placed
from moeserve.proto.client.sync_link import Link
from moeserve.proto.errors import MoeError, NotFound, Unavailable


def test_tensors_of_another_service_are_refused_by_name(client_of, service):
    """The other service has a region of the same name, perhaps, and answers with its own experts."""
    other = FakeService(2)
    hidden, *route = rows(2)
    try:
        with client_of(other.address) as theirs, client_of(service.address, timeout=20) as ours:
            for name in ("hidden", "output"):
                placed = theirs.allocate(0, (2, 4), "fp32")
                placed.tensor.copy_(hidden)
                given = {"hidden": hidden, "output": ours.allocate(0, (2, 4), "fp32")} | {name: placed}
                began = time.monotonic()
                with pytest.raises(NotFound, match=f"{name}: it lies in a region of the lane at"):
                    ours.forward(3, given["hidden"], *route, output=given["output"])
                assert time.monotonic() - began < 10
        assert not any(lane.asked for lane in (*service.lanes, *other.lanes))
    finally:
        other.stop()


def test_tensors_of_another_client_of_the_service_are_taken(service):
    hidden, *route = rows(2)
    with MoeClient(service.address) as theirs, MoeClient(service.address) as ours:
        output = theirs.allocate(1, (2, 4), "fp32")
        assert ours.forward(3, hidden, *route, output=output) is output.array
        assert np.array_equal(output.array, hidden.numpy() * 2)


class Lease:
    """The calls of a region whose lane's process is gone."""

    def send(self, request: moe_pb2.ForwardRequest, timeout: float) -> bool:
        raise Unavailable("UNAVAILABLE", "region_lost", "the lane's process is gone")


def test_an_output_whose_region_is_gone_is_said_at_once_and_blames_no_lane(service, monkeypatch):
    monkeypatch.setattr(Placed, "calls", Lease())
    hidden, *route = rows(2)
    with MoeClient(service.address, timeout=20) as client:
        output = client.allocate(1, (2, 4), "fp32")
        began = time.monotonic()
        with pytest.raises(NotFound, match="output: its region is gone") as raised:
            client.forward(3, hidden, *route, output=output)
        assert time.monotonic() - began < 10
        assert raised.value.reason == "unknown_region"
        assert service.topologies == 1, "the lanes are not asked for again"


@pytest.mark.parametrize("layer", [None, "0", 1.0, True])
def test_what_is_no_layer_is_refused(client_of, service, layer):
    with client_of(service.address) as client, pytest.raises(TypeError, match=r"layer=.* must be the number"):
        client.forward(layer, *rows(2))
    with client_of(service.address) as client, pytest.raises(ValueError, match="layer=-1 must be"):
        client.forward(-1, *rows(2))


def test_a_tensor_is_allocated_at_a_lane_that_is_named(client_of, service):
    with client_of(service.address) as client, pytest.raises(TypeError, match="lane=None must be the rank"):
        client.allocate(None, (2, 4))


@pytest.mark.parametrize("count", [1, 8, 300, 3000])
@pytest.mark.parametrize("transport", ["auto", "inline"])
def test_every_answer_may_be_written_to(client_of, service, transport, count):
    hidden, experts, weights = (tensor.numpy() for tensor in rows(count))
    with client_of(service.address, transport=transport) as client:
        answer = client.forward(3, hidden, experts, weights)
        answer += 1.0
        assert np.array_equal(answer, hidden * 2 + 1)


class TwoHosts(FakeService):
    """The first lane is far, the second near."""

    def GetTopology(self, request, context):
        found = super().GetTopology(request, context)
        found.lanes[0].host_id = FAR
        return found


def test_a_lane_that_no_call_goes_to_may_be_far(client_of):
    service = TwoHosts(2)
    try:
        with client_of(service.address, lane=1, transport="shared_memory") as client:
            for _ in range(3):
                assert client.forward(3, *rows(2)).shape == (2, 4)
    finally:
        service.stop()


def test_calls_of_a_closed_link_end_as_moe_errors(service):
    """Also where the lease of their region does not take them."""
    link = Link(service.lanes[0].address, 1 << 20)
    client = MoeClient(service.address)
    output = client.allocate(0, (2, 4), "fp32")
    call = client._core.call(3, rows(2)[0], _choice(), {"output": output})
    link.close()
    with pytest.raises(MoeError):
        link.send(call.placed_request(), Placed(call.batch), client._core.clock(5.0), alone=True).wait()
    client.close()


def _choice():
    from moeserve.proto.client import Choice

    return Choice(*rows(2)[1:])


class SlowCall:
    """A stream of gRPC that takes a request slowly, and ends where that is cancelled, as gRPC's does."""

    def __init__(self) -> None:
        self.goes_on = asyncio.Event()
        self.replies = asyncio.Queue[object]()
        self.written: list[str] = []
        self.cut = False

    async def write(self, request: moe_pb2.ForwardRequest) -> None:
        try:
            await self.goes_on.wait()
        except asyncio.CancelledError:
            self.cut = True
            raise
        self.written.append(request.job_id)
        self.replies.put_nowait(moe_pb2.ForwardStreamReply(job_id=request.job_id, reply={"epoch": 7}))

    async def read(self) -> object:
        return await self.replies.get()

    def cancel(self) -> None:
        self.replies.put_nowait(None)


def test_a_cancelled_call_leaves_the_stream_to_the_others():
    async def run() -> None:
        call = SlowCall()

        class Stub:
            def ForwardStream(self):
                return call

        stream = AsyncForwardStream(Stub())
        asked = [
            asyncio.create_task(stream.ask(moe_pb2.ForwardRequest(job_id=name), 20.0)) for name in "abcd"
        ]
        await asyncio.sleep(0.05)
        asked[0].cancel()  # its write is under way
        asked[2].cancel()  # it waits to be written
        await asyncio.sleep(0.05)
        call.goes_on.set()
        answers = await asyncio.gather(*asked, return_exceptions=True)
        assert [getattr(one, "epoch", type(one).__name__) for one in answers] == [
            "CancelledError",
            7,
            "CancelledError",
            7,
        ]
        assert not call.cut and call.written == ["a", "b", "d"]
        await stream.close()

    asyncio.run(run())


def test_an_asynchronous_call_given_up_in_time_spoils_no_other(service):
    """Calls of shared memory share a stream to their lane."""

    async def run() -> None:
        patience = Patience(timeout=20.0, attempts=1)
        async with AsyncMoeClient(service.address, lane=0, timeout=patience) as client:

            def call() -> asyncio.Task:
                return asyncio.create_task(client.forward(3, *rows(300)))

            await call()
            for _ in range(20):
                given_up, kept = call(), [call() for _ in range(3)]
                await asyncio.sleep(0)
                given_up.cancel()
                for answer in await asyncio.gather(*kept):
                    assert answer.shape == (300, 4)

    asyncio.run(run())


def test_an_asynchronous_client_is_of_the_loop_of_its_first_call(service):
    client = AsyncMoeClient(service.address, timeout=20)  # where no loop runs

    async def call() -> tuple[int, ...]:
        return (await client.forward(3, *rows(2))).shape

    async def calls() -> None:
        assert await call() == (2, 4)
        assert await call() == (2, 4)
        with pytest.raises(RuntimeError, match="belongs to another event loop"):
            await asyncio.to_thread(asyncio.run, call())
        await client.close()
        with pytest.raises(MoeError, match="client_closed"):
            await call()

    asyncio.run(calls())
    with pytest.raises(RuntimeError, match="belongs to another event loop"):
        asyncio.run(call())


def test_an_asynchronous_client_whose_loop_has_ended_gives_back_what_it_has(service):
    client = AsyncMoeClient(service.address, timeout=20, lane=0)

    async def call() -> None:
        await client.forward(3, *rows(300))

    asyncio.run(call())
    assert service.lanes[0].regions.list()
    asyncio.run(client.close())
    until = time.monotonic() + 10
    while service.lanes[0].regions.list():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_call_that_is_cancelled_while_it_waits_for_the_lanes_ends(monkeypatch: pytest.MonkeyPatch):
    """Also at the very moment in which it is its turn to ask for them."""
    client = AsyncMoeClient("127.0.0.1:1", timeout=20.0)

    async def main() -> None:
        finding, answered = client._finding, asyncio.Event()
        await finding.acquire()
        waits = asyncio.create_task(client._topology(client._core.clock(None)))
        monkeypatch.setattr(client._door, "unary", lambda *given: answered.wait())
        while not finding._waiters:
            await asyncio.sleep(0)
        finding.release()
        while not finding.locked():
            await asyncio.sleep(0)
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(waits, 2.0)
        assert not finding.locked()
        await client.close()

    asyncio.run(main())
