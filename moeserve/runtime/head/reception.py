"""`Reception` accepts ranks' streams, checks them and hands on what they say; a `Seat` is one of them."""

from __future__ import annotations

import hmac
import logging
import socket
from contextlib import closing
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from moeserve.proto.host import host_id
from moeserve.proto.texts import clipped
from moeserve.runtime.control.acceptor import MOST_STRANGERS, Acceptor, Guest
from moeserve.runtime.control.messages import plans_from
from moeserve.runtime.control.ring import RING_BYTES, supported
from moeserve.runtime.control.rings import RingOffers
from moeserve.runtime.control.shadowed import NO_SHADOWS, Shadowed
from moeserve.runtime.control.stream import Message, Stream, StreamClosed
from moeserve.runtime.keys.access import Frames, known_frame
from moeserve.runtime.keys.keys import NO_KEYS

log = logging.getLogger(__name__)

HELLO_SECONDS = 10.0  # within which whoever connects has to introduce itself
SEND_SECONDS = 5.0  # a rank that takes nothing of what is sent to it for so long is lost


class RankProcess(NamedTuple):
    """One process of a rank. Its id alone does not tell it: hosts and containers each count their own."""

    rank: int
    pid: int
    host_id: str


@dataclass(eq=False)
class Seat:
    """What the coordinator knows of one connected rank."""

    stream: Stream
    pid: int
    address: str  # of its door
    host_id: str
    metrics: str = ""  # host:port of its exporter
    weights: str = ""  # host:port where peers copy its experts
    plans: dict[int, tuple[str, str, str]] = field(default_factory=dict)  # layer -> kernel, dispatcher, wire
    bytes_read: int = 0
    weight_bytes: int = 0
    generation: int = 0  # the last that it joined
    outlives: bool = False  # no group need wait until members of one before have ended
    steps: int = 0
    expert_rows: int = 0
    unreachable: str = ""  # why what was sent to it did not arrive
    again: bool = False  # its process was here before; it says what it holds once it has left its generation
    load: np.ndarray | None = None  # [phases, L, E] tokens its lane sent, since it started
    load_before: np.ndarray | None = None  # of these, what one that came again had counted before
    shadowed: Shadowed = NO_SHADOWS  # the experts that it keeps in host memory

    def process(self, rank: int) -> RankProcess:
        """The process that is connected; `rank` is the seat's number."""
        return RankProcess(rank, self.pid, self.host_id)


class Refusal(NamedTuple):
    """Why a rank cannot start, in its own words."""

    reason: str
    for_good: bool  # its configuration or checkpoint is wrong: to start it again changes nothing


class RankEvents(Protocol):
    """What ranks' streams bring, for the coordinator. Each method is called by the rank's own thread."""

    def rank_connected(self, rank: int, seat: Seat, refusal: Refusal | None) -> None:
        """A rank has introduced itself, or says why it cannot start. Raises ValueError to turn it away."""

    def message_received(self, rank: int, seat: Seat, message: Message) -> None:
        """A connected rank has sent a message. Whatever this raises ends the rank's stream."""

    def rank_lost(self, rank: int, seat: Seat, why: str) -> None:
        """The stream of a rank ended that was introduced, also if it was turned away and has no seat."""


class Reception:
    """Accepts ranks' streams at `address`, one thread each."""

    def __init__(self, at: str | socket.socket, seats: int, token: str, events: RankEvents) -> None:
        """at: a host, of which a free port is taken, or a socket that listens already, which its owner keeps
        when this head ends.
        """
        self._room, self._token, self._events = seats, token, events  # how many seats there are
        self.send_seconds = SEND_SECONDS
        self.reach_seconds = 30.0  # for which a rank's host may be out of reach
        self.hello_seconds: float | None = None  # None: HELLO_SECONDS
        self.keys = NO_KEYS
        self.ring_bytes, self.ring_spin = (
            RING_BYTES,
            0.0,
        )  # shared with a rank of this host, each way; 0: none
        self._rings: RingOffers | None = None
        listener = socket.create_server((at, 0)) if isinstance(at, str) else at
        self._acceptor = Acceptor(listener, "rank", self._serve, MOST_STRANGERS + seats)
        host, port = listener.getsockname()[:2]
        self.address = f"{at if isinstance(at, str) else host}:{port}"

    def start(self) -> None:
        """Begins to accept ranks' streams. Raises OSError where no socket for rings can be made."""
        if self.ring_bytes and supported():
            self._rings = RingOffers(self.ring_bytes, self.ring_spin)
        self._acceptor.start()

    def close(self) -> None:
        """Accepts nobody from now on."""
        self._acceptor.close()
        if self._rings is not None:
            self._rings.close()

    def _stream(self, connection: socket.socket) -> Stream:
        """A stranger's stream, once its TLS fits. Raises StreamClosed."""
        try:
            return Stream(self.keys.accept(connection))
        except OSError as error:
            connection.close()
            raise StreamClosed(clipped(str(error))) from error

    def _serve(self, guest: Guest) -> None:
        """One rank's thread. However it ends, the stream is closed and the rank gives up its seat."""
        rank, seat, why, peer = -1, None, "", guest.peer
        try:
            with closing(self._stream(guest.connection)) as stream:
                stream.bound_sends(self.send_seconds)
                stream.bound_silence(self.reach_seconds)
                hello = stream.receive_first(self.hello_seconds or HELLO_SECONDS)
                guest.known()
                rank, seat = self._introduced(hello, stream)
                if seat.again:
                    stream.send({"kind": "welcome"})
                self._events.rank_connected(rank, seat, refusal_of(hello))
                if self._rings is not None and hello.get("ring") and seat.host_id == host_id():
                    self._rings.offer(stream)
                while True:
                    message = stream.receive()
                    known_frame(Frames.TO_HEAD, message["kind"])
                    self._events.message_received(rank, seat, message)
        except StreamClosed as closed:
            why = (seat.unreachable if seat is not None else "") or str(closed)
            if seat is None:
                log.warning("a stream from %s ended before its hello: %s", peer, why)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            log.warning("refused a stream from %s: %s", peer, clipped(str(error)))
            why = clipped(f"sent a malformed message: {error}")
        except Exception as error:
            log.exception("the thread of rank %d, %s, ends", rank, peer)
            why = clipped(f"its message could not be taken: {type(error).__name__}: {error}")
        finally:
            if seat is not None:
                self._events.rank_lost(rank, seat, why)

    def _introduced(self, hello: Message, stream: Stream) -> tuple[int, Seat]:
        """The rank that says hello. Raises ValueError for a stranger, and for a rank of no such number."""
        token = str(hello.get("token", "")).encode(errors="replace")
        if hello["kind"] != "hello" or not hmac.compare_digest(token, self._token.encode()):
            raise ValueError("a stream must begin with hello and the group's token")
        rank = int(hello["rank"])
        if not 0 <= rank < self._room:
            raise ValueError(f"seat {rank} is outside a group of {self._room} seats")
        return rank, Seat(
            stream,
            int(hello["pid"]),
            str(hello["address"]),
            str(hello["host_id"]),
            hello.get("metrics", ""),
            hello.get("weights", ""),
            plans_from(hello),
            again=bool(hello.get("again", False)),
            outlives=bool(hello.get("outlives", False)),
        )


def refusal_of(hello: Message) -> Refusal | None:
    """Why the rank that says hello cannot start; None for one that can."""
    reason = clipped(str(hello.get("refused", "")))
    return Refusal(reason, bool(hello.get("for_good", False))) if reason else None
