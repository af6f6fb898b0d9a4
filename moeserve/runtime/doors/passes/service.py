"""`DeviceLaneDoor`: answers DeviceLaneService for one rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import grpc

from moeserve.proto import moe_pb2, moe_pb2_grpc
from moeserve.runtime.doors.device_errors import UnknownLane
from moeserve.runtime.doors.failures import guarded
from moeserve.runtime.doors.lane_door import LaneDoor
from moeserve.runtime.doors.passes.device_lane import Begin
from moeserve.runtime.doors.passes.device_lanes import DeviceLanes
from moeserve.runtime.doors.passes.host_pass import Call
from moeserve.runtime.doors.passes.host_steps import METHOD
from moeserve.runtime.errors import CallerLeft


class DeviceLaneDoor(moe_pb2_grpc.DeviceLaneServiceServicer):
    """Attaches and detaches callers' lanes."""

    def __init__(self, lanes: DeviceLanes) -> None:
        self._lanes = lanes

    def AttachLane(
        self, request: moe_pb2.AttachLaneRequest, context: grpc.ServicerContext
    ) -> moe_pb2.AttachLaneReply:
        """Makes the caller a lane, and ends it where the caller has left meanwhile."""
        return guarded(context, lambda: self._attached(request, context))

    def _attached(
        self, request: moe_pb2.AttachLaneRequest, context: grpc.ServicerContext
    ) -> moe_pb2.AttachLaneReply:
        made = self._lanes.attach(request, context.peer())
        if context.is_active():
            return made
        with suppress(UnknownLane):  # its memory was given back already
            self._lanes.detach(made.mailbox)
        raise CallerLeft("the caller left before its device lane was attached")

    def DetachLane(
        self, request: moe_pb2.DetachLaneRequest, context: grpc.ServicerContext
    ) -> moe_pb2.DetachLaneReply:
        """Ends the lane whose mailbox the caller knows by its whole name."""
        guarded(context, lambda: self._lanes.detach(request.mailbox))
        return moe_pb2.DetachLaneReply()

    def ListDeviceLanes(
        self, request: moe_pb2.ListDeviceLanesRequest, context: grpc.ServicerContext
    ) -> moe_pb2.ListDeviceLanesReply:
        """The lanes that are attached."""
        return moe_pb2.ListDeviceLanesReply(lanes=self._lanes.attached())


def begin_at(door: LaneDoor) -> Callable[[str], Begin]:
    """How steps of a caller are begun: as calls at the rank's own door, which checks and admits them."""

    def begin_for(peer: str) -> Begin:
        def begin(
            request: moe_pb2.ForwardRequest, ended: Callable[[moe_pb2.ForwardStreamReply], None]
        ) -> Call | None:
            return door.begin_beside(request, ended, peer, METHOD)

        return begin

    return begin_for
