"""`Endpoint`: a gRPC server with the contract, health and reflection, for a lane or the front door."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

import grpc
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection

from moeserve.proto.channel import server_options
from moeserve.runtime.config import ServerConfig
from moeserve.runtime.doors.admission import Admission, DoorLimits
from moeserve.runtime.doors.calling import Calling
from moeserve.runtime.doors.contract import Servicers, register
from moeserve.runtime.doors.failures import GrpcStatus

log = logging.getLogger(__name__)

REFLECTIONS = 4  # threads of reflection
STOP_SECONDS = 5.0  # beside the grace, for calls that were cancelled to end
WATCHERS_SECONDS = 0.5  # for those who watch health to hear that the server stops

Told = Callable[[health_pb2.HealthCheckResponse | None], None]
"""What gRPC sends a watcher by; None ends the watch."""


class PortInUse(OSError):
    """The port cannot be bound; names the port and the key that sets it."""


class Health:
    """Answers health probes, and tells those who watch of changes.

    grpc_health's own servicer tells them under a lock that the thread of gRPC takes to end a watch: one that
    leaves at that moment stops the whole server for ever. Here nothing is sent under a lock, and whoever
    changes a status waits for no watcher.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._status: dict[str, int] = {}
        self._watchers: dict[Told, str] = {}  # and the service that each asked for
        self._ended = False
        self._telling = ThreadPoolExecutor(1, thread_name_prefix="health watchers")

    def check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        """The status of a service; NOT_FOUND for one that the server does not answer."""
        status = self._status.get(request.service)
        if status is None:
            context.set_code(grpc.StatusCode.NOT_FOUND)
            return health_pb2.HealthCheckResponse()
        return health_pb2.HealthCheckResponse(status=status)

    def watch(
        self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext, told: Told
    ) -> None:
        """Tells a watcher the status of a service by `told`, now and when it changes."""
        with self._lock:
            self._watchers[told] = request.service

        def leave() -> None:
            with self._lock:
                self._watchers.pop(told, None)
            told(None)

        if context.add_callback(leave):
            self._bring_up_to_date(told)
        else:
            leave()

    def tell(self, service: str, status: int) -> None:
        """Changes what probes of `service` are told, unless it has ended."""
        with self._lock:
            if self._ended:
                return
            self._status[service] = status
            for told, asked in self._watchers.items():
                if asked == service:
                    self._telling.submit(self._bring_up_to_date, told)

    def end(self) -> None:
        """Says NOT_SERVING from now on; watchers have a moment to hear it."""
        for service in list(self._status):
            self.tell(service, health_pb2.HealthCheckResponse.NOT_SERVING)
        with self._lock:
            if self._ended:
                return
            self._ended = True
        wait([self._telling.submit(lambda: None)], timeout=WATCHERS_SECONDS)  # behind all that is to be told
        self._telling.shutdown(wait=False, cancel_futures=True)

    def _bring_up_to_date(self, told: Told) -> None:
        """Tells a watcher the status until it is the one that holds: two threads may tell it at once."""
        last: int | None = None
        while True:
            with self._lock:
                service = self._watchers.get(told)
                unknown = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
                status = last if service is None else self._status.get(service, unknown)
            if status == last:
                return
            told(health_pb2.HealthCheckResponse(status=status))
            last = status


class Endpoint:
    """Serves the services of `servicers`; calls of the contract's other services end with `elsewhere`.

    Health says NOT_SERVING until told otherwise.
    """

    def __init__(
        self, servicers: Servicers, elsewhere: GrpcStatus, limits: DoorLimits, max_message_bytes: int
    ) -> None:
        self._calling = Calling(Admission(limits))
        others = ThreadPoolExecutor(REFLECTIONS, thread_name_prefix="reflection")
        self._server = grpc.server(others, options=server_options(max_message_bytes))
        self._health = Health()
        self._services = register(self._server, servicers, elsewhere, self._calling)
        self._server.add_generic_rpc_handlers((self._health_handler(),))
        names = (*self._services, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        self.set_serving(serving=False)

    def _health_handler(self) -> grpc.GenericRpcHandler:
        """Health in threads of its own; a watch has none."""
        parse = health_pb2.HealthCheckRequest.FromString
        serialize = health_pb2.HealthCheckResponse.SerializeToString
        watch = self._calling.in_thread(self._health.watch, "health")
        watch.experimental_non_blocking = True  # type: ignore[attr-defined]  # it is given a callback, and returns
        handlers = {
            "Check": self._calling.unary(self._health.check, parse, serialize, "health"),
            "Watch": grpc.unary_stream_rpc_method_handler(watch, parse, serialize),
        }
        return grpc.method_handlers_generic_handler(health.SERVICE_NAME, handlers)

    def start(self, host: str, port: int) -> str:
        """Binds `host:port` (0: a free port) and starts; returns the bound `host:port`. Raises PortInUse."""
        try:
            bound = self._server.add_insecure_port(f"{host}:{port}")
        except RuntimeError as error:
            raise PortInUse(
                f"cannot listen on {host}:{port}; set server.port (--port) to a free one, or 0 for any"
            ) from error
        self._server.start()
        return f"{host}:{bound}"

    def set_serving(self, *, serving: bool) -> None:
        """What health probes are told, of the whole server and of each service it answers."""
        status = (
            health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        for name in ("", *self._services):
            self._health.tell(name, status)

    def stop(self, grace: float) -> None:
        """Refuses new calls, lets those under way finish for `grace` seconds, and stops."""
        self._health.end()
        if not self._server.stop(grace).wait(grace + STOP_SECONDS):
            log.warning(
                "a call did not end within %g s of the server's stop; it is left", grace + STOP_SECONDS
            )
        self._calling.close()


def door_limits(server: ServerConfig) -> DoorLimits:
    """What the doors of a service hold at most, as its operator says."""
    return DoorLimits(
        server.max_concurrent_calls,
        server.max_streams,
        server.max_held_bytes,
        server.request_seconds,
        server.unread_seconds,
    )
