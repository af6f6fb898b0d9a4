"""Hands out the file descriptors of regions, and notices when those who took one are gone.

A client connects to the abstract Unix socket, sends a region's whole name, and gets its descriptor. The
connection stays open as the client's lease on the region; the kernel closes it when the client dies.
"""

import logging
import os
import queue
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Protocol

from moeserve.proto.transports.region_calls import PACKET_BYTES
from moeserve.proto.transports.shared_memory import (
    GRANTED,
    GRANTED_WITH_CALLS,
    NAME_BYTES,
    REFUSED,
    socket_address,
)

logger = logging.getLogger(__name__)

SILENT_SECONDS = 5.0
TICK_SECONDS = 1.0
MOST_CONNECTIONS = 1024

TakeCall = Callable[[bytes, Callable[[bytes], None]], Callable[[], None]]
"""Starts a call that came over a lease: takes its bytes, and where the answer's bytes go. Returns what gives
the call up.
"""


class RegionOwner(Protocol):
    """What the handover needs of the regions."""

    def grant(self, name: str) -> int:
        """A descriptor of region `name`, the caller's to close, for one lease more; LookupError if none."""

    @property
    def take_call(self) -> TakeCall | None:
        """What takes calls over leases; None where no such call is taken."""

    def lease_ended(self, name: str) -> None:
        """One lease on region `name` is gone."""

    def sweep(self) -> None:
        """Called about once a second."""


class _Lease:
    """A client's connection, once it has its region."""

    def __init__(self, client: socket.socket, region: str) -> None:
        self.region = region
        self.leave: Callable[[], None] = _nothing  # gives up the call under way
        self._client: socket.socket | None = client
        self._lock = threading.Lock()

    def answer(self, reply: bytes) -> None:
        """Sends a reply, from any thread; a client that does not read its replies misses them."""
        with self._lock:  # or another connection could get the descriptor between closing and sending
            if self._client is not None:
                try:
                    self._client.send(reply)
                except OSError as failed:
                    logger.info("a reply of %d bytes could not be sent: %s", len(reply), failed)

    def end(self) -> None:
        """The connection is about to be closed."""
        with self._lock:
            self._client = None
        self.leave()


class Handover:
    """Listens on the socket and answers it in one thread; takes calls over leases there too."""

    def __init__(self, owner: RegionOwner) -> None:
        self.address = f"@moeserve-{os.getpid()}-{secrets.token_hex(8)}"
        self._owner = owner
        self._leases: dict[socket.socket, _Lease] = {}
        self._silent: dict[socket.socket, float] = {}
        self._ended: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._wake, self._woken = socket.socketpair()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(socket_address(self.address))
        self._listener.listen(64)
        self._selector = selectors.DefaultSelector()
        for readable in (self._listener, self._woken):
            readable.settimeout(0)
            self._selector.register(readable, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="region-handover", daemon=True)
        self._thread.start()

    def end(self, name: str) -> None:
        """Ends every lease on region `name`, which its clients see.

        Does not wait, and may hold the owner's lock.
        """
        if self._thread.is_alive():
            self._ended.put(name)
            self._wake.send(b"x")

    def close(self) -> None:
        """Stops the thread and closes every connection; clients see their leases end."""
        if self._thread.is_alive():
            self._ended.put(None)
            self._wake.send(b"x")
            self._thread.join()
            self._wake.close()

    def _serve(self) -> None:
        swept = time.monotonic()
        while True:
            for key, _ in self._selector.select(TICK_SECONDS):
                if key.fileobj is self._woken:
                    if self._end_leases():
                        return
                elif key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket):
                    self._answer(key.fileobj)
            now = time.monotonic()
            if now - swept >= TICK_SECONDS:
                swept = now
                self._owner.sweep()
                for silent in [who for who, since in self._silent.items() if now - since > SILENT_SECONDS]:
                    self._drop(silent)

    def _end_leases(self) -> bool:
        """Ends the leases asked for; True when that was to close everything."""
        self._woken.recv(1)
        name = self._ended.get()
        if name is None:
            self._close_all()
            return True
        for client in [client for client, lease in self._leases.items() if lease.region == name]:
            self._drop(client)
        return False

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError as failed:
            logger.warning("a connection for a region could not be accepted: %s", failed)
            return
        client.settimeout(0)
        pid, user, _ = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if user not in (os.geteuid(), 0):
            logger.warning(
                "process %d of user %d was refused a region: regions go to their own user", pid, user
            )
            client.close()
        elif len(self._leases) + len(self._silent) >= MOST_CONNECTIONS:
            logger.warning("process %d was refused a region: %d connections are open", pid, MOST_CONNECTIONS)
            client.close()
        else:
            self._silent[client] = time.monotonic()
            self._selector.register(client, selectors.EVENT_READ)

    def _answer(self, client: socket.socket) -> None:
        lease = self._leases.get(client)
        try:
            said = client.recv(PACKET_BYTES if lease is not None else NAME_BYTES)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        take_call = self._owner.take_call
        if lease is not None and said and take_call is not None:
            lease.leave = take_call(said, lease.answer)
            return
        if not said or lease is not None:
            self._drop(client)
            return
        name = said.decode(errors="replace")
        try:
            descriptor = self._owner.grant(name)
        except LookupError:
            self._refuse(
                client, "no region has this name; it is made by CreateRegion and ends with its lease"
            )
            return
        del self._silent[client]
        self._leases[client] = _Lease(client, name)
        try:
            socket.send_fds(client, [GRANTED if take_call is None else GRANTED_WITH_CALLS], [descriptor])
        except OSError:
            self._drop(client)
        finally:
            os.close(descriptor)

    def _refuse(self, client: socket.socket, why: str) -> None:
        try:
            client.send(REFUSED + why.encode())
        except OSError as failed:
            logger.info("a client left before it was told that %s: %s", why, failed)
        self._drop(client)

    def _drop(self, client: socket.socket) -> None:
        if client not in self._leases and client not in self._silent:
            return  # dropped earlier in the same round of events
        self._selector.unregister(client)
        lease = self._leases.pop(client, None)
        if lease is not None:
            lease.end()
        client.close()
        self._silent.pop(client, None)
        if lease is not None:
            self._owner.lease_ended(lease.region)

    def _close_all(self) -> None:
        for client in [*self._leases, *self._silent]:
            self._drop(client)
        self._selector.close()
        for own in (self._listener, self._woken):
            own.close()


def _nothing() -> None:
    """Does nothing: no call is under way."""
