"""Calls that end before a door sees them are counted, too, as those that it answers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from door_service import SECONDS, Service, held, silent, until
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from moeserve.proto import moe_pb2
from moeserve.runtime.doors.front_door import FrontDoor
from moeserve.runtime.doors.request import NotServed

FORWARD = "/moeserve.v1.LaneService/Forward"


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(grpc.RpcError) as failed:
        call()
    return str(failed.value.code().name)


def test_calls_over_the_limits_are_counted(serve: Callable[..., Service]) -> None:
    service = serve(calls=1)
    first = service.forward()
    assert until(lambda: held(service)[0] == 1)
    assert refused(service.forward().result) == "RESOURCE_EXHAUSTED"
    service.go.set()
    first.result()
    assert service.observed == [("Forward", "inline", "RESOURCE_EXHAUSTED")], (
        "the other is the door's to count"
    )


def test_calls_that_begin_at_a_door_that_drains_are_counted(serve: Callable[..., Service]) -> None:
    service = serve()
    service.endpoint.drain("it is to stop")
    assert refused(service.forward().result) == "UNAVAILABLE"
    assert service.observed == [("Forward", "inline", "UNAVAILABLE")]


def test_messages_that_are_none_are_counted(serve: Callable[..., Service]) -> None:
    service = serve()
    assert refused(lambda: service.channel.unary_unary(FORWARD)(b"\xff\xff", timeout=SECONDS))
    assert refused(lambda: service.channel.stream_unary(FORWARD)(iter([]), timeout=SECONDS))
    assert refused(lambda: list(service.stream(iter([b"\xff\xff"]))))
    assert until(lambda: len(service.observed) == 3)
    assert sorted(service.observed) == [
        ("Forward", "inline", "INVALID_ARGUMENT"),
        ("Forward", "inline", "INVALID_ARGUMENT"),
        ("ForwardStream", "inline", "INVALID_ARGUMENT"),
    ]


def test_messages_that_do_not_come_are_counted(serve: Callable[..., Service]) -> None:
    service, ends = serve(request_seconds=0.1), threading.Event()
    assert (
        refused(lambda: service.channel.stream_unary(FORWARD)(silent(ends), timeout=SECONDS)) == "CANCELLED"
    )
    assert until(lambda: bool(service.observed)), service.observed
    assert service.observed == [("Forward", "inline", "CANCELLED")]
    ends.set()


def test_streams_over_the_limit_are_counted_and_questions_are_not(serve: Callable[..., Service]) -> None:
    service, ends = serve(streams=1), threading.Event()
    stream = service.stream(silent(ends))
    assert until(lambda: held(service)[1] == 1)
    assert refused(lambda: list(service.stream(silent(ends)))) == "RESOURCE_EXHAUSTED"
    assert refused(
        lambda: service.channel.unary_unary("/moeserve.v1.LaneService/ListRegions")(
            b"\xff\xff", timeout=SECONDS
        )
    )
    assert service.observed == [("ForwardStream", "inline", "RESOURCE_EXHAUSTED")]
    stream.cancel()
    ends.set()


def test_calls_of_a_stream_at_the_front_door_are_counted() -> None:
    observed = list[tuple[str, str, str]]()
    door = FrontDoor("m", None, None, 1 << 20, lambda *told: observed.append(told[:3]))  # type: ignore[arg-type]
    answers: list[Any] = [moe_pb2.ForwardReply(epoch=3), NotServed("layer 7")]

    def forward(*asked: object) -> moe_pb2.ForwardReply:
        found = answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return found  # type: ignore[no-any-return]

    door._forwarding = SimpleNamespace(forward=forward)  # type: ignore[assignment]
    request, caller = moe_pb2.ForwardRequest(job_id="a"), SimpleNamespace()
    assert door._stream_reply(request, caller).reply.epoch == 3  # type: ignore[arg-type]
    assert door._stream_reply(request, caller).error.reason == "not_served"  # type: ignore[arg-type]
    door.drain("it is to stop")
    assert door._stream_reply(request, caller).error.reason == "not_serving"  # type: ignore[arg-type]
    codes = ("OK", "NOT_FOUND", "UNAVAILABLE")
    assert observed == [("FrontForwardStream", "inline", code) for code in codes]


def test_streams_of_reflection_that_ask_nothing_leave_it_to_others(serve: Callable[..., Service]) -> None:
    service, ends = serve(request_seconds=0.3), threading.Event()
    stub = reflection_pb2_grpc.ServerReflectionStub(service.channel)
    held = [stub.ServerReflectionInfo(silent(ends)) for _ in range(8)]
    ask = reflection_pb2.ServerReflectionRequest(list_services="")
    assert next(stub.ServerReflectionInfo(iter([ask]), timeout=SECONDS)).list_services_response.service
    for one in held:
        assert refused(lambda one=one: next(one)) == "CANCELLED"  # type: ignore[misc]
    ends.set()
