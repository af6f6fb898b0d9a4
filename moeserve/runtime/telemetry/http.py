"""What a process answers over HTTP: its metrics, and whether it lives and can serve layers."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from moeserve.proto.texts import clipped

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

REQUEST_SECONDS = 10.0  # within which a request has to arrive

READY = ("/readyz", "/health")
ALIVE = "/livez"
METRICS = "/metrics"


class _Server(ThreadingMixIn, WSGIServer):
    """One thread a request, so that a slow reader holds up no probe."""

    daemon_threads = True


class _Handler(WSGIRequestHandler):
    """Gives up on a request that does not arrive, and logs none."""

    timeout = REQUEST_SECONDS

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing: scrapes and probes come every few seconds."""


def serve_http(
    host: str, port: int, registry: CollectorRegistry, why_not: Callable[[], str]
) -> tuple[WSGIServer, threading.Thread]:
    """Answers at `host:port` (0: a free port) in a thread: `/metrics`, `/livez` and `/readyz`.

    why_not: why layers cannot be served now; empty while they can. Raises OSError where the address cannot be
    had.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]

    class Server(_Server):
        address_family = family

    app = _application(make_wsgi_app(registry), why_not)
    server = make_server(str(address[0]), port, app, Server, _Handler)
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


def _text(start: StartResponse, status: str, text: str) -> list[bytes]:
    start(status, [("Content-Type", "text/plain; charset=utf-8")])
    return [f"{text}\n".encode(errors="replace")]
