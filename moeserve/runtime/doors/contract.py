"""Registers a door's servicers at a gRPC server, under the names of the contract and under the old ones.

The services of moe.proto are LaneService, FrontService and AdminService. Their methods were once all in
MoeService, whose names are answered for one more release. What a door does not have is refused here, under
every service's name, with the words that the door gives: so no servicer holds methods that only refuse.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass

from moeserve.proto import moe_pb2
from moeserve.proto.transports.carried import packed, unpacking
from moeserve.runtime.doors.calls.calling import Calling
from moeserve.runtime.doors.failures import GrpcStatus

OLD_SERVICE = "MoeService"

Servicers = Mapping[str, Any]
"""By a service's name without its package (`LaneService`), the object whose methods answer it."""


def register(
    server: grpc.Server, servicers: Servicers, elsewhere: GrpcStatus, calling: Calling
) -> tuple[str, ...]:
    """Has `server` answer every method of the contract: by `servicers`, or with `elsewhere`.

    Each sort of call has threads of its own in `calling`, and only so many at once.
    Returns the full names of the services that this door answers, the old one last. Raises ValueError for a
    service that the contract has not.
    """
    known = moe_pb2.DESCRIPTOR.services_by_name
    unknown = sorted(servicers.keys() - known.keys())
    if unknown:
        raise ValueError(f"services {unknown} are not in the contract, which has {sorted(known)}")
    for service in known.values():
        handlers = {
            method.name: _handler(method, _answering(method, servicers), elsewhere, calling)
            for method in service.methods
        }
        generic = grpc.method_handlers_generic_handler(service.full_name, handlers)
        server.add_generic_rpc_handlers((generic,))
        server.add_registered_method_handlers(service.full_name, handlers)
    return tuple(known[name].full_name for name in (*servicers, OLD_SERVICE))


def _answering(method: MethodDescriptor, servicers: Servicers) -> Callable[..., Any] | None:
    """What answers `method` at this door; None where the other kind of door does."""
    service = method.containing_service
    if service.name != OLD_SERVICE:
        return getattr(servicers[service.name], method.name) if service.name in servicers else None
    for name, servicer in servicers.items():
        if method.name in moe_pb2.DESCRIPTOR.services_by_name[name].methods_by_name:
            answering: Callable[..., Any] = getattr(servicer, method.name)
            return answering
    return None


def _handler(
    method: MethodDescriptor, answering: Callable[..., Any] | None, elsewhere: GrpcStatus, calling: Calling
) -> grpc.RpcMethodHandler:
    """The handler of `method`. A method that is refused does not read its request."""
    if answering is None:
        make = (
            grpc.stream_stream_rpc_method_handler
            if method.client_streaming
            else grpc.unary_unary_rpc_method_handler
        )

        def refuse(request: object, context: grpc.ServicerContext) -> None:
            elsewhere.log()
            elsewhere.abort(context)

        return make(calling.in_thread(refuse, "questions"))
    parse = GetMessageClass(method.input_type).FromString
    serialize = GetMessageClass(method.output_type).SerializeToString
    if method.name == "Forward" and getattr(getattr(answering, "__self__", None), "carries", False):
        return calling.unary(answering, unpacking(moe_pb2.ForwardRequest), packed, "calls", method.name)
    if method.client_streaming:
        return calling.stream(answering, parse, serialize, method.name)
    sort = _SORT.get(method.name, "questions")
    return calling.unary(answering, parse, serialize, sort, method.name)


_SORT = {"Forward": "calls", **dict.fromkeys(("Rebalance", "Reload", "Scale"), "operations")}
