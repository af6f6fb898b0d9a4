"""Both clients when calls fail: what is tried again, for how long, and where."""

import asyncio
import threading
import time
from concurrent import futures

import grpc
import pytest
import torch
from proto_fake import GIVEN_UP, FakeLane, rows

from moeserve.proto import moe_pb2
from moeserve.proto.client import AsyncMoeClient, MoeClient, Patience
from moeserve.proto.client.batch import SPLIT_ROWS
from moeserve.proto.client.lanes import Lanes
from moeserve.proto.errors import (
    PUSHBACK_KEY,
    REASON_KEY,
    DeadlineExceeded,
    InvalidArgument,
    MoeError,
    NotFound,
    Overloaded,
    Unavailable,
)
from moeserve.proto.tensors import encode, plain

UNAVAILABLE = (grpc.StatusCode.UNAVAILABLE, {REASON_KEY: "REFORMING"})


def small(near: bool):
    return rows(8, 2048) if near else rows(2)


@pytest.mark.parametrize("near", [False, True], ids=["unary", "stream"])
def test_unavailable_is_tried_again_with_the_same_job_on_lanes_found_anew(client_of, service, near):
    hidden, experts, weights = small(near)
    for lane in service.lanes:
        lane.scripts = [UNAVAILABLE, UNAVAILABLE]
    with client_of(service.address) as client:
        assert torch.equal(client.forward(3, hidden, experts, weights), hidden * 2)
    assert sorted(request.attempt for request in service.asked) == [0, 1, 2, 3, 4]
    assert len({request.job_id for request in service.asked}) == 1
    assert service.topologies == 5


@pytest.mark.parametrize("near", [False, True], ids=["unary", "stream"])
def test_other_failures_are_not_tried_again(client_of, service, near):
    codes = {
        grpc.StatusCode.INVALID_ARGUMENT: InvalidArgument,
        grpc.StatusCode.NOT_FOUND: NotFound,
        grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
        grpc.StatusCode.INTERNAL: MoeError,
        grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    }
    with client_of(service.address, lane=0) as client:
        for count, (code, kind) in enumerate(codes.items(), 1):
            service.lanes[0].scripts = [(code, {REASON_KEY: "WHY"})]
            with pytest.raises(kind, match=rf"{code.name} \(WHY\): lane 0 says no") as raised:
                client.forward(3, *small(near))
            assert raised.value.code == code.name and raised.value.reason == "WHY"
            assert len(service.asked) == count


@pytest.mark.parametrize("near", [False, True], ids=["unary", "stream"])
def test_overload_is_tried_again_only_after_the_server_s_pushback(client_of, service, near):
    full = grpc.StatusCode.RESOURCE_EXHAUSTED
    service.lanes[0].scripts = [(full, {PUSHBACK_KEY: "150"})]
    with client_of(service.address, lane=0) as client:
        started = time.monotonic()
        client.forward(3, *small(near))
        assert time.monotonic() - started >= 0.15
        service.lanes[0].scripts = [(full, {PUSHBACK_KEY: "60000"})]
        with pytest.raises(Overloaded) as raised:
            client.forward(3, *small(near), timeout=2)
        assert raised.value.retry_after == 60
    assert [request.attempt for request in service.asked] == [0, 1, 0]


def test_attempts_can_be_bounded(client_of, far):
    far.lanes[0].scripts = [UNAVAILABLE] * 9
    with client_of(far.address, lane=0, timeout=Patience(attempts=3, first_wait=0.001)) as client:
        with pytest.raises(Unavailable):
            client.forward(3, *rows(2))
        assert len(far.asked) == 3
        with pytest.raises(Unavailable):
            client.forward(3, *rows(2), timeout=Patience(attempts=1))
        assert len(far.asked) == 4


@pytest.mark.timed
@pytest.mark.parametrize("near", [False, True], ids=["unary", "stream"])
def test_a_late_answer_is_a_deadline_exceeded_in_time_and_disturbs_nobody(client_of, service, near):
    hidden, experts, weights = small(near)
    service.lanes[0].scripts = [1.0]
    with client_of(service.address, lane=0) as client:
        started = time.monotonic()
        said = "the lane" if near else service.lanes[0].address
        with pytest.raises(DeadlineExceeded, match=rf"{said} did not answer within 0\.[23]\d* s"):
            client.forward(3, hidden, experts, weights, timeout=0.3)
        assert 0.25 < time.monotonic() - started < 0.8
        assert torch.equal(client.forward(3, hidden * 3, experts, weights), hidden * 6)


def test_the_stream_carries_the_deadline(client_of, service):
    with client_of(service.address, lane=0) as client:
        client.forward(3, *small(near=True), timeout=5)
    (request,) = service.asked
    assert 4000 < request.timeout_ms <= 5000


def test_a_group_that_does_not_serve_is_waited_for(client_of, far):
    far.reason = "rank 1 was lost"
    threading.Timer(0.3, lambda: setattr(far, "reason", "")).start()
    with client_of(far.address) as client:
        hidden, experts, weights = rows(2)
        assert torch.equal(client.forward(3, hidden, experts, weights), hidden * 2)
    far.reason = "rank 1 was lost"
    with (
        client_of(far.address, timeout=2.0) as client,
        pytest.raises(
            Unavailable, match=r"UNAVAILABLE \(not_serving\): the group does not serve now: rank 1 was lost"
        ),
    ):
        client.forward(3, hidden, experts, weights)


@pytest.mark.parametrize("near", [False, True], ids=["unary", "stream"])
def test_a_lane_that_died_is_found_at_its_new_address(client_of, service, near):
    hidden, experts, weights = small(near)
    with client_of(service.address, lane=1) as client:
        client.forward(3, hidden, experts, weights)
        service.lanes[1].stop()
        service.lanes[1] = FakeLane(1)
        service.generation = 2
        assert torch.equal(client.forward(3, hidden, experts, weights), hidden * 2)
        assert [request.attempt for request in service.lanes[1].asked] == [1]


@pytest.mark.parametrize("near", [False, True], ids=["unary", "stream"])
def test_a_lane_that_restarts_at_the_same_address_is_used_again(client_of, service, near):
    hidden, experts, weights = small(near)
    with client_of(service.address, lane=1) as client:
        client.forward(3, hidden, experts, weights)
        port = int(service.lanes[1].address.split(":")[1])
        service.lanes[1].stop()
        service.lanes[1] = FakeLane(1, port)
        started = time.monotonic()
        assert torch.equal(client.forward(3, hidden, experts, weights), hidden * 2)
        assert time.monotonic() - started < 5


@pytest.mark.parametrize("near", [False, True], ids=["unary", "stream"])
def test_a_call_that_its_server_gives_up_without_a_word_is_made_again(client_of, service, near):
    hidden, experts, weights = small(near)
    service.lanes[0].scripts = [GIVEN_UP]
    with client_of(service.address, lane=0) as client:
        assert torch.equal(client.forward(3, hidden, experts, weights, timeout=20), hidden * 2)
        assert sorted(request.attempt for request in service.asked) == [0, 1]
        once = Patience(timeout=20, attempts=1)
        service.lanes[0].scripts = [GIVEN_UP]
        with pytest.raises(Unavailable, match="the server gave the call up, as one that stops does"):
            client.forward(3, hidden, experts, weights, timeout=once)


def test_time_that_runs_out_while_trying_again_tells_what_kept_failing(client_of, far):
    far.lanes[0].scripts = [UNAVAILABLE, 4.0]
    with client_of(far.address, lane=0, timeout=2.0) as client:
        with pytest.raises(Unavailable, match="lane 0 says no") as raised:
            client.forward(3, *rows(2))
        assert isinstance(raised.value.__cause__, DeadlineExceeded)


@pytest.mark.timed
def test_nobody_at_the_address_is_unavailable_in_time(client_of):
    with client_of("127.0.0.1:1", timeout=0.5) as client:
        started = time.monotonic()
        with pytest.raises((Unavailable, DeadlineExceeded)):
            client.forward(3, *rows(2))
        assert time.monotonic() - started < 2


def test_one_failed_part_fails_the_call_and_leaves_the_client_well(client_of, service):
    hidden, experts, weights = rows(4 * SPLIT_ROWS, 1024)
    service.lanes[1].scripts = [(grpc.StatusCode.INVALID_ARGUMENT, {})]
    with client_of(service.address) as client:
        with pytest.raises(InvalidArgument, match="lane 1 says no"):
            client.forward(3, hidden, experts, weights)
        assert torch.equal(client.forward(3, hidden, experts, weights), hidden * 2)


@pytest.mark.parametrize("wrong", [{"timeout": 0}, {"timeout": -1.0}])
def test_a_timeout_of_nothing_is_refused(wrong):
    with pytest.raises(ValueError, match="must be more than 0 seconds"):
        MoeClient("127.0.0.1:1", **wrong)
    with pytest.raises(ValueError, match="attempts=0 must be at least 1"):
        Patience(attempts=0)
    with pytest.raises(ValueError, match=r"0 < first_wait=2 <= longest_wait=1"):
        Patience(first_wait=2, longest_wait=1)


def test_links_to_lanes_that_left_are_closed_and_not_made_again():
    """A call that still holds the topology of before must not connect once more to who is gone."""
    made: list[str] = []

    def connect(address: str, _: int) -> str:
        made.append(address)
        return address

    def topology(*addresses: str) -> moe_pb2.GetTopologyReply:
        lanes = [moe_pb2.Lane(rank=rank, address=address) for rank, address in enumerate(addresses)]
        return moe_pb2.GetTopologyReply(lanes=lanes, serving=True)

    lanes: Lanes[str] = Lanes(connect)
    before, after = topology("a:1", "b:1"), topology("a:1", "b:2")
    assert lanes.found(before) == []
    assert [lanes.link(before, lane) for lane in before.lanes] == ["a:1", "b:1"]
    assert lanes.found(after) == ["b:1"]
    with pytest.raises(Unavailable, match="the lane at b:1 left the group"):
        lanes.link(before, before.lanes[1])
    assert lanes.link(before, before.lanes[0]) == "a:1"
    assert lanes.link(after, after.lanes[1]) == "b:2"
    assert made == ["a:1", "b:1", "b:2"]


CLOSED = r"client_closed\): this client of .* is closed"


@pytest.mark.parametrize("near", [False, True], ids=["unary", "stream"])
def test_a_closed_client_says_so_at_once(service, near):
    """Calls under way are not tried again, and later ones are not tried."""
    held, client = threading.Event(), MoeClient(service.address, lane=0)
    client.forward(3, *small(near))
    service.lanes[0].scripts = [held]
    with futures.ThreadPoolExecutor(1) as pool:
        call = pool.submit(client.forward, 3, *small(near))
        assert asked(service, 2)
        started = time.monotonic()
        client.close()
        with pytest.raises(MoeError, match=CLOSED):
            call.result(10)
        with pytest.raises(MoeError, match=CLOSED):
            client.forward(3, *small(near))
        assert time.monotonic() - started < 5
    held.set()


@pytest.mark.parametrize("near", [False, True], ids=["unary", "stream"])
def test_a_closed_asynchronous_client_says_so_at_once(service, near):
    held = threading.Event()

    async def run() -> None:
        client = AsyncMoeClient(service.address, lane=0)
        await client.forward(3, *small(near))
        service.lanes[0].scripts = [held]
        call = asyncio.ensure_future(client.forward(3, *small(near)))
        assert await asyncio.to_thread(asked, service, 2)
        await client.close()
        with pytest.raises(MoeError, match=CLOSED):
            await asyncio.wait_for(call, 5)
        with pytest.raises(MoeError, match=CLOSED):
            await asyncio.wait_for(client.forward(3, *small(near)), 5)

    asyncio.run(run())
    held.set()


def asked(service, calls: int) -> bool:
    """Whether the first lane was asked so often, soon."""
    end = time.monotonic() + 10
    while len(service.lanes[0].asked) < calls and time.monotonic() < end:
        time.sleep(0.01)
    return len(service.lanes[0].asked) >= calls


def test_a_service_that_knows_no_such_call_is_told_as_older(client_of):
    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with (
            client_of(f"127.0.0.1:{port}") as client,
            pytest.raises(MoeError, match=r"UNIMPLEMENTED: .*of no older release than this client\?"),
        ):
            client.forward(3, *rows(1))
    finally:
        server.stop(0).wait()


def test_memory_of_a_lane_that_has_another_process_by_now_is_made_there(client_of, service):
    with client_of(service.address) as client:
        client.allocate(1, (2, 4), "fp32")
        before, service.lanes[1] = service.lanes[1], FakeLane(1)
        before.stop()
        assert client.allocate(1, (2, 4), "fp32").region.address == service.lanes[1].address
        with pytest.raises(NotFound, match="lane 2 is not one"):
            client.allocate(2, (2, 4), "fp32")
        service.lanes.append(FakeLane(2))
        assert client.allocate(2, (2, 4), "fp32").rank == 2


def test_a_lane_that_was_not_there_is_looked_for_again_by_the_next_call(client_of, service):
    hidden, experts, weights = rows(2)
    with client_of(service.address) as client:
        client.forward(3, hidden, experts, weights)
        with pytest.raises(NotFound, match="lane 2 is not one"):
            client.forward(3, hidden, experts, weights, lane=2)
        service.lanes.append(FakeLane(2))
        assert torch.equal(client.forward(3, hidden, experts, weights, lane=2), hidden * 2)


def test_a_stream_goes_to_the_process_that_has_its_lane_now(service):
    hidden, experts, weights = (encode(plain(one, "rows")) for one in rows(2))
    choice = moe_pb2.Choice(ids=experts, weights=weights)
    with MoeClient(service.address) as client:
        for turn in range(2):
            stream = client.stream(1)
            request = moe_pb2.ForwardRequest(layer=3, hidden=hidden, choice=choice, job_id=f"by-hand-{turn}")
            assert stream.ask(request, 5.0).epoch == 8
            stream.close()
            before, service.lanes[1] = service.lanes[1], FakeLane(1)
            before.stop()


@pytest.mark.parametrize("asked", ["lane", "memory", "stream"])
def test_while_the_front_door_is_away_what_was_found_serves_whoever_asks_for_what(client_of, service, asked):
    """A lane that is not there, or a stream, has nobody else wait for the front door."""
    hidden, experts, weights = rows(2)
    with client_of(service.address, timeout=3.0) as client:
        client.forward(3, hidden, experts, weights)
        found = client._core.lanes.current if isinstance(client, MoeClient) else None
        service.server.stop(0).wait()
        if asked == "lane":
            with pytest.raises(NotFound, match="lane 2 is not one"):
                client.forward(3, hidden, experts, weights, lane=2)
        elif asked == "memory":
            with pytest.raises(NotFound, match="lane 2 is not one"):
                client.allocate(2, (2, 4), "fp32")
        elif isinstance(client, MoeClient):
            client.stream(1).close()
        assert torch.equal(client.forward(3, hidden, experts, weights), hidden * 2)
        assert found is None or client._core.lanes.current is found
