"""A persistent bidirectional stream to a lane: a call opens no stream of its own, and costs a third less."""

from __future__ import annotations

import queue
import threading
import time
from typing import Any

import grpc

from moeserve.proto import moe_pb2
from moeserve.proto.client.deadline_watch import DeadlineWatch
from moeserve.proto.errors import MoeError, Unavailable, from_rpc, lane_late, outcome
from moeserve.proto.timeouts import bounded, milliseconds


class ForwardStream:
    """One stream to one lane, for one call at a time. A call that fails to come in time ends the stream.

    Replies are read by the thread that asks, so an answer is not handed from thread to thread once more.
    """

    def __init__(self, stub: Any, watch: DeadlineWatch) -> None:
        self._watch = watch
        self._requests: queue.SimpleQueue[moe_pb2.ForwardRequest | None] = queue.SimpleQueue()
        self._replies = stub.ForwardStream(iter(self._requests.get, None))
        self._seconds = self._deadline = 0.0

    @property
    def alive(self) -> bool:
        """Whether another call may be made."""
        return bool(self._replies.is_active())

    def ask(self, request: moe_pb2.ForwardRequest, timeout: float) -> moe_pb2.ForwardReply:
        """Sends `request` and waits for its reply, `timeout` seconds at most. Raises MoeError."""
        self.send(request, timeout)
        return self.receive(request.job_id)

    def send(self, request: moe_pb2.ForwardRequest, timeout: float) -> None:
        """Sends `request`; `receive` is to follow."""
        self._seconds = bounded(timeout)
        self._deadline = time.monotonic() + self._seconds
        request.timeout_ms = milliseconds(timeout)
        self._requests.put(request)

    def receive(self, job_id: str) -> moe_pb2.ForwardReply:
        """The reply to `job_id`; replies to other jobs are thrown away. Raises MoeError."""
        watched = self._watch.add(self._deadline, self._replies.cancel)
        try:
            while True:
                reply = next(self._replies)
                if reply.job_id == job_id:
                    return outcome(reply)
        except StopIteration:
            self.close()
            raise Unavailable("UNAVAILABLE", "", "the lane ended the stream") from None
        except grpc.RpcError as failed:
            self.close()
            raise self._error(failed) from failed
        finally:
            self._watch.remove(watched)

    def close(self) -> None:
        """Ends the stream, and a call that is on it."""
        self._requests.put(None)
        self._replies.cancel()

    def _error(self, failed: grpc.RpcError) -> MoeError:
        found = from_rpc(failed)
        if found.code == "CANCELLED" and time.monotonic() >= self._deadline:
            return lane_late(self._seconds)
        return found


class StreamPool:
    """Idle streams to one lane; every call that runs has one to itself."""

    def __init__(self, stub: Any) -> None:
        self._stub = stub
        self._watch = DeadlineWatch()
        self._idle: list[ForwardStream] = []
        self._lock = threading.Lock()
        self._closed = False

    def take(self) -> ForwardStream:
        """A stream that nobody else uses; a new one when none is idle."""
        with self._lock:
            while self._idle:
                stream = self._idle.pop()
                if stream.alive:
                    return stream
                stream.close()
        return ForwardStream(self._stub, self._watch)

    def give(self, stream: ForwardStream) -> None:
        """Keeps `stream` for the next call."""
        with self._lock:
            if not self._closed:
                self._idle.append(stream)
                return
        stream.close()

    def close(self) -> None:
        """Ends the idle streams, and those that come back later at once."""
        with self._lock:
            self._closed = True
            while self._idle:
                self._idle.pop().close()
        self._watch.close()
