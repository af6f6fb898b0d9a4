"""Where ranks connect: `Reception` checks who comes and hands on what they say; a `Seat` is one of them."""

from __future__ import annotations

import hmac
import logging
import socket
import threading
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from moeserve.runtime.control.messages import plans_from
from moeserve.runtime.control.stream import Message, Stream, StreamClosed

log = logging.getLogger(__name__)


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
    steps: int = 0
    expert_rows: int = 0
    load: np.ndarray | None = None  # [phases, L, E] tokens its lane sent, since it started


class RankEvents(Protocol):
    """Who takes what ranks say. Each is called by the rank's own thread."""

    def came(self, rank: int, seat: Seat, refused: str) -> None:
        """A rank has introduced itself, or says why it cannot start. Raises ValueError to turn it away."""

    def hear(self, rank: int, seat: Seat, message: Message) -> None:
        """A message of a seated rank. KeyError, TypeError or ValueError: it is malformed."""

    def lost(self, rank: int, seat: Seat, why: str) -> None:
        """A seated rank's stream ended."""


class Reception:
    """Accepts ranks' streams at `address`, one thread each."""

    def __init__(self, host: str, ranks: int, token: str, events: RankEvents) -> None:
        self._ranks, self._token, self._events = ranks, token, events
        self._listener = socket.create_server((host, 0))
        self.address = f"{host}:{self._listener.getsockname()[1]}"

    def start(self) -> None:
        """Begins to accept."""
        threading.Thread(target=self._accept, name="accept", daemon=True).start()

    def close(self) -> None:
        """Accepts nobody from now on."""
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, peer = self._listener.accept()
            except OSError:
                return  # closed
            threading.Thread(
                target=self._serve, args=(Stream(connection), peer), name=f"rank {peer}", daemon=True
            ).start()

    def _serve(self, stream: Stream, peer: object) -> None:
        rank, seat = -1, None
        try:
            hello = stream.receive()
            rank, made = self._introduced(hello, stream)
            self._events.came(rank, made, str(hello.get("refused", "")))
            seat = made
            while True:
                self._events.hear(rank, seat, stream.receive())
        except StreamClosed as closed:
            if seat is not None:
                self._events.lost(rank, seat, str(closed))
        except (KeyError, TypeError, ValueError) as error:
            log.error("refused a stream from %s: %s", peer, error)
            if seat is not None:
                self._events.lost(rank, seat, f"sent a malformed message: {error}")
        finally:
            stream.close()

    def _introduced(self, hello: Message, stream: Stream) -> tuple[int, Seat]:
        """Who comes. Raises ValueError for a stranger, or a rank that is none of the group's."""
        rank = int(hello["rank"])
        if hello["kind"] != "hello" or not hmac.compare_digest(str(hello["token"]), self._token):
            raise ValueError("a stream must begin with hello and the group's token")
        if not 0 <= rank < self._ranks:
            raise ValueError(f"rank {rank} is outside a group of {self._ranks}")
        return rank, Seat(
            stream,
            int(hello["pid"]),
            str(hello["address"]),
            str(hello["host_id"]),
            hello.get("metrics", ""),
            hello.get("weights", ""),
            plans_from(hello),
        )
