"""`Endpoint`: a gRPC server of the contract with health and reflection, the same for lanes and the front
door.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from moeserve.proto import moe_pb2, moe_pb2_grpc
from moeserve.proto.channel import server_options

SPARE_THREADS = 16  # so that health and status answer while every call's thread waits for a step

SERVICE = moe_pb2.DESCRIPTOR.services_by_name["MoeService"].full_name


class PortInUse(OSError):
    """The port cannot be bound; names the port and the key that sets it."""


class Endpoint:
    """Serves `servicer` on `host:port` (0: a free port). It says NOT_SERVING until told otherwise."""

    def __init__(self, servicer: moe_pb2_grpc.MoeServiceServicer, calls: int, max_message_bytes: int) -> None:
        pool = ThreadPoolExecutor(calls + SPARE_THREADS, thread_name_prefix="call")
        self._server = grpc.server(pool, options=server_options(max_message_bytes))
        self._health = health.HealthServicer()
        moe_pb2_grpc.add_MoeServiceServicer_to_server(servicer, self._server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        self.set_serving(serving=False)

    def start(self, host: str, port: int) -> str:
        """Binds and starts; returns `host:port`. Raises PortInUse."""
        try:
            bound = self._server.add_insecure_port(f"{host}:{port}")
        except RuntimeError as error:
            raise PortInUse(
                f"cannot listen on {host}:{port}; set server.port (--port) to a free one, or 0 for any"
            ) from error
        self._server.start()
        return f"{host}:{bound}"

    def set_serving(self, *, serving: bool) -> None:
        """What health probes are told."""
        status = (
            health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        for name in ("", SERVICE):
            self._health.set(name, status)

    def stop(self, grace: float) -> None:
        """Refuses new calls, lets those under way finish for `grace` seconds, and stops."""
        self._health.enter_graceful_shutdown()
        self._server.stop(grace).wait()
