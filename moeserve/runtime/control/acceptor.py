"""`Acceptor`: connections of a listening socket, a thread each, and only so many of strangers at once."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from moeserve.proto.texts import clipped

log = logging.getLogger(__name__)

MOST_STRANGERS = 64  # who have yet to show the run's token
AGAIN_SECONDS = 0.2  # after a connection could not be accepted, for want of a descriptor


@dataclass(eq=False)
class Guest:
    """Who has connected: a stranger, until it is known."""

    connection: socket.socket
    peer: object  # its address
    _strangers: threading.BoundedSemaphore
    is_stranger: bool = field(default=True, init=False)

    def known(self) -> None:
        """Counts it among the strangers no more; the guest's own thread says so."""
        if self.is_stranger:
            self.is_stranger = False
            self._strangers.release()


class Acceptor:
    """One thread that accepts, and one a guest, named after it, that runs `serve` and is the guest's owner.

    A connection over `most` strangers is closed at once. Lack of descriptors or threads ends nothing: who
    connects then waits, or is refused.
    """

    def __init__(
        self, listener: socket.socket, name: str, serve: Callable[[Guest], None], most: int = MOST_STRANGERS
    ) -> None:
        self.listener, self._name, self._serve, self.most = listener, name, serve, most
        self._strangers = threading.BoundedSemaphore(most)
        self._closed = threading.Event()

    def start(self) -> None:
        """Begins to accept."""
        threading.Thread(target=self._accept, name=f"accept {self._name}", daemon=True).start()

    def close(self) -> None:
        """Accepts nobody from now on; guests stay."""
        self._closed.set()
        try:
            self.listener.shutdown(socket.SHUT_RDWR)  # closing alone leaves a waiting accept one more guest
        except OSError as error:
            log.debug("the listener of %s was closed already: %s", self._name, error)
        self.listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, peer = self.listener.accept()
            except OSError as error:
                if self._closed.wait(AGAIN_SECONDS):
                    return
                log.warning("%s: a connection could not be accepted yet: %s", self._name, error)
                continue
            if not self._strangers.acquire(blocking=False):
                log.warning(
                    "%s: refused %s: %d strangers have yet to show the token", self._name, peer, self.most
                )
                connection.close()
                continue
            guest = Guest(connection, peer, self._strangers)
            try:
                threading.Thread(
                    target=self._host, args=(guest,), name=f"{self._name} {peer}", daemon=True
                ).start()
            except RuntimeError as error:
                log.warning("%s: refused %s: %s", self._name, peer, error)
                guest.known()
                connection.close()

    def _host(self, guest: Guest) -> None:
        try:
            self._serve(guest)
        except Exception as error:
            log.exception("%s: the thread of %s ends: %s", self._name, guest.peer, clipped(str(error)))
        finally:
            guest.known()
