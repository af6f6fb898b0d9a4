"""Hands out the file descriptors of regions, and notices when those who took one are gone.

A client connects to the Unix socket, which is in a folder of this user alone, sends a region's whole name,
and gets its descriptor. The connection stays open as the client's lease on the region; the kernel closes it
when the client dies.
"""

import logging
import os
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from moeserve.proto.transports.region_calls import PACKET_BYTES
from moeserve.proto.transports.shared_memory import (
    GRANTED,
    GRANTED_WITH_CALLS,
    NAME_BYTES,
    REFUSED,
)
from moeserve.runtime.doors.payloads.wake import Wake
from moeserve.runtime.keys.sockets import listen_privately, peer_of, remove

logger = logging.getLogger(__name__)

TICK_SECONDS = 1.0
CLOSE_SECONDS = 5.0  # within which the thread has to end
MOST_CONNECTIONS = 1024

TakeCall = Callable[[bytes, Callable[[bytes], None], str], Callable[[], None]]
"""Starts a call that came over a lease: takes its bytes, where the answer's bytes go (the same for all calls
of one lease), and the client's process (`unix:` and its id). Returns what gives up the call under way.
"""


class RegionOwner(Protocol):
    """What the handover needs of the regions."""

    def grant(self, name: str) -> int:
        """A descriptor of region `name`, the caller's to close, for one lease more.

        Raises LookupError where there is no such region, OSError where no descriptor is left; then there is
        no new lease.
        """

    @property
    def take_call(self) -> TakeCall | None:
        """What takes calls over leases; None where no such call is taken."""

    @property
    def together(self) -> Callable[[], AbstractContextManager[None]]:
        """Makes a context in which calls are taken that came at once."""

    def lease_ended(self, name: str) -> None:
        """One lease on region `name` is gone."""

    def sweep(self) -> None:
        """Called about once a second."""


class _Lease:
    """A client's connection, once it has its region."""

    def __init__(self, client: socket.socket, region: str) -> None:
        self.region = region
        self.peer = f"unix:{peer_of(client)[0]}"
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
    """Listens on the socket and answers it in one thread; takes calls over leases there too.

    That thread alone closes the socket, the connections and the selector, when it ends.
    """

    def __init__(self, owner: RegionOwner, silent_seconds: float = 10.0) -> None:
        """silent_seconds: for whoever connects to name a region."""
        self._owner, self._silent_seconds = owner, silent_seconds
        self._leases: dict[socket.socket, _Lease] = {}
        self._silent: dict[socket.socket, float] = {}
        self._ended: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._closing = False
        self._wake = Wake()
        self._listener, self.address = listen_privately("regions", socket.SOCK_SEQPACKET)
        self._listener.settimeout(0)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._listening = False
        self._listen()
        self._thread = threading.Thread(target=self._run, name="region-handover", daemon=True)
        self._thread.start()

    def end(self, name: str) -> None:
        """Ends every lease on region `name`, which its clients see.

        Never waits, so that a caller may hold the owner's lock; after `close` it does nothing.
        """
        self._ended.put(name)
        self._wake.ring()

    def close(self) -> None:
        """Stops the thread, which closes every connection; clients see their leases end.

        Any number of threads may call this; each returns when the thread has ended.
        """
        self._closing = True
        self._wake.ring()
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            logger.error("the thread that hands over regions did not end within %g s", CLOSE_SECONDS)

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:
            logger.exception("the thread that hands over regions ends: no region can be fetched any more")
        finally:
            self._close_all()

    def _serve(self) -> None:
        swept = time.monotonic()
        while not self._closing:
            ready = self._selector.select(TICK_SECONDS)
            if len(ready) == 1:
                self._take(ready[0][0].fileobj)
            elif ready:
                with self._owner.together():
                    for key, _ in ready:
                        self._take(key.fileobj)
            now = time.monotonic()
            if now - swept >= TICK_SECONDS:
                swept = now
                self._owner.sweep()
                limit = self._silent_seconds
                for silent in [who for who, since in self._silent.items() if now - since > limit]:
                    logger.info("a client named no region within %g s and is left", limit)
                    self._drop(silent)
                self._listen()

    def _take(self, ready: object) -> None:
        """Does what one of the selector's files is ready for."""
        if ready is self._wake:
            self._end_leases()
        elif ready is self._listener:
            self._accept()
        elif isinstance(ready, socket.socket):
            self._answer_or_drop(ready)

    def _end_leases(self) -> None:
        """Ends the leases asked for."""
        self._wake.clear()
        names = set()
        while not self._ended.empty():
            names.add(self._ended.get())
        for client in [client for client, lease in self._leases.items() if lease.region in names]:
            self._drop(client)

    def _listen(self) -> None:
        """Waits for connections from now on."""
        if not self._listening:
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._listening = True

    def _listen_later(self) -> None:
        """Waits for no connection until the next tick: who connects meanwhile is taken then."""
        self._selector.unregister(self._listener)
        self._listening = False

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError as failed:
            logger.warning("a connection for a region could not be accepted yet: %s", failed)
            self._listen_later()  # it stays readable: without a descriptor to accept it, this would spin
            return
        client.settimeout(0)
        pid, user = peer_of(client)
        if user != os.geteuid():
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

    def _answer_or_drop(self, client: socket.socket) -> None:
        """Answers one client; what goes wrong with it ends its connection, and no other."""
        try:
            self._answer(client)
        except Exception:
            logger.exception("the connection of a region's client is closed")
            self._drop(client)

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
            lease.leave = take_call(said, lease.answer, lease.peer)
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
        except OSError as failed:  # no descriptor is left to hand over
            logger.warning("a region could not be handed over: %s", failed)
            self._refuse(client, f"the lane could not hand it over: {failed.strerror}")
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
        logger.info("a client was refused a region: %s", why)
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
        self._silent.pop(client, None)
        if lease is not None:
            try:
                lease.end()
            except Exception:
                logger.exception("the call over a lease of a region could not be given up")
        client.close()
        if lease is not None:
            self._owner.lease_ended(lease.region)

    def _close_all(self) -> None:
        for client in [*self._leases, *self._silent]:
            self._drop(client)
        self._selector.close()
        self._listener.close()
        remove(self.address)
        self._wake.close()


def _nothing() -> None:
    """Does nothing: no call is under way."""
