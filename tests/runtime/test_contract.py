"""Each call of the contract is served by the doors that should, under the new names and the old ones."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from moeserve.proto import moe_pb2, moe_pb2_grpc
from moeserve.proto.errors import REASON_KEY
from moeserve.proto.texts import LONGEST_TEXT
from moeserve.runtime.doors.admin_door import AdminDoor
from moeserve.runtime.doors.calls.admission import Admission, DoorLimits
from moeserve.runtime.doors.calls.calling import Calling
from moeserve.runtime.doors.contract import _SORT, register
from moeserve.runtime.doors.endpoint import Endpoint
from moeserve.runtime.doors.front_door import NOT_A_LANE, FrontDoor
from moeserve.runtime.doors.lane_door import NOT_THE_FRONT_DOOR, LaneDoor
from moeserve.runtime.doors.passes.service import DeviceLaneDoor

SERVICES = moe_pb2.DESCRIPTOR.services_by_name
METHODS = [
    (service.name, method.name, method.client_streaming)
    for service in SERVICES.values()
    for method in service.methods
]
NEW = {name: {method.name for method in SERVICES[name].methods} for name in SERVICES if name != "MoeService"}
DOORS = {"lane": ("LaneService", "DeviceLaneService"), "front": ("FrontService", "AdminService")}
CLASSES = {
    "LaneService": LaneDoor,
    "DeviceLaneService": DeviceLaneDoor,
    "FrontService": FrontDoor,
    "AdminService": AdminDoor,
}


SINCE = {"SetLogLevel", "Scale", "AttachLane", "DetachLane", "ListDeviceLanes", "OpenDataConnection"}
"""Calls that came after the contract was divided; the old service never had them."""


def test_the_services_divide_what_the_old_one_had() -> None:
    both = {"Forward", "ForwardStream"}
    assert NEW["LaneService"] & NEW["FrontService"] == both
    assert not NEW["AdminService"] & (NEW["LaneService"] | NEW["FrontService"])
    old = {method.name for method in SERVICES["MoeService"].methods}
    assert set.union(*NEW.values()) == old | SINCE and not old & SINCE


@pytest.mark.parametrize("name", CLASSES)
def test_a_servicer_answers_each_of_its_calls_and_no_other(name: str) -> None:
    base = getattr(moe_pb2_grpc, f"{name}Servicer")
    assert issubclass(CLASSES[name], base)
    assert [m for m in NEW[name] if getattr(CLASSES[name], m) is getattr(base, m)] == []
    others = set.union(*NEW.values()) - NEW[name]
    assert [m for m in others if hasattr(CLASSES[name], m)] == []


class _Echo:
    """Answers every call of one service with the empty reply, and notes that it did."""

    def __init__(self, service: str, answered: list[tuple[str, str]]) -> None:
        for method in SERVICES[service].methods:
            reply = getattr(moe_pb2, method.output_type.name)()
            setattr(self, method.name, self._method(service, method, reply, answered))

    @staticmethod
    def _method(service: str, method: Any, reply: Any, answered: list[tuple[str, str]]) -> Any:
        def unary(request: Any, context: grpc.ServicerContext) -> Any:
            answered.append((service, method.name))
            return reply

        def stream(requests: Any, context: grpc.ServicerContext) -> Any:
            answered.append((service, method.name))
            yield from (reply for _ in requests)

        return stream if method.client_streaming else unary


class Doors:
    """A lane's and a front door's endpoint, whose servicers only note what they were asked."""

    def __init__(self) -> None:
        self.answered: list[tuple[str, str]] = []
        self._endpoints = {}
        self.channels = {}
        for door, refusal in {"lane": NOT_THE_FRONT_DOOR, "front": NOT_A_LANE}.items():
            servicers = {name: _Echo(name, self.answered) for name in DOORS[door]}
            self._endpoints[door] = Endpoint(servicers, refusal, DoorLimits(calls=4), 1 << 20)
            self.channels[door] = grpc.insecure_channel(self._endpoints[door].start("127.0.0.1", 0))

    def call(self, door: str, service: str, method: str, payload: bytes = b"") -> bytes:
        """Calls by the full name, as a caller without any stub of ours does."""
        channel, path = self.channels[door], f"/moeserve.v1.{service}/{method}"
        if method == "ForwardStream":
            (reply,) = channel.stream_stream(path)(iter([payload]), timeout=5)
            return reply
        return channel.unary_unary(path)(payload, timeout=5)

    def close(self) -> None:
        for channel in self.channels.values():
            channel.close()
        for endpoint in self._endpoints.values():
            endpoint.stop(0)


@pytest.fixture(scope="module")
def doors() -> Iterator[Doors]:
    made = Doors()
    yield made
    made.close()


def _server(door: str, service: str, method: str) -> str | None:
    """The service whose servicer should answer at `door`; None where the door should refuse."""
    if service != "MoeService":
        return service if service in DOORS[door] else None
    return next((name for name in DOORS[door] if method in NEW[name]), None)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(("service", "method", "streams"), METHODS)
def test_each_call_is_served_by_exactly_the_doors_that_should(
    doors: Doors, door: str, service: str, method: str, streams: bool
) -> None:
    doors.answered.clear()
    server = _server(door, service, method)
    if server is not None:
        assert doors.call(door, service, method) == b""
        assert doors.answered == [(server, method)]
        return
    with pytest.raises(grpc.RpcError) as refused:
        doors.call(door, service, method, b"\xff\xff no message at all")
    refusal = NOT_THE_FRONT_DOOR if door == "lane" else NOT_A_LANE
    assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert refused.value.details() == refusal.message
    assert (REASON_KEY, refusal.reason) in refused.value.trailing_metadata()
    assert doors.answered == []


@pytest.mark.parametrize(("service", "method", "streams"), METHODS)
def test_what_is_no_message_is_said_and_logged_nowhere(
    doors: Doors, service: str, method: str, streams: bool, caplog: pytest.LogCaptureFixture
) -> None:
    door = "lane" if service == "LaneService" else "front"
    if service == "MoeService" and method.endswith("Region"):
        door = "lane"
    if _server(door, service, method) is None:
        return
    with pytest.raises(grpc.RpcError) as refused:
        doors.call(door, service, method, b"\xff\xff no message at all")
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert (REASON_KEY, "bad_message") in refused.value.trailing_metadata()
    assert len(refused.value.details()) <= LONGEST_TEXT
    assert caplog.records == []


def test_what_came_before_it_on_a_stream_is_answered(doors: Doors) -> None:
    call = doors.channels["lane"].stream_stream("/moeserve.v1.LaneService/ForwardStream")
    replies = call(iter([b"", b"", b"\xff\xff", b""]), timeout=5)
    assert [next(replies), next(replies)] == [b"", b""]
    with pytest.raises(grpc.RpcError) as refused:
        next(replies)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_many_of_them_leave_nothing(doors: Doors) -> None:
    call = doors.channels["lane"].unary_unary("/moeserve.v1.LaneService/CreateRegion")

    def malformed(times: int) -> None:
        for _ in range(times):
            with pytest.raises(grpc.RpcError):
                call(b"\xff\xff", timeout=5)

    malformed(50)
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    malformed(200)
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 200 * 1000


@pytest.mark.parametrize("path", ["/moeserve.v1.LaneService/Drop", "/moeserve.v1.Nobody/Forward", "/x"])
@pytest.mark.parametrize("door", DOORS)
def test_what_the_contract_has_not_is_unimplemented(doors: Doors, door: str, path: str) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        doors.channels[door].unary_unary(path)(b"", timeout=5)
    assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_a_service_that_the_contract_has_not_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"services \['LaneServcie'\] are not in the contract, which has"):
        register(grpc.server(None), {"LaneServcie": object()}, NOT_A_LANE, Calling(Admission(DoorLimits())))


QUICK = {"SetLogLevel"}
"""Calls of AdminService that wait for nothing."""


def test_operations_that_take_long_have_threads_of_their_own() -> None:
    """In the threads of questions, those that wait for one another would leave GetTopology none."""
    assert {name for name, sort in _SORT.items() if sort == "operations"} == NEW["AdminService"] - QUICK
