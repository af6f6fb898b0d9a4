"""Both servers answer every call of the contract themselves: none is left to the generated base class."""

from __future__ import annotations

import inspect

import pytest

from moeserve.proto.moe_pb2_grpc import MoeServiceServicer
from moeserve.runtime.doors.front_door import FrontDoor
from moeserve.runtime.doors.lane_door import Door


@pytest.mark.parametrize("server", [Door, FrontDoor], ids=lambda server: server.__name__)
def test_every_call_is_answered(server: type) -> None:
    calls = [name for name, _ in inspect.getmembers(MoeServiceServicer, inspect.isfunction)]
    assert calls
    assert [name for name in calls if getattr(server, name) is getattr(MoeServiceServicer, name)] == []
