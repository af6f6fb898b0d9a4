"""A caller sees and releases its own regions, and nobody else's."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest

from moeserve.proto import moe_pb2, moe_pb2_grpc
from moeserve.runtime.doors.endpoint import DoorLimits, Endpoint
from moeserve.runtime.doors.lane_door import NOT_THE_FRONT_DOOR, LaneDoor
from moeserve.runtime.doors.payloads import Regions
from moeserve.runtime.rank.lanes.lane import Lane


@pytest.fixture
def address() -> Iterator[str]:
    regions = Regions()
    door = LaneDoor(None, Lane(0, 1, 1), regions, lambda: 1, lambda *observed: None)  # type: ignore[arg-type]
    endpoint = Endpoint({"LaneService": door}, NOT_THE_FRONT_DOOR, DoorLimits(), 1 << 20)
    yield endpoint.start("127.0.0.1", 0)
    endpoint.stop(0)
    regions.close()


def stub(address: str) -> moe_pb2_grpc.LaneServiceStub:
    options = [("grpc.use_local_subchannel_pool", 1)]
    return moe_pb2_grpc.LaneServiceStub(grpc.insecure_channel(address, options=options))


def listed(caller: moe_pb2_grpc.LaneServiceStub) -> list[str]:
    return [region.name for region in caller.ListRegions(moe_pb2.ListRegionsRequest()).regions]


def test_a_caller_sees_and_releases_its_own_regions_only(address: str) -> None:
    mine, other = stub(address), stub(address)
    made = mine.CreateRegion(moe_pb2.CreateRegionRequest(size=4096))
    assert listed(mine) == ["region-1"] and listed(other) == []
    with pytest.raises(grpc.RpcError) as refused:
        other.ReleaseRegion(moe_pb2.ReleaseRegionRequest(name="region-1"))
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    assert listed(mine) == ["region-1"]
    other.ReleaseRegion(moe_pb2.ReleaseRegionRequest(name=made.name))  # who was given the name may
    assert listed(mine) == []
