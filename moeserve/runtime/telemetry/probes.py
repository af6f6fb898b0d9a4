"""`Probes`: has a process of its own answer whether layers can be served (`probe_process`)."""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

from moeserve.proto.texts import clipped
from moeserve.runtime.keys.sockets import (
    EVERY_ADDRESS,
    CannotListen,
    HeldPort,
    place_of,
    private_folder,
    remove,
)

log = logging.getLogger(__name__)

BEAT_SECONDS = 0.25
"""Between two words to the process, which counts on hearing them."""

AGAIN_SECONDS = 1.0
"""After which it is started again where it ended by itself."""

STOP_SECONDS = 5.0
MODULE = "moeserve.runtime.telemetry.probe_process"


class Probes:
    """Listens at `host:port` (0: a free one); a process that this one starts answers there, until `close`.

    why_not: why layers cannot be served now; empty while they can. It is asked by a thread of its own: where
    that hangs for `stalled_seconds`, the service counts as one that does not live. tls: paths of the
    certificate and its key; empty where probes come without TLS. stands_still: whether a process of this host
    is stopped, and to be replaced. Raises CannotListen.
    """

    def __init__(
        self,
        at: tuple[str, int],
        services: Sequence[str],
        stalled_seconds: float,
        why_not: Callable[[], str],
        tls: tuple[str, str] = ("", ""),
        stands_still: Callable[[int], bool] = lambda pid: False,
    ) -> None:
        self._why_not, self._stands_still = why_not, stands_still
        self._told = threading.Event()
        self._closing = False
        try:
            family, address = place_of(*at)
            shared, both = isinstance(at[1], HeldPort), at[0] in EVERY_ADDRESS and family == socket.AF_INET6
            self._listener = socket.create_server(
                address, family=family, backlog=1024, reuse_port=shared, dualstack_ipv6=both
            )
        except OSError as error:
            way_out = "set server.health_port to another port, 0 for any free one, -1 for none"
            raise CannotListen.at("cannot answer probes", *at, error, way_out) from error
        self._inside = str(private_folder() / f"probes-{os.getpid()}-{secrets.token_hex(4)}")
        self._command = [sys.executable, "-m", MODULE, str(self._listener.fileno()), self._inside]
        self._command += [str(stalled_seconds), *tls, *services]
        self._thread = threading.Thread(target=self._run, name="probes", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port that is answered."""
        return int(self._listener.getsockname()[1])

    def tell(self) -> None:
        """Has the process told at once that something changed."""
        self._told.set()

    def close(self) -> None:
        """Ends the process."""
        self._closing = True
        self._told.set()
        self._thread.join(STOP_SECONDS + BEAT_SECONDS)
        self._listener.close()

    def _run(self) -> None:
        while not self._closing:
            try:
                self._beat(self._start())
            except Exception:
                log.exception("probes cannot be answered for now")
            if not self._closing:
                log.error("the process that answers probes ended; it is started again")
                self._told.wait(AGAIN_SECONDS)

    def _start(self) -> subprocess.Popen[bytes]:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        descriptor = self._listener.fileno()
        return subprocess.Popen(
            self._command, stdin=subprocess.PIPE, env=environment, pass_fds=(descriptor,), bufsize=0
        )

    def _beat(self, process: subprocess.Popen[bytes]) -> None:
        """Tells `process` how the service is until it or this ends."""
        if process.stdin is None:
            raise RuntimeError("the process that answers probes has no stdin")
        try:
            while not self._closing:
                if self._stands_still(process.pid):
                    log.error(
                        "the process that answers probes (pid %d) is killed: it is stopped", process.pid
                    )
                    process.kill()
                    return
                said = json.dumps({"why": clipped(self._why_not())})
                process.stdin.write(f"{said}\n".encode())
                self._told.wait(BEAT_SECONDS)
                self._told.clear()
        except BrokenPipeError:
            pass  # it has ended
        finally:
            process.stdin.close()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            remove(self._inside)
