"""`Health`: the servicer of grpc.health.v1 that every endpoint has.

grpc_health's own servicer tells watchers under a lock that gRPC's thread takes to end a watch, and waits
there until that thread has sent what it said: a watcher that leaves at that moment stops the whole server for
ever. Here nothing is sent under a lock, and whoever changes a status waits for no watcher.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health_pb2

from moeserve.proto.client.deadline_watch import DeadlineWatch
from moeserve.proto.texts import quoted

log = logging.getLogger(__name__)

Told = Callable[[health_pb2.HealthCheckResponse], None]
"""What gRPC sends a watcher by: it returns once that is sent, or the watch is over. One thread may send."""

UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
ENDING_SECONDS = 0.5  # for watchers to hear that the server stops
MOST_WATCHERS = 1024  # of one endpoint


@dataclass(eq=False)
class _Watcher:
    service: str
    told: Told
    cancel: Callable[[], object]
    last: int | None = None  # what it was told
    waits: bool = False  # to be told


class Health:
    """Says each service's status to probes, and tells watchers of changes from a thread of its own.

    A watcher that does not take what it is told within `unread_seconds` is left.
    """

    def __init__(self, unread_seconds: float) -> None:
        self._unread_seconds = unread_seconds
        self._lock = threading.Lock()
        self._status: dict[str, int] = {}
        self._watchers: set[_Watcher] = set()
        self._ended = False
        self._late = DeadlineWatch()
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
        """Has a watcher told the status of a service by `told`, now and when it changes.

        RESOURCE_EXHAUSTED beyond `MOST_WATCHERS`.
        """
        watcher = _Watcher(request.service, told, context.cancel)
        with self._lock:
            full = len(self._watchers) >= MOST_WATCHERS
            if not full:
                self._watchers.add(watcher)
        if full:
            log.info("%s may not watch health: %d do already", quoted(context.peer()), MOST_WATCHERS)
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MOST_WATCHERS} watch health here already")
        if not context.add_callback(lambda: self._leave(watcher)):
            self._leave(watcher)
            return
        with self._lock:
            self._schedule(watcher)

    def tell(self, service: str, status: int) -> None:
        """Changes what probes of `service` are told, unless it has ended. Waits for no watcher."""
        with self._lock:
            if self._ended:
                return
            self._status[service] = status
            for watcher in self._watchers:
                if watcher.service == service:
                    self._schedule(watcher)

    def end(self) -> None:
        """Says NOT_SERVING from now on; watchers have a moment to hear it."""
        for service in list(self._status):
            self.tell(service, health_pb2.HealthCheckResponse.NOT_SERVING)
        with self._lock:
            if self._ended:
                return
            self._ended = True
            behind_all = self._telling.submit(lambda: None)
        wait([behind_all], timeout=ENDING_SECONDS)
        self._telling.shutdown(wait=False, cancel_futures=True)
        self._late.close()

    def _schedule(self, watcher: _Watcher) -> None:
        """Has a watcher told, once however often its status changes meanwhile. Called under the lock."""
        if not (watcher.waits or self._ended):
            watcher.waits = True
            self._telling.submit(self._bring_up_to_date, watcher)

    def _bring_up_to_date(self, watcher: _Watcher) -> None:
        with self._lock:
            watcher.waits = False
            status = self._status.get(watcher.service, UNKNOWN)
            if status == watcher.last or watcher not in self._watchers:
                return
            watcher.last = status
        late = self._late.add(time.monotonic() + self._unread_seconds, lambda: self._give_up(watcher))
        try:
            watcher.told(health_pb2.HealthCheckResponse(status=status))
        finally:
            self._late.remove(late)

    def _give_up(self, watcher: _Watcher) -> None:
        log.info("a watcher of health is left: it took nothing for %g s", self._unread_seconds)
        watcher.cancel()

    def _leave(self, watcher: _Watcher) -> None:
        with self._lock:
            self._watchers.discard(watcher)
