"""What a process answers over HTTP: its metrics, and whether it lives and can serve layers."""

from __future__ import annotations

import logging
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from moeserve.proto.client.deadline_watch import DeadlineWatch
from moeserve.proto.texts import clipped
from moeserve.proto.transports.tls import certificate_names
from moeserve.runtime.keys.grants import NotAuthenticated, Refused
from moeserve.runtime.keys.guard import Guard
from moeserve.runtime.keys.keys import NO_KEYS, Keys
from moeserve.runtime.keys.sockets import HeldPort, place_of

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

log = logging.getLogger(__name__)

REQUEST_SECONDS = 10.0  # within which a request has to arrive, however often a byte of it does
MOST_CONNECTIONS = 128  # beyond, the one that has been open for longest is closed

READY = ("/readyz", "/health")
ALIVE = "/livez"
METRICS = "/metrics"
NAMES = "moeserve.names"  # in a request's environment: those of the certificate that the caller showed


class _Server(ThreadingMixIn, WSGIServer):
    """One thread a request, so that a slow reader holds up no probe."""

    daemon_threads = True
    request_queue_size = MOST_CONNECTIONS

    def __init__(self, *given: Any) -> None:
        self._late, self._mutex = DeadlineWatch(), threading.Lock()
        self._open: dict[Any, tuple[socket.socket, object]] = {}  # the oldest first
        super().__init__(*given)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Has a thread take a request, which has to arrive in time."""
        also = request.dup()  # TLS takes the socket itself along

        def end() -> None:
            with suppress(OSError):  # it has ended
                also.shutdown(socket.SHUT_RDWR)

        with self._mutex:
            oldest = next(iter(self._open)) if len(self._open) >= MOST_CONNECTIONS else None
            self._open[request] = also, self._late.add(time.monotonic() + REQUEST_SECONDS, end)
        if oldest is not None:
            log.info("more than %d connections to the exporter: the oldest is closed", MOST_CONNECTIONS)
            self._forget(oldest)
        super().process_request(request, client_address)

    def arrived(self, request: Any) -> None:
        """A request is there."""
        with self._mutex:
            _, late = self._open.get(request, (None, None))
        self._late.remove(late)

    def _forget(self, request: Any) -> None:
        """A connection is over, or ends here."""
        with self._mutex:
            also, late = self._open.pop(request, (None, None))
        self._late.remove(late)
        if also is not None:
            with suppress(OSError):
                also.shutdown(socket.SHUT_RDWR)
            also.close()

    def shutdown_request(self, request: Any) -> None:
        """Closes a connection."""
        self._forget(request)
        super().shutdown_request(request)

    def server_close(self) -> None:
        """Listens no more."""
        super().server_close()
        self._late.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says in one line how a connection ended that no request came from, such as one without TLS."""
        log.info("a connection of %s to the exporter ended: %s", client_address, sys.exc_info()[1])


class _Handler(WSGIRequestHandler):
    """Gives up on a request that does not arrive, and logs none."""

    timeout = REQUEST_SECONDS
    keys = NO_KEYS

    def setup(self) -> None:
        """Begins TLS, in the request's own thread."""
        self._came = self.request
        context = self.keys.http_context()
        if context is not None:
            self.request.settimeout(self.timeout)
            self.request = context.wrap_socket(self.request, server_side=True)
        super().setup()

    def finish(self) -> None:
        """Closes what `setup` began; the server knows only the socket that it accepted."""
        super().finish()
        if isinstance(self.request, ssl.SSLSocket):
            self.request.close()

    def get_environ(self) -> dict[str, Any]:
        """The request's environment, with the names of the caller's certificate."""
        self.server.arrived(self._came)  # type: ignore[attr-defined]
        found: dict[str, Any] = super().get_environ()
        if isinstance(self.request, ssl.SSLSocket):
            found[NAMES] = certificate_names(self.request.getpeercert())
        return found

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing: scrapes and probes come every few seconds."""


def serve_http(
    host: str, port: int, registry: CollectorRegistry, why_not: Callable[[], str], keys: Keys = NO_KEYS
) -> tuple[WSGIServer, threading.Thread]:
    """Answers at `host:port` (0: a free port) in a thread: `/metrics`, `/livez` and `/readyz`.

    why_not: why layers cannot be served now; empty while they can. Raises OSError where the address cannot be
    had.
    """
    family, address = place_of(host, port)

    class Server(_Server):
        address_family = family
        allow_reuse_port = isinstance(port, HeldPort)

    class Handler(_Handler):
        pass

    Handler.keys = keys
    app = _application(make_wsgi_app(registry), why_not)
    if keys.guard is not None:
        app = _guarded(app, keys.guard)
    server = make_server(*address, app, Server, Handler)
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    return server, thread


def _application(metrics: WSGIApplication, why_not: Callable[[], str]) -> WSGIApplication:
    def answer(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        if path == METRICS:
            return metrics(environ, start)
        if path == ALIVE:
            return _text(start, "200 OK", "alive")
        if path in READY:
            reason = why_not()
            if reason:
                return _text(start, "503 Service Unavailable", clipped(f"not serving: {reason}"))
            return _text(start, "200 OK", "serving")
        return _text(start, "404 Not Found", f"there are {', '.join((METRICS, ALIVE, *READY))}")

    return answer


def _guarded(app: WSGIApplication, guard: Guard) -> WSGIApplication:
    """`app`, for whom the table of access lets in."""

    def answer(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        path, shown = environ.get("PATH_INFO", ""), environ.get("HTTP_AUTHORIZATION", "")
        try:
            guard.check_path(path, shown, environ.get(NAMES, ()), environ.get("REMOTE_ADDR", ""))
        except NotAuthenticated as refused:
            challenge = ("WWW-Authenticate", "Bearer")
            return _text(start, "401 Unauthorized", clipped(str(refused)), challenge)
        except Refused as refused:
            return _text(start, "403 Forbidden", clipped(str(refused)))
        return app(environ, start)

    return answer


def _text(start: StartResponse, status: str, text: str, *headers: tuple[str, str]) -> list[bytes]:
    start(status, [("Content-Type", "text/plain; charset=utf-8"), *headers])
    return [f"{text}\n".encode(errors="replace")]
