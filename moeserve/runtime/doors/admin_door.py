"""`AdminDoor`: what operators ask of the running service at its own address."""

from __future__ import annotations

import grpc

from moeserve.proto import moe_pb2, moe_pb2_grpc
from moeserve.runtime.doors.failures import guarded
from moeserve.runtime.doors.operations import Operations


class AdminDoor(moe_pb2_grpc.AdminServiceServicer):
    """Answers AdminService. A call ends when its operation is done; a caller who leaves does not end it,
    and one who has left before it begins has it left out.
    """

    def __init__(self, operations: Operations) -> None:
        self._operations = operations

    def Rebalance(
        self, request: moe_pb2.RebalanceRequest, context: grpc.ServicerContext
    ) -> moe_pb2.RebalanceReply:
        """Moves experts, or says what that would do."""
        return guarded(context, lambda: self._operations.rebalance(request, context.is_active))

    def Reload(self, request: moe_pb2.ReloadRequest, context: grpc.ServicerContext) -> moe_pb2.ReloadReply:
        """Serves the weights of another checkpoint."""
        return guarded(context, lambda: self._operations.reload(request, context.is_active))

    def Scale(self, request: moe_pb2.ScaleRequest, context: grpc.ServicerContext) -> moe_pb2.ScaleReply:
        """Adds ranks, or takes some away."""
        return guarded(context, lambda: self._operations.scale(request, context.is_active))

    def SetLogLevel(
        self, request: moe_pb2.SetLogLevelRequest, context: grpc.ServicerContext
    ) -> moe_pb2.SetLogLevelReply:
        """Sets how much the service logs."""
        return guarded(context, lambda: self._operations.set_log_level(request))
