"""A head that has a generation's store and nothing else, and workers that form groups over their streams."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

from group_ranks import used
from parallel import kind_of

from moeserve.dispatch.group import end_group, form_group, group_beside
from moeserve.runtime.control.store import StreamStore
from moeserve.runtime.control.stream import Stream, StreamClosed, connect
from moeserve.runtime.head.generations.key_store import STORE_BYTES, KeyStore

GENERATION = 4
SECONDS = 10.0


class Head:
    """Answers calls of its generation's store on every stream; a member says its seat first."""

    def __init__(self, limit: int = STORE_BYTES) -> None:
        self.keys, self._lock = KeyStore(limit), threading.Lock()
        self._streams: dict[int, Stream] = {}
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for stream in self._streams.values():
            stream.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                stream = Stream(self._listener.accept()[0])
                threading.Thread(target=self._serve, args=(stream,), daemon=True).start()

    def _serve(self, stream: Stream) -> None:
        with suppress(StreamClosed):
            seat = stream.receive()["seat"]
            self._streams[seat] = stream
            while True:
                asked = stream.receive()
                with self._lock:
                    for to, answer in self.keys.answers(seat, asked):
                        self._streams[to].send({"kind": "stored", "generation": GENERATION} | answer)


def member_of(head: Head | str, seat: int) -> StreamStore:
    """The store of the member at `seat`, whose stream a thread of its own reads."""
    stream = connect(head if isinstance(head, str) else head.address, SECONDS)
    stream.send({"kind": "hello", "seat": seat})
    store = StreamStore(stream.send, GENERATION, SECONDS)

    def receive() -> None:
        try:
            while True:
                store.answered(stream.receive())
        except StreamClosed as closed:
            store.close(str(closed))

    threading.Thread(target=receive, daemon=True).start()
    return store


def formed_over_streams(rank: int, world: int, address: str, device: str = "cpu") -> bool:
    """Worker: groups over its stream to a head, the next one beside the present one, and parts of them."""
    device = device if device == "cpu" else f"{device}:{rank}"
    store, kind = member_of(address, rank), kind_of(rank, device, SECONDS)
    present = form_group(store, "present", rank, world, kind)
    used(present, device)
    following = form_group(store, "next", rank, world, kind)
    used(present, device)
    used(following, device)
    end_group(present)
    beside = group_beside(following, kind)
    used(beside, device)
    for group in (beside, following):
        end_group(group)
    return True
