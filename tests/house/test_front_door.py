"""The front door under a bare stub: any deadline or none, streams that wait, callers that leave."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
import torch
from failures import stand_still
from houses import Alone, request_of

from moeserve.proto import moe_pb2, moe_pb2_grpc
from moeserve.proto.client import AsyncMoeClient, MoeClient
from moeserve.runtime.launch.local_cluster import LocalCluster

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
SECONDS = 20.0
ROWS = 2048  # so many that four lanes share them


@dataclass(frozen=True)
class Doors:
    """Stubs of both doors, that set no deadline by themselves."""

    front: Any
    lane: Any


@pytest.fixture
def doors(house: LocalCluster) -> Iterator[Doors]:
    with MoeClient(house.address) as client:
        address = client.topology().lanes[0].address
    with grpc.insecure_channel(house.address) as front, grpc.insecure_channel(address) as lane:
        yield Doors(moe_pb2_grpc.FrontServiceStub(front), moe_pb2_grpc.LaneServiceStub(lane))


def _soon(call: Callable[[], Any]) -> Any:
    """What `call` returns or raises; a call that hangs fails the test."""
    ended: Future[Any] = Future()

    def run() -> None:
        try:
            ended.set_result(call())
        except BaseException as error:
            ended.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return ended.result(SECONDS)


def _hidden(reply: moe_pb2.ForwardReply) -> torch.Tensor:
    return torch.frombuffer(bytearray(reply.hidden.data), dtype=torch.float32).view(*reply.hidden.shape)


METADATA = (("x-request-id", "7"), ("authorization", "Bearer nobody"))


@pytest.mark.parametrize("rows", [1, ROWS])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"timeout": None},
        {"metadata": METADATA},
        {"metadata": METADATA, "timeout": 30},
        {"timeout": 1e6},
        {"timeout": 1e8},
        {"timeout": 1e9},
        {"timeout": 5e9},
        {"wait_for_ready": True},
        {"compression": grpc.Compression.Gzip},
    ],
    ids=str,
)
def test_a_call_is_answered_whatever_its_deadline(
    doors: Doors, alone: Alone, options: dict[str, Any], rows: int
) -> None:
    batch = alone.batch(rows, seed=rows)
    future = doors.front.Forward.future(request_of(1, batch), **options)
    torch.testing.assert_close(_hidden(future.result(SECONDS)), alone.forward(1, *batch), **CLOSE)


@pytest.mark.parametrize("seconds", [-1.0, 0.0, 1e-9, 1e-5, 1e-3])
def test_a_deadline_too_short_is_said_and_the_service_goes_on(
    doors: Doors, alone: Alone, seconds: float
) -> None:
    batch = alone.batch(3, seed=3)
    try:
        reply = doors.front.Forward.future(request_of(0, batch), timeout=seconds).result(SECONDS)
    except grpc.RpcError as failed:
        assert failed.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    else:
        assert seconds == 1e-3, "no answer is there so soon"
        torch.testing.assert_close(_hidden(reply), alone.forward(0, *batch), **CLOSE)
    after = doors.front.Forward.future(request_of(0, batch)).result(SECONDS)
    torch.testing.assert_close(_hidden(after), alone.forward(0, *batch), **CLOSE)


@pytest.mark.parametrize("name", ["GetTopology", "GetModel", "GetStatus"])
def test_questions_need_no_deadline(doors: Doors, name: str) -> None:
    request = getattr(moe_pb2, f"{name}Request")()
    assert getattr(doors.front, name).future(request).result(SECONDS).IsInitialized()


def _streamed_refusal(stub: Any, request: moe_pb2.ForwardRequest) -> tuple[str, str, str]:
    """Code, reason and text of what a stream's only request is told."""
    (reply,) = stub.ForwardStream(iter([request]), timeout=SECONDS)
    code = next(code.name for code in grpc.StatusCode if code.value[0] == reply.error.code)
    return code, reply.error.reason, reply.error.message


class Talk:
    """A stream whose requests are sent one by one."""

    def __init__(self, stub: Any, **options: Any) -> None:
        self._requests: queue.SimpleQueue[moe_pb2.ForwardRequest | None] = queue.SimpleQueue()
        self.replies = stub.ForwardStream(iter(self._requests.get, None), **options)

    def say(self, request: moe_pb2.ForwardRequest) -> None:
        self._requests.put(request)

    def hear(self) -> moe_pb2.ForwardStreamReply:
        return _soon(lambda: next(self.replies))

    def half_close(self) -> None:
        self._requests.put(None)


@pytest.fixture
def talk(doors: Doors) -> Iterator[Callable[..., Talk]]:
    """Opens streams at the front door, and ends them."""
    begun: list[Talk] = []

    def begin(**options: Any) -> Talk:
        begun.append(Talk(doors.front, **{"timeout": 2 * SECONDS} | options))
        return begun[-1]

    yield begin
    for each in begun:
        each.replies.cancel()
        each.half_close()


def _named(job: str, layer: int, batch: Any) -> moe_pb2.ForwardRequest:
    request = request_of(layer, batch)
    request.job_id = job
    return request


def test_a_stream_answers_each_request_before_the_next(talk: Callable[..., Talk], alone: Alone) -> None:
    stream = talk()
    for turn, rows in enumerate((1, 5, 0, ROWS)):
        batch = alone.batch(rows, seed=turn)
        stream.say(_named(f"job-{turn}", 1, batch))
        reply = stream.hear()
        assert reply.job_id == f"job-{turn}" and not reply.HasField("error")
        if rows:
            torch.testing.assert_close(_hidden(reply.reply), alone.forward(1, *batch), **CLOSE)
    stream.say(moe_pb2.ForwardRequest(layer=77, job_id="bad"))
    assert stream.hear().error.message.startswith("layer 77")
    stream.half_close()
    assert _soon(lambda: list(stream.replies)) == []
    assert stream.replies.code() == grpc.StatusCode.OK


@pytest.mark.parametrize("calls", [0, 1, 50])
def test_a_half_closed_stream_is_answered_to_the_end(
    talk: Callable[..., Talk], alone: Alone, calls: int
) -> None:
    stream = talk()
    for at in range(calls):
        stream.say(_named(f"job-{at}", at % 2, alone.batch(1 + at % 4, seed=at)))
    stream.half_close()
    replies = _soon(lambda: list(stream.replies))
    assert sorted(reply.job_id for reply in replies) == sorted(f"job-{at}" for at in range(calls))
    assert not any(reply.HasField("error") for reply in replies)
    assert stream.replies.code() == grpc.StatusCode.OK


def test_a_streams_call_that_is_too_late_is_told_as_by_a_lane(
    doors: Doors, house: LocalCluster, alone: Alone
) -> None:
    request = request_of(1, alone.batch(2, seed=1))
    request.timeout_ms = 300
    stand_still(house.pid(3))  # no step ends
    try:
        said = _streamed_refusal(doors.front, request)
    finally:
        os.kill(house.pid(3), signal.SIGCONT)
    assert said == ("DEADLINE_EXCEEDED", "deadline", "layer 1: no answer within the deadline")


def _metrics(target: str) -> dict[str, float]:
    with urllib.request.urlopen(f"http://{target}/metrics", timeout=10) as answer:
        lines = (line for line in answer.read().decode().splitlines() if not line.startswith("#"))
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def _at_lanes(house: LocalCluster, metric: str, labels: str = "") -> list[float]:
    """Of each of the first three lanes; the fourth rank stands still."""
    return [
        sum(value for name, value in _metrics(target).items() if name.startswith(metric) and labels in name)
        for target in house.metrics_targets()[1:4]
    ]


def _cancelled_at_lanes(house: LocalCluster) -> float:
    return sum(_at_lanes(house, "moe_requests_total", 'code="CANCELLED",method="Forward"'))


def _until(true: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + SECONDS / 2
    while not true():
        assert time.monotonic() < until, what
        time.sleep(0.05)


@pytest.mark.parametrize("way", ["unary", "stream"])
def test_a_caller_that_leaves_takes_its_calls_along(
    doors: Doors, house: LocalCluster, talk: Callable[..., Talk], alone: Alone, way: str
) -> None:
    batch = alone.batch(ROWS, seed=4)
    before = _cancelled_at_lanes(house)
    stand_still(house.pid(3))  # no step ends
    try:
        if way == "unary":
            doomed = doors.front.Forward.future(request_of(0, batch))
        else:
            stream = talk(timeout=None)
            stream.say(_named("doomed", 0, batch))
            doomed = stream.replies
        _until(lambda: min(_at_lanes(house, "moe_requests_in_flight")) >= 1, "a lane has not got its part")
        doomed.cancel()
        _until(
            lambda: _cancelled_at_lanes(house) >= before + 3,
            "lanes still wait for an answer that nobody takes",
        )
    finally:
        os.kill(house.pid(3), signal.SIGCONT)
    after = doors.front.Forward.future(request_of(0, batch)).result(SECONDS)
    torch.testing.assert_close(_hidden(after), alone.forward(0, *batch), **CLOSE)


def test_an_asynchronous_call_that_is_cancelled_is_given_up_in_shared_memory_too(
    house: LocalCluster, alone: Alone
) -> None:
    """Its stream is that of other calls, and goes on; a call that nobody waits for keeps no room."""
    labels = 'code="CANCELLED",method="ForwardStream"'

    async def main() -> None:
        async with AsyncMoeClient(
            house.address, timeout=SECONDS, lane=0, transport="shared_memory"
        ) as client:
            await client.forward(0, *alone.batch(4, seed=1))
            before = sum(_at_lanes(house, "moe_requests_total", labels))
            stand_still(house.pid(3))  # no step ends
            try:
                calls = [asyncio.create_task(client.forward(0, *alone.batch(4, seed=at))) for at in range(4)]
                await asyncio.to_thread(
                    _until, lambda: sum(_at_lanes(house, "moe_requests_in_flight")) >= 4, "they are not there"
                )
                for call in calls[:3]:
                    call.cancel()
                await asyncio.to_thread(
                    _until,
                    lambda: sum(_at_lanes(house, "moe_requests_total", labels)) >= before + 3,
                    "the lane still waits for answers that nobody takes",
                )
            finally:
                os.kill(house.pid(3), signal.SIGCONT)
            torch.testing.assert_close(await calls[3], alone.forward(0, *alone.batch(4, seed=3)), **CLOSE)

    asyncio.run(main())


def test_callers_that_leave_streams_open_no_thread(doors: Doors, alone: Alone, house: LocalCluster) -> None:
    """More streams than the front door has threads, each left while it is silent."""
    with MoeClient(house.address, timeout=SECONDS) as client:
        for at in range(40):
            stream = Talk(doors.front)
            stream.say(_named("job", 0, alone.batch(1, seed=at)))
            assert stream.hear().job_id == "job"
            stream.replies.cancel()
            stream.half_close()
        assert client.status().state == "serving"
