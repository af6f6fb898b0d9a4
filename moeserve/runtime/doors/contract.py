"""Registers a door's servicers at a gRPC server, under the names of the contract and under the old ones.

The services of moe.proto are LaneService, FrontService and AdminService. Their methods were once all in
MoeService, whose names are answered for one more release. What a door does not have is refused here, under
every service's name, with the words that the door gives: so no servicer holds methods that only refuse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from moeserve.proto import moe_pb2
from moeserve.runtime.doors.failures import GrpcStatus, guarded, status_of

OLD_SERVICE = "MoeService"

Servicers = Mapping[str, Any]
"""By a service's name without its package (`LaneService`), the object whose methods answer it."""


def register(server: grpc.Server, servicers: Servicers, elsewhere: GrpcStatus) -> tuple[str, ...]:
    """Has `server` answer every method of the contract: by `servicers`, or with `elsewhere`.

    Returns the full names of the services that this door answers, the old one last. Raises ValueError for a
    service that the contract has not.
    """
    known = moe_pb2.DESCRIPTOR.services_by_name
    unknown = sorted(servicers.keys() - known.keys())
    if unknown:
        raise ValueError(f"services {unknown} are not in the contract, which has {sorted(known)}")
    for service in known.values():
        handlers = {
            method.name: _handler(method, _answering(method, servicers), elsewhere)
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
    method: MethodDescriptor, answering: Callable[..., Any] | None, elsewhere: GrpcStatus
) -> grpc.RpcMethodHandler:
    """The handler of `method`. A method that is refused does not read its request."""
    make = (
        grpc.stream_stream_rpc_method_handler
        if method.client_streaming
        else grpc.unary_unary_rpc_method_handler
    )
    if answering is None:
        return make(lambda request, context: elsewhere.abort(context))
    parse = GetMessageClass(method.input_type).FromString
    parsing = _parsing_stream if method.client_streaming else _parsing_unary
    return make(
        parsing(answering, parse),
        request_deserializer=_Unparsed,
        response_serializer=GetMessageClass(method.output_type).SerializeToString,
    )


class _Unparsed:
    """The bytes of a message, until they are parsed in the thread of their own call.

    gRPC would parse in the one thread that serves all calls, answer what it cannot parse with INTERNAL, log a
    traceback and leak the call.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data

    def parsed(self, parse: Callable[[bytes], Any]) -> Any:
        """The message, once; the bytes are let go of. Raises DecodeError."""
        data, self._data = self._data, b""
        return parse(data)


def _parsing_unary(answering: Callable[..., Any], parse: Callable[[bytes], Any]) -> Callable[..., Any]:
    """`answering`, of an unparsed message; bytes that are none end the call with INVALID_ARGUMENT."""

    def answer(message: _Unparsed, context: grpc.ServicerContext) -> Any:
        return answering(guarded(context, lambda: message.parsed(parse)), context)

    return answer


def _parsing_stream(answering: Callable[..., Any], parse: Callable[[bytes], Any]) -> Callable[..., Any]:
    """`answering`, of unparsed messages. The first that is none is the last that is read.

    What was asked before it is answered, and then the stream ends with INVALID_ARGUMENT.
    """

    def answer(messages: Iterator[_Unparsed], context: grpc.ServicerContext) -> Iterator[Any]:
        wrong: list[DecodeError] = []

        def requests() -> Iterator[Any]:
            for message in messages:
                try:
                    request = message.parsed(parse)
                except DecodeError as error:
                    wrong.append(error)
                    return
                yield request

        yield from answering(requests(), context)
        if wrong:
            status_of(wrong[0]).abort(context)

    return answer
