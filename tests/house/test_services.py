"""The services of both doors of a running group, as callers from outside meet them: full names and bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from houses import Alone, request_of

from moeserve.proto import moe_pb2, moe_pb2_grpc
from moeserve.proto.client import MoeClient
from moeserve.proto.errors import REASON_KEY
from moeserve.runtime.launch.local_cluster import LocalCluster

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
SERVED = {
    "lane": ("LaneService", "DeviceLaneService", "MoeService"),
    "front": ("FrontService", "AdminService", "MoeService"),
}
DOORS = tuple(SERVED)
both = pytest.mark.parametrize("door", DOORS)


@dataclass(frozen=True)
class Channels:
    """One channel to a lane, one to the front door."""

    lane: grpc.Channel
    front: grpc.Channel

    def call(self, door: str, path: str, payload: bytes = b"") -> bytes:
        channel = getattr(self, door)
        return channel.unary_unary(path)(payload, timeout=20)

    def refusal(self, door: str, path: str, payload: bytes = b"") -> tuple[str, str, str]:
        """Code, reason and text of a call that has to fail."""
        with pytest.raises(grpc.RpcError) as failed:
            self.call(door, path, payload)
        trailing = dict(failed.value.trailing_metadata())
        return failed.value.code().name, trailing.get(REASON_KEY, ""), failed.value.details()


@pytest.fixture
def channels(house: LocalCluster) -> Iterator[Channels]:
    with MoeClient(house.address) as client:
        address = client.topology().lanes[0].address
    with grpc.insecure_channel(address) as lane, grpc.insecure_channel(house.address) as front:
        yield Channels(lane, front)


def _hidden(reply: moe_pb2.ForwardReply) -> torch.Tensor:
    return torch.frombuffer(bytearray(reply.hidden.data), dtype=torch.float32).view(*reply.hidden.shape)


@both
def test_reflection_lists_what_a_door_serves(channels: Channels, door: str) -> None:
    ask = reflection_pb2.ServerReflectionRequest(list_services="")
    stub = reflection_pb2_grpc.ServerReflectionStub(getattr(channels, door))
    (reply,) = stub.ServerReflectionInfo(iter([ask]), timeout=20)
    names = {service.name for service in reply.list_services_response.service}
    mine = {name for name in names if name.startswith("moeserve.")}
    assert mine == {f"moeserve.v1.{name}" for name in SERVED[door]}
    assert {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"} <= names


@both
def test_health_knows_each_service_of_a_door_and_no_other(channels: Channels, door: str) -> None:
    stub = health_pb2_grpc.HealthStub(getattr(channels, door))
    for name in ("", *(f"moeserve.v1.{name}" for name in SERVED[door])):
        answer = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=20)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    absent = "LaneService" if door == "front" else "AdminService"
    with pytest.raises(grpc.RpcError) as failed:
        stub.Check(health_pb2.HealthCheckRequest(service=f"moeserve.v1.{absent}"), timeout=20)
    assert failed.value.code() == grpc.StatusCode.NOT_FOUND


@both
@pytest.mark.parametrize("rows", [3, 200])
def test_a_call_is_answered_under_the_new_name_and_the_old(
    channels: Channels, alone: Alone, door: str, rows: int
) -> None:
    batch = alone.batch(rows, seed=rows)
    payload = request_of(1, batch).SerializeToString()
    answers = [
        moe_pb2.ForwardReply.FromString(channels.call(door, f"/moeserve.v1.{name}/Forward", payload))
        for name in (SERVED[door][0], "MoeService")
    ]
    for answer in answers:
        torch.testing.assert_close(_hidden(answer), alone.forward(1, *batch), **CLOSE)


def test_a_client_of_the_last_release_goes_on(channels: Channels, alone: Alone) -> None:
    """What such a client did: one stub of the old service at each door."""
    front, lane = (moe_pb2_grpc.MoeServiceStub(channel) for channel in (channels.front, channels.lane))
    assert len(front.GetTopology(moe_pb2.GetTopologyRequest(), timeout=20).lanes) == 4
    assert front.GetModel(moe_pb2.GetModelRequest(), timeout=20).layers
    assert front.GetStatus(moe_pb2.GetStatusRequest(), timeout=20).state == "serving"
    assert front.Rebalance(moe_pb2.RebalanceRequest(dry_run=True), timeout=20).outcome == "planned"
    made = lane.CreateRegion(moe_pb2.CreateRegionRequest(size=4096), timeout=20)
    assert len(lane.ListRegions(moe_pb2.ListRegionsRequest(), timeout=20).regions) >= 1
    lane.ReleaseRegion(moe_pb2.ReleaseRegionRequest(name=made.name), timeout=20)
    batch = alone.batch(2, seed=2)
    (reply,) = lane.ForwardStream(iter([request_of(0, batch)]), timeout=20)
    torch.testing.assert_close(_hidden(reply.reply), alone.forward(0, *batch), **CLOSE)


WRONG_DOOR = [
    ("lane", "FrontService/GetTopology"),
    ("lane", "FrontService/Forward"),
    ("lane", "AdminService/Reload"),
    ("lane", "AdminService/Rebalance"),
    ("lane", "MoeService/Reload"),
    ("front", "LaneService/Forward"),
    ("front", "LaneService/CreateRegion"),
    ("front", "MoeService/CreateRegion"),
    ("front", "MoeService/RegisterRegion"),
]


@pytest.mark.parametrize("payload", [b"", b"\xff" * 100], ids=["empty", "garbage"])
@pytest.mark.parametrize(("door", "path"), WRONG_DOOR)
def test_the_wrong_door_says_which_is_the_right_one(
    channels: Channels, door: str, path: str, payload: bytes
) -> None:
    code, reason, text = channels.refusal(door, f"/moeserve.v1.{path}", payload)
    assert code == "FAILED_PRECONDITION"
    if door == "lane":
        assert reason == "not_the_front_door" and "server.host and server.port" in text
    else:
        assert reason == "not_a_lane" and "GetTopology names the lanes" in text


def test_the_wrong_door_refuses_streams_too(channels: Channels, alone: Alone) -> None:
    stub: Any = moe_pb2_grpc.LaneServiceStub(channels.front)
    with pytest.raises(grpc.RpcError) as failed:
        list(stub.ForwardStream(iter([request_of(0, alone.batch(1, seed=1))]), timeout=20))
    assert failed.value.code() == grpc.StatusCode.FAILED_PRECONDITION


@both
@pytest.mark.parametrize(
    "path",
    [
        "/moeserve.v1.AdminService/Forward",
        "/moeserve.v1.FrontService/Reload",
        "/moeserve.v1.LaneService/GetTopology",
        "/moeserve.v1.MoeService/__init__",
        "/moeserve.v2.LaneService/Forward",
        "/LaneService/Forward",
        "/moeserve.v1.FrontService/",
    ],
)
def test_methods_that_no_service_has_are_unimplemented(channels: Channels, door: str, path: str) -> None:
    assert channels.refusal(door, path)[0] == "UNIMPLEMENTED"


@both
def test_after_all_that_calls_are_answered(channels: Channels, alone: Alone, door: str) -> None:
    for path in ("AdminService/Forward", "MoeService/Nothing", "LaneService/Forward", "FrontService/Forward"):
        try:
            channels.call(door, f"/moeserve.v1.{path}", b"\xff" * 1000)
        except grpc.RpcError as failed:
            assert failed.code() != grpc.StatusCode.UNAVAILABLE
    batch = alone.batch(4, seed=4)
    payload = request_of(0, batch).SerializeToString()
    answer = channels.call(door, f"/moeserve.v1.{SERVED[door][0]}/Forward", payload)
    found = _hidden(moe_pb2.ForwardReply.FromString(answer))
    torch.testing.assert_close(found, alone.forward(0, *batch), **CLOSE)
