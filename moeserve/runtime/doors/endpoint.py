"""`Endpoint`: a gRPC server with the contract, health and reflection, for a lane or the front door."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection
from grpc_reflection.v1alpha.reflection_pb2_grpc import add_ServerReflectionServicer_to_server

from moeserve.proto.channel import server_options
from moeserve.proto.client.deadline_watch import DeadlineWatch
from moeserve.runtime.doors.calls.admission import Admission, DoorLimits
from moeserve.runtime.doors.calls.calling import Calling
from moeserve.runtime.doors.calls.connection_lane import OwnLanes
from moeserve.runtime.doors.calls.data_connections import DataConnections, Offer
from moeserve.runtime.doors.calls.lane_stream import Begins
from moeserve.runtime.doors.contract import Servicers, register
from moeserve.runtime.doors.deadlines import Observe, uncounted
from moeserve.runtime.doors.failures import GrpcStatus
from moeserve.runtime.doors.health import Health
from moeserve.runtime.doors.payloads.regions import Regions
from moeserve.runtime.keys.keys import NO_KEYS, Keys
from moeserve.runtime.keys.sockets import CannotListen, address_of, why_taken
from moeserve.runtime.sections import ServerConfig

log = logging.getLogger(__name__)

REFLECTIONS = 4  # threads of reflection
STOP_SECONDS = 5.0  # beside the grace, for calls that were cancelled to end


class _Reflection(reflection.ReflectionServicer):  # type: ignore[misc]  # grpc has no types
    """Ends streams that are open for long: each keeps one of few threads."""

    def __init__(self, names: tuple[str, ...], seconds: float) -> None:
        super().__init__(names)
        self._seconds, self._late = seconds, DeadlineWatch()

    def ServerReflectionInfo(self, requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        """What is served here."""
        late = self._late.add(time.monotonic() + self._seconds, context.cancel)
        try:
            yield from super().ServerReflectionInfo(requests, context)
        finally:
            self._late.remove(late)

    def close(self) -> None:
        """Ends what ends streams; the server has stopped."""
        self._late.close()


class Endpoint:
    """Serves the services of `servicers`; calls of the contract's other services end with `elsewhere`.

    Health says NOT_SERVING until told otherwise.
    """

    held_port = False  # whether another process of this user holds the port, and does not listen there

    def __init__(
        self,
        servicers: Servicers,
        elsewhere: GrpcStatus,
        limits: DoorLimits,
        max_message_bytes: int,
        keys: Keys = NO_KEYS,
        observe: Observe = uncounted,
    ) -> None:
        """observe: is told of calls that are refused before a servicer sees them, by their method's name."""
        self._keys, self._observe = keys, observe
        self._admission, self._most_bytes = Admission(limits), max_message_bytes
        self._calling = Calling(self._admission, observe)
        self._data: DataConnections | None = None
        others = ThreadPoolExecutor(REFLECTIONS, thread_name_prefix="reflection")
        self._server = grpc.server(
            others,
            interceptors=keys.interceptors(),
            options=server_options(max_message_bytes, held_port=self.held_port) + keys.server_options(),
        )
        self._health = Health(limits.unread_seconds)
        self._services = register(self._server, servicers, elsewhere, self._calling)
        self._server.add_generic_rpc_handlers((self._health_handler(),))
        names = (*self._services, health.SERVICE_NAME, reflection.SERVICE_NAME)
        self._reflection = _Reflection(names, limits.request_seconds)
        add_ServerReflectionServicer_to_server(self._reflection, self._server)
        self.set_serving(serving=False)

    def _health_handler(self) -> grpc.GenericRpcHandler:
        """Health in threads of its own; a watch has none."""
        parse = health_pb2.HealthCheckRequest.FromString
        serialize = health_pb2.HealthCheckResponse.SerializeToString
        watch = self._calling.in_thread(self._health.watch, "health")
        watch.experimental_non_blocking = True  # type: ignore[attr-defined]  # it is given a callback, and returns
        handlers = {
            "Check": self._calling.unary(self._health.check, parse, serialize, "health", "Check"),
            "Watch": grpc.unary_stream_rpc_method_handler(watch, parse, serialize),
        }
        return grpc.method_handlers_generic_handler(health.SERVICE_NAME, handlers)

    @property
    def services(self) -> tuple[str, ...]:
        """The full names of the services that are answered here."""
        return self._services

    def start(self, host: str, port: int) -> str:
        """Binds `host:port` (0: a free port) and starts; returns where it listens. Raises CannotListen."""
        try:
            bound = self._keys.listen(self._server, address_of(host, port))
        except RuntimeError as error:
            way_out = "set server.port (--port) to a free one, or 0 for any"
            why = why_taken(host, port) or OSError(str(error))
            raise CannotListen.at("cannot listen", host, port, why, way_out) from error
        self._server.start()
        return address_of(host, bound)

    def data_connections(
        self, host: str, door: Begins, regions: Regions, lanes: OwnLanes | None = None
    ) -> Offer:
        """Takes calls of `door` over TCP connections of `host`, too, encrypted where callers use TLS; returns
        what offers one to a caller. lanes: over which calls may go. Raises OSError.
        """
        self._data = DataConnections(
            host, door, regions, self._admission, self._most_bytes, lanes, self._keys, self._observe
        )
        return self._data.offered

    def set_serving(self, *, serving: bool) -> None:
        """What health probes are told, of the whole server and of each service it answers."""
        status = (
            health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        for name in ("", *self._services):
            self._health.tell(name, status)

    def drain(self, reason: str) -> None:
        """Refuses calls that begin from now on, as UNAVAILABLE with the reason; those begun go on."""
        self._calling.drain(reason)

    @property
    def busy(self) -> bool:
        """Whether a call is under way, or has an answer that its caller has yet to take."""
        return self._calling.busy or (self._data is not None and self._data.busy)

    def stop(self, grace: float) -> None:
        """Refuses new calls, lets those under way finish for `grace` seconds, and stops."""
        self._health.end()
        if not self._server.stop(grace).wait(grace + STOP_SECONDS):
            log.warning(
                "a call did not end within %g s of the server's stop; it is left", grace + STOP_SECONDS
            )
        if self._data is not None:
            self._data.close()
        self._calling.close()
        self._reflection.close()


class HeldEndpoint(Endpoint):
    """An endpoint at a port that its launcher holds, so that nobody else gets it while it starts again."""

    held_port = True


def door_limits(server: ServerConfig) -> DoorLimits:
    """What the doors of a service hold at most, as its operator says."""
    return DoorLimits(
        server.max_concurrent_calls,
        server.max_streams,
        server.max_held_bytes,
        server.request_seconds,
        server.unread_seconds,
        server.connection_hello_seconds,
        server.connection_rest_seconds,
    )
