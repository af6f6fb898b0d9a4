"""`StreamCalls`: the calls of one stream that are under way, or whose reply its caller has yet to take."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

from google.protobuf.message import DecodeError

from moeserve.proto.channel import MAX_MESSAGE_BYTES
from moeserve.proto.transports.carried import Carried
from moeserve.runtime.doors.calls.admission import Admission
from moeserve.runtime.doors.calls.framing import check_framing

Parse = Callable[[bytes], Any]

STREAM_BYTES = 64 << 20
"""Bytes of one stream's calls; a single call may have more."""

LOOK_SECONDS = 0.02  # between looks for room among the calls of all streams


class Unparsed:
    """The bytes of a message, until they are parsed in the thread of their own call.

    gRPC would parse in the one thread that serves all calls, answer what it cannot parse with INTERNAL, log a
    traceback and leak the call.
    """

    def __init__(self, data: bytes) -> None:
        self.nbytes = len(data)
        self._data = data

    def parsed(self, parse: Parse, *, forward: bool) -> Any:
        """The message, once; the bytes are let go of. Raises DecodeError."""
        data, self._data = self._data, b""
        check_framing(data, forward=forward)
        return parse(data)


def held_bytes(request: Any, nbytes: int) -> int:
    """Bytes that a Forward `request`, whose message has `nbytes`, takes until its caller has its reply.

    They are the message's, or the reply's where that has more: hidden states in a region are not in the
    message, and without `output` their answer, of the same size, is in the reply. What is said of a region is
    only its caller's word, and no reply has more bytes than a message may.
    """
    if isinstance(request, Carried) or request.HasField("output"):
        return nbytes
    if request.hidden.WhichOneof("payload") != "region":
        return nbytes
    return max(nbytes, min(int(request.hidden.region.size), MAX_MESSAGE_BYTES))


class StreamCalls:
    """Reads no further request while there is no room, which the caller sees as flow control.

    wrong: the message that could not be parsed, after which none was read.
    """

    def __init__(self, admission: Admission, parse: Parse) -> None:
        self.wrong: DecodeError | None = None
        self._admission = admission
        self._parse = parse
        self._held: dict[str, list[int]] = {}  # bytes of the calls of each job id
        self._calls = 0
        self._nbytes = 0
        self._over = False
        self._changed = threading.Condition()

    def requests(self, messages: Iterator[Unparsed]) -> Iterator[Any]:
        """The requests in `messages`, each once there is room for it, until the stream is over."""
        for message in messages:
            try:
                request = message.parsed(self._parse, forward=True)
            except DecodeError as error:
                self.wrong = error
                return
            if not self._entered(request.job_id, held_bytes(request, message.nbytes)):
                return
            yield request

    def answered(self, reply: Any) -> None:
        """`reply` goes to gRPC now. One with an error, not an answer, takes only its own bytes."""
        if not reply.HasField("error"):
            return
        with self._changed:
            sizes = self._held.get(reply.job_id, [])
            if not sizes:
                return  # the stream is over
            less = max(0, sizes[-1] - reply.ByteSize())
            sizes[-1] -= less
            self._nbytes -= less
            self._changed.notify_all()
        self._admission.let_go(less)

    def taken(self, reply: Any) -> None:
        """gRPC has sent `reply`: its call is over."""
        with self._changed:
            sizes = self._held.get(reply.job_id, [])
            if not sizes:
                return  # the stream is over
            nbytes = sizes.pop()
            if not sizes:
                del self._held[reply.job_id]
            self._calls -= 1
            self._nbytes -= nbytes
            self._changed.notify_all()
        self._admission.let_go(nbytes)

    def end(self) -> None:
        """The stream is over: nothing is read any more, and nothing held."""
        with self._changed:
            self._over, self._held = True, {}
            nbytes, self._nbytes = self._nbytes, 0
            self._changed.notify_all()
        self._admission.let_go(nbytes)

    def _entered(self, job_id: str, nbytes: int) -> bool:
        """Waits for room for a call; False where the stream is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._over or self._fits(nbytes))
            while not self._over and not self._admission.hold(nbytes):
                self._changed.wait(LOOK_SECONDS)
            if self._over:
                return False
            self._held.setdefault(job_id, []).append(nbytes)
            self._calls += 1
            self._nbytes += nbytes
            return True

    def _fits(self, nbytes: int) -> bool:
        most = self._admission.limits.calls
        return not self._calls or (self._calls < most and self._nbytes + nbytes <= STREAM_BYTES)
