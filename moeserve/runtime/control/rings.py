"""How two processes of a host come to share rings: who made them hands their descriptors over a Unix socket.

The head offers rings to a rank that runs on its host, in a message over their stream: a socket in the private
folder of this user, and a name that nobody could guess. The rank fetches the descriptors there, and each of
both then moves what it sends from the stream's socket to the ring, the rank first.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
from functools import partial

from moeserve.proto.host import host_id, usable_cores
from moeserve.runtime.control.acceptor import Acceptor, Guest
from moeserve.runtime.control.frames import Message
from moeserve.runtime.control.ring import Descriptors, RingEnd, make_rings, supported
from moeserve.runtime.control.stream import Stream
from moeserve.runtime.keys.sockets import listen_privately, peer_of, remove

log = logging.getLogger(__name__)

HANDOVER_SECONDS = 5.0  # for either end to say its part
_NAME_BYTES = 64
LEAST_BYTES = (1 << 16) - 1


def ring_wish(nbytes: int) -> Message:
    """What a hello has more of from a process that takes rings of this host: none where it does not."""
    return {"ring": nbytes} if nbytes and supported() and host_id() else {}


def spin_of(seconds: float, ranks: int) -> float:
    """`seconds`, where this process may use two cores for each of so many ranks of its host and for their
    head; else 0: a reader that spins there takes time from who is to write, and from threads that compute.
    """
    return seconds if usable_cores() >= 2 * (ranks + 1) else 0.0


class RingOffers:
    """Makes rings for streams and hands them over, by a thread of its own."""

    def __init__(self, nbytes: int, spin: float) -> None:
        """nbytes: of each direction's ring; a power of two is made of it. spin: as `RingEnd` has it. Raises
        OSError.
        """
        self._nbytes, self._spin = 1 << max(LEAST_BYTES, nbytes - 1).bit_length(), spin
        self._offered: dict[str, Descriptors] = {}
        self._lock = threading.Lock()
        listener, self._path = listen_privately("rings", socket.SOCK_SEQPACKET)
        self._acceptor = Acceptor(listener, "rings", self._hand_over)
        self._acceptor.start()

    def offer(self, stream: Stream) -> None:
        """Offers rings to the other end of `stream`. Where it takes none, nothing changes.

        Raises StreamClosed. What cannot be made is logged, and the stream stays as it is.
        """
        try:
            descriptors = make_rings(self._nbytes)
        except OSError as failed:
            log.warning("a rank's stream stays on TCP: no ring could be made: %s", failed)
            return
        theirs: Descriptors | None = None
        try:
            theirs = descriptors.copied()
            stream.attach(RingEnd(descriptors, stream.fileno(), first=True, spin=self._spin))
        except (OSError, ValueError) as failed:
            descriptors.close()
            if theirs is not None:
                theirs.close()
            log.warning("a rank's stream stays on TCP: its ring could not be mapped: %s", failed)
            return
        name = secrets.token_hex(16)
        with self._lock:
            self._offered[name] = theirs
        stream.on_close = partial(self._withdraw, name)
        stream.send({"kind": "ring", "socket": self._path, "name": name})

    def close(self) -> None:
        """Hands over nothing more."""
        self._acceptor.close()
        remove(self._path)
        for name in list(self._offered):
            self._withdraw(name)

    def _withdraw(self, name: str) -> None:
        """Takes an offer back, unless it was taken."""
        with self._lock:
            offered = self._offered.pop(name, None)
        if offered is not None:
            offered.close()

    def _hand_over(self, guest: Guest) -> None:
        """Gives the rings to who knows their name."""
        with guest.connection as connection:
            pid, user = peer_of(connection)
            if user != os.geteuid():
                log.warning("process %d of user %d was refused a ring: it is for its own user", pid, user)
                return
            connection.settimeout(HANDOVER_SECONDS)
            try:
                name = connection.recv(_NAME_BYTES).decode(errors="replace")
                with self._lock:
                    descriptors = self._offered.pop(name)
            except KeyError:
                log.warning("process %d was refused a ring: none has the name that it says", pid)
                return
            except OSError as failed:
                log.warning("process %d was not given its ring: %s", pid, failed)
                return
            try:
                socket.send_fds(connection, [b"ring"], list(descriptors))
            except OSError as failed:
                log.warning("process %d was not given its ring: %s", pid, failed)
                return
            finally:
                descriptors.close()


def take_ring(offer: Message, stream: Stream, spin: float) -> None:
    """Fetches the rings that the other end of `stream` has offered, and moves to them.

    Where that cannot be, it is logged and the stream stays as it is: the other end's process may run in
    another container. Raises StreamClosed.
    """
    try:
        stream.attach(_fetched(str(offer["socket"]), str(offer["name"]), stream.fileno(), spin))
    except (OSError, ValueError) as failed:
        log.info("the stream of the head stays on TCP: its ring could not be fetched: %s", failed)
        return
    stream.move()


def _fetched(path: str, name: str, connection: int, spin: float) -> RingEnd:
    """The other end of rings that are handed over at `path`. Raises OSError, ValueError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
        asking.settimeout(HANDOVER_SECONDS)
        asking.connect(path)
        if (user := peer_of(asking)[1]) != os.geteuid():
            raise PermissionError(f"a process of user {user} listens there")
        asking.send(name.encode())
        _, found, _, _ = socket.recv_fds(asking, _NAME_BYTES, 3, socket.MSG_CMSG_CLOEXEC)
        if len(found) != 3:
            for descriptor in found:
                os.close(descriptor)
            raise ConnectionRefusedError("the head hands over no ring by that name")
        descriptors = Descriptors(*found)
        try:
            return RingEnd(descriptors, connection, first=False, spin=spin)
        except BaseException:
            descriptors.close()
            raise
