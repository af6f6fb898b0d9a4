"""`LaneStream`: the calls of one ForwardStream; `Started`: a call that may yet have to be begun."""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Protocol

from moeserve.proto import moe_pb2
from moeserve.runtime.rank.lanes.lane_call import LaneCall

log = logging.getLogger(__name__)


class Begins(Protocol):
    """What calls that come as messages need of their door."""

    def begin(
        self,
        request: moe_pb2.ForwardRequest,
        ended: Callable[[moe_pb2.ForwardStreamReply], None],
        peer: str,
        method: str = "ForwardStream",
    ) -> LaneCall | None:
        """Starts a request of `peer`; `ended` gets its reply. None for one that has ended already.

        method: as metrics name it.
        """

    def leave(self, call: LaneCall) -> None:
        """Its caller is gone."""


class LaneStream:
    """The requests of one ForwardStream and the calls they became.

    `replies` gets each reply as it is ready, and None when there will be no more.
    """

    def __init__(
        self, door: Begins, replies: queue.SimpleQueue[moe_pb2.ForwardStreamReply | None], peer: str = ""
    ) -> None:
        self._door = door
        self._peer = peer
        self._replies = replies
        self._calls: dict[int, LaneCall] = {}
        self._open = 1  # requests that have not ended, and the consumer
        self._caller_left = threading.Event()
        self._lock = threading.Lock()

    def consume(self, requests: Iterator[moe_pb2.ForwardRequest]) -> None:
        """Starts requests until the caller sends no more, or has left."""
        try:
            for number, request in enumerate(requests):
                self.start(number, request)
        except Exception as error:  # gRPC ends the iterator of a broken stream with one of several types
            log.debug("a stream broke: %s", error)
        self._ended()

    def left(self) -> None:
        """Ends the stream's calls: its RPC is over, answered or not."""
        with self._lock:
            self._caller_left.set()
            calls, self._calls = list(self._calls.values()), {}
        for call in calls:
            self._door.leave(call)
        self._replies.put(None)

    def start(self, number: int, request: moe_pb2.ForwardRequest) -> None:
        """Starts `request`, the stream's `number`th. After `left` it does nothing, or ends it at once."""
        with self._lock:
            if self._caller_left.is_set():
                return
            self._open += 1

        def ended(reply: moe_pb2.ForwardStreamReply) -> None:
            with self._lock:
                self._calls.pop(number, None)
            self._replies.put(reply)
            self._ended()

        call = self._door.begin(request, ended, self._peer)
        if call is None:
            return
        with self._lock:
            left = self._caller_left.is_set()
            if not left and not call.ended:
                self._calls[number] = call
        if left:
            self._door.leave(call)

    def _ended(self) -> None:
        with self._lock:
            self._open -= 1
            last = self._open == 0
        if last:
            self._replies.put(None)


class Started:
    """A call that came as a packet, from when it was taken: it may yet have to be begun.

    It is not kept once it has ended: a lease may be idle for long.
    """

    def __init__(self, leave: Callable[[LaneCall], None]) -> None:
        self._leave = leave
        self._call: Callable[[], LaneCall | None] = _no_call
        self._given_up = False
        self._lock = threading.Lock()

    def take(self, call: LaneCall | None) -> None:
        """The call has begun, or ended at once."""
        with self._lock:
            self._call = _no_call if call is None else weakref.ref(call)
            given_up = self._given_up
        if given_up and call is not None:
            self._leave(call)

    def give_up(self) -> None:
        """The caller has left."""
        with self._lock:
            self._given_up, call = True, self._call()
        if call is not None:
            self._leave(call)


def _no_call() -> None:
    """There is no call yet, or no more."""
