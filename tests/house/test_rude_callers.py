"""Callers that no client library would be, from outside: others are answered, and nothing stays taken."""

from __future__ import annotations

import os
import re
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from houses import Alone, house_config, request_of
from raw_http2 import CANCEL, DATA, END_STREAM, PING, RST_STREAM, RawConnection, frame, message, settings

from moeserve.proto import moe_pb2, moe_pb2_grpc
from moeserve.proto.client import MoeClient
from moeserve.runtime.launch.local_cluster import LocalCluster

EP2 = {"parallel__data_parallel_size": 2, "parallel__enable_expert_parallel": True}
FORWARD = "/moeserve.v1.LaneService/Forward"
SECONDS = 30.0
MB = 1 << 20
CALLS = 64  # that a door of the service under test holds
DOORS = ("lane", "front")

pytestmark = pytest.mark.timeout(180)


class Rudely:
    """A service with small limits, and one good caller that goes on all the time."""

    def __init__(self, house: LocalCluster, alone: Alone) -> None:
        self.house = house
        self.batch = alone.batch(8, seed=5)
        self.right = alone.forward(1, *self.batch)
        self.client = MoeClient(house.address, timeout=SECONDS)
        self.lane = self.client.topology().lanes[0].address
        self.request = request_of(1, self.batch)
        self.large = request_of(1, alone.batch(2000, seed=6)).SerializeToString()

    def address(self, door: str) -> str:
        return self.lane if door == "lane" else self.house.address

    def path(self, door: str) -> str:
        return FORWARD if door == "lane" else FORWARD.replace("Lane", "Front")

    def serves(self) -> None:
        for _ in range(5):
            torch.testing.assert_close(self.client.forward(1, *self.batch), self.right, rtol=1e-4, atol=1e-4)

    def threads(self) -> int:
        return sum(len(os.listdir(f"/proc/{self.house.pid(rank)}/task")) for rank in (0, 1))

    def resident(self) -> int:
        pages = Path(f"/proc/{self.house.pid(0)}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def in_flight(self) -> float:
        found = 0.0
        for target in self.house.metrics_targets()[1:]:
            with urllib.request.urlopen(f"http://{target}/metrics", timeout=10) as answer:
                text = answer.read().decode()
            found += sum(float(value) for value in re.findall(r"moe_requests_in_flight\{.*\} (\S+)", text))
        return found


@pytest.fixture(scope="module")
def rudely(checkpoint_path: Path, alone: Alone) -> Iterator[Rudely]:
    limits = {"max_concurrent_calls": CALLS, "max_streams": 32, "request_seconds": 3.0, "unread_seconds": 3.0}
    given = {f"server__{key}": value for key, value in limits.items()}
    with LocalCluster(house_config(checkpoint_path, **given, **EP2)) as house:
        made = Rudely(house, alone)
        made.serves()
        yield made
        made.serves()
        assert until(lambda: made.in_flight() == 0)
        assert until(lambda: made.threads() < 150)
        made.client.close()


def until(true: Callable[[], bool], seconds: float = SECONDS) -> bool:
    limit = time.monotonic() + seconds
    while not true() and time.monotonic() < limit:
        time.sleep(0.05)
    return true()


def stub(rudely: Rudely, door: str) -> Any:
    channel = grpc.insecure_channel(rudely.address(door), options=[("grpc.use_local_subchannel_pool", 1)])
    return (moe_pb2_grpc.LaneServiceStub if door == "lane" else moe_pb2_grpc.FrontServiceStub)(channel)


@pytest.mark.parametrize("door", DOORS)
def test_calls_that_are_cancelled_at_once_or_later(rudely: Rudely, door: str) -> None:
    asked = stub(rudely, door)
    for pause in (0.0, 0.001, 0.01):
        calls = [asked.Forward.future(rudely.request, timeout=SECONDS) for _ in range(100)]
        time.sleep(pause)
        for call in calls:
            call.cancel()
    rudely.serves()


@pytest.mark.parametrize("door", DOORS)
def test_messages_that_come_byte_by_byte_or_never_end(rudely: Rudely, door: str) -> None:
    raw = [RawConnection(rudely.address(door)) for _ in range(20)]
    begun = [(each, each.begin(rudely.path(door))) for each in raw for _ in range(5)]
    data = message(rudely.request.SerializeToString())
    for at in range(30):
        for each, stream in begun:
            with suppress(OSError):
                each.socket.sendall(frame(DATA, 0, stream, data[at : at + 1]))
        time.sleep(0.1)
        if at % 10 == 0:
            rudely.serves()
    ended = 0

    def are_ended() -> bool:
        nonlocal ended
        ended += sum(kind == RST_STREAM for each in raw for kind, _, _, _ in each.frames(0.01))
        return ended >= 90

    assert until(are_ended, 5.0), f"calls whose message does not come within 3 s are ended: {ended}"
    for each in raw:
        each.close()


def test_answers_that_nobody_reads(rudely: Rudely) -> None:
    """With a window of nothing the answers of unary calls stay at the door: in bounds, and not for long.

    The door holds 64 calls at most, each with its message, the tensors of it, the answer and the answer's
    message: a tenth of what the 1200 that are asked would take.
    """
    held, left = CALLS * 4 * len(rudely.large), 60 * MB
    before = rudely.resident()
    raw = [RawConnection(rudely.lane, window=0) for _ in range(4)]
    over = threading.Event()

    def ask(each: RawConnection) -> None:
        with suppress(OSError):
            for _ in range(300):
                if not over.is_set():
                    each.ask(FORWARD, rudely.large)

    asking = [threading.Thread(target=ask, args=(each,), daemon=True) for each in raw]
    for each in asking:
        each.start()
    most, limit = 0, time.monotonic() + 8
    while time.monotonic() < limit:
        most = max(most, rudely.resident())
        time.sleep(0.1)
    rudely.serves()
    over.set()
    for each in raw:
        each.reset()
    print(f"{(most - before) / MB:.0f} MB more at most")
    assert most - before < held + left
    assert until(lambda: rudely.resident() < before + left)


@pytest.mark.parametrize("door", DOORS)
def test_connections_that_are_reset_while_their_calls_run(rudely: Rudely, door: str) -> None:
    body = rudely.request.SerializeToString()
    for _ in range(30):
        raw = RawConnection(rudely.address(door))
        for _ in range(10):
            raw.ask(rudely.path(door), body)
        raw.reset()
    rudely.serves()


@pytest.mark.parametrize("door", DOORS)
def test_calls_that_are_reset_as_soon_as_they_begin(rudely: Rudely, door: str) -> None:
    raw = RawConnection(rudely.address(door))
    with suppress(OSError):
        for _ in range(5000):
            stream = raw.begin(rudely.path(door))
            raw.socket.sendall(frame(RST_STREAM, 0, stream, CANCEL.to_bytes(4, "big")))
    rudely.serves()
    raw.close()


@pytest.mark.parametrize("flood", ["settings", "pings", "empty data"])
@pytest.mark.parametrize("door", DOORS)
def test_floods_of_frames(rudely: Rudely, door: str, flood: str) -> None:
    raw = RawConnection(rudely.address(door))
    stream = raw.begin(rudely.path(door))
    said = {
        "settings": settings(window=1 << 20),
        "pings": frame(PING, 0, 0, bytes(8)),
        "empty data": frame(DATA, 0, stream, b""),
    }[flood]
    before = rudely.resident()
    with suppress(OSError):
        for _ in range(100):
            raw.socket.sendall(said * 500)
    rudely.serves()
    assert rudely.resident() < before + 100 * MB
    raw.close()


def test_many_small_calls_of_many_connections(rudely: Rudely) -> None:
    ended: list[str] = []

    def ask() -> None:
        calls = [stub(rudely, "lane").Forward.future(rudely.request, timeout=SECONDS) for _ in range(50)]
        for call in calls:
            with suppress(grpc.RpcError):
                call.result(SECONDS)
            ended.append(call.code().name)

    asking = [threading.Thread(target=ask) for _ in range(20)]
    for each in asking:
        each.start()
    rudely.serves()
    for each in asking:
        each.join(SECONDS)
    assert set(ended) <= {"OK", "RESOURCE_EXHAUSTED"} and len(ended) == 1000


def test_half_closed_and_empty_calls(rudely: Rudely) -> None:
    raw = RawConnection(rudely.lane)
    for _ in range(50):
        raw.socket.sendall(frame(DATA, END_STREAM, raw.begin(FORWARD), b""))
        raw.socket.sendall(frame(DATA, END_STREAM, raw.begin(FORWARD), message(b"")))
        raw.socket.sendall(frame(DATA, END_STREAM, raw.begin(FORWARD), b"\0\0\0\0\x09half"))
    rudely.serves()
    raw.close()


def test_a_call_without_a_deadline_is_answered(rudely: Rudely) -> None:
    reply = stub(rudely, "lane").Forward(rudely.request)
    assert isinstance(reply, moe_pb2.ForwardReply) and reply.hidden.data
