"""`Calling`: the threads in which calls are parsed, let in and answered, apart for each sort of call.

So calls that wait for a step, streams that nobody reads and operators who wait for a reload leave health and
questions their threads. And calls that came without their message leave threads of their sort to others.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NoReturn

import grpc

from moeserve.proto.client.deadline_watch import DeadlineWatch
from moeserve.proto.texts import quoted
from moeserve.runtime.doors.calls.admission import Admission
from moeserve.runtime.doors.calls.callers import FirstMessages
from moeserve.runtime.doors.calls.stream_calls import Parse, StreamCalls, Unparsed, held_bytes
from moeserve.runtime.doors.calls.threads import Threads
from moeserve.runtime.doors.deadlines import Observe, uncounted
from moeserve.runtime.doors.failures import guarded, status_of
from moeserve.runtime.doors.operations import BadRequest
from moeserve.runtime.errors import CallerLeft, GroupUnavailable, LaneFull

log = logging.getLogger(__name__)

Serialize = Callable[[Any], bytes]

SPARE_THREADS = 16  # of each sort, so that what is refused is refused at once
SMALL_SECONDS = 1.0  # for the message of a question to follow its call, where its thread is wanted
OPERATIONS = 4  # a rebalance, reload or scaling at once, with those that wait for it
QUESTIONS = 16  # such as GetTopology, which wait for nothing


class Calling:
    """Makes the handlers of one server, and has the threads that they run in."""

    def __init__(self, admission: Admission, observe: Observe = uncounted) -> None:
        """observe: is told of calls that are refused here, before their door sees them."""
        self._admission, self._observe = admission, observe
        self._late = DeadlineWatch()
        limits = admission.limits
        threads = {
            "calls": 2 * (limits.calls + SPARE_THREADS),
            "streams": limits.streams + SPARE_THREADS,
            "operations": OPERATIONS + SPARE_THREADS,
            "questions": QUESTIONS,
            "health": QUESTIONS,
        }
        self._under_way = 0  # calls whose RPC has begun and is not over, even before their message comes
        self._stopping = ""  # why no further call may begin
        self._lock = threading.Lock()
        self._pools = {sort: Threads(count, sort) for sort, count in threads.items()}
        self._first_messages = {
            sort: FirstMessages(count // 2, small=sort != "calls")  # the others are for calls that run
            for sort, count in threads.items()
        }

    def in_thread(self, behavior: Callable[..., Any], sort: str) -> Callable[..., Any]:
        """`behavior`, a handler's, run by the threads of its sort."""

        def run(*given: Any) -> Any:
            return behavior(*given)

        run.experimental_thread_pool = self._pools[sort]  # type: ignore[attr-defined]  # so gRPC calls it
        return run

    def unary(
        self, answering: Callable[..., Any], parse: Parse, serialize: Serialize, sort: str, method: str
    ) -> grpc.RpcMethodHandler:
        """The handler of calls with one message, which has to arrive in time. method: as metrics name those
        of the sort `calls`.

        To gRPC it is a stream of one message, which is the same on the wire: for the message of a unary call
        gRPC waits without a bound.
        """

        def answer(messages: Iterator[Unparsed], context: grpc.ServicerContext) -> Any:
            if sort != "calls":
                message = guarded(context, lambda: self._first(messages, context, sort))
                return answering(guarded(context, lambda: message.parsed(parse, forward=False)), context)
            call, request = self._let_in(messages, context, parse, method)
            reply = answering(request, context)
            within = time.monotonic() + self._admission.limits.unread_seconds
            watched = self._late.add(within, partial(_leave_alone, context, "takes no reply"))
            call.at_end(lambda: self._late.remove(watched))
            return reply

        return grpc.stream_unary_rpc_method_handler(self.in_thread(answer, sort), Unparsed, serialize)

    def stream(
        self, answering: Callable[..., Any], parse: Parse, serialize: Serialize, method: str
    ) -> grpc.RpcMethodHandler:
        """The handler of streams. A message that cannot be parsed is the last that is read.

        What was asked before it is answered, and then the stream ends with INVALID_ARGUMENT. A caller that
        does not take a reply in time is left.
        """

        def answer(messages: Iterator[Unparsed], context: grpc.ServicerContext) -> Iterator[Any]:
            started = time.perf_counter()
            try:
                opened = self._admission.open_stream(context.peer())
            except LaneFull as full:
                self._refuse(full, context, method, started)
            calls = StreamCalls(self._admission, parse)

            def over() -> None:
                calls.end()
                opened()

            if not context.add_callback(over):  # the RPC is over already
                over()
                return
            for reply in answering(calls.requests(messages), context):
                within = time.monotonic() + self._admission.limits.unread_seconds
                watched = self._late.add(within, partial(_leave_alone, context, "takes no reply"))
                calls.answered(reply)
                try:
                    yield reply
                finally:  # the stream may end here
                    self._late.remove(watched)
                calls.taken(reply)
            if calls.wrong is not None:
                self._refuse(calls.wrong, context, method, started)

        return grpc.stream_stream_rpc_method_handler(self.in_thread(answer, "streams"), Unparsed, serialize)

    def drain(self, reason: str) -> None:
        """Refuses calls that begin from now on, as UNAVAILABLE with the reason; those begun go on."""
        with self._lock:
            self._stopping = reason

    @property
    def busy(self) -> bool:
        """Whether a call is under way, or has an answer that its caller has yet to take."""
        return self._under_way > 0 or self._admission.held[2] > 0

    def close(self) -> None:
        """Ends the threads once they are idle."""
        self._late.close()
        for pool in self._pools.values():
            pool.shutdown(wait=False)

    def _begin(self, context: grpc.ServicerContext) -> _Call:
        """Counts a call until its RPC is over: until its caller has taken the answer, or left.

        Raises GroupUnavailable where none may begin.
        """
        with self._lock:
            if self._stopping:
                raise GroupUnavailable(self._stopping)
            self._under_way += 1
        call = _Call()
        call.at_end(self._end)
        if not context.add_callback(call.end):  # the RPC is over already
            call.end()
        return call

    def _end(self) -> None:
        with self._lock:
            self._under_way -= 1

    def _let_in(
        self, messages: Iterator[Unparsed], context: grpc.ServicerContext, parse: Parse, method: str
    ) -> tuple[_Call, Any]:
        """A call with its request. One that may not begin ends here, and is counted: no door sees it."""
        started = time.perf_counter()
        try:
            call = self._begin(context)
            message, peer = self._first(messages, context, "calls"), context.peer()
            call.at_end(self._admission.enter(peer, message.nbytes))
            request = message.parsed(parse, forward=True)
            if more := held_bytes(request, message.nbytes) - message.nbytes:
                call.at_end(self._admission.enlarge(peer, message.nbytes, more))
        except Exception as error:
            self._refuse(error, context, method, started)
        return call, request

    def _refuse(
        self, error: Exception, context: grpc.ServicerContext, method: str, started: float
    ) -> NoReturn:
        """Ends a call with the status of `error`, and counts it."""
        status = status_of(error)
        self._observe(method, "inline", status.code, time.perf_counter() - started)
        status.abort(context)

    def _first(self, messages: Iterator[Unparsed], context: grpc.ServicerContext, sort: str) -> Unparsed:
        """The message of a unary call, which is cancelled where it does not come in time, or keeps a thread
        that others need. Raises LaneFull where its caller keeps too many of them, CallerLeft and BadRequest.
        """
        within, left = time.monotonic() + self._admission.limits.request_seconds, list[bool]()

        def leave() -> None:
            left.append(True)
            _leave_alone(context, "sends no message")

        waits = self._first_messages[sort]
        entry = waits.begin(context.peer())

        def late() -> None:
            if waits.late(entry):
                leave()

        watched = [self._late.add(within, leave)]
        if waits.small:
            watched.append(self._late.add(time.monotonic() + SMALL_SECONDS, late))
        try:
            return next(messages)
        except (StopIteration, grpc.RpcError) as over:  # of a call that is cancelled either may come
            if left or isinstance(over, grpc.RpcError):
                raise CallerLeft("the caller left, or was left, before its message was there") from None
            raise BadRequest("the call ended without its message") from None
        finally:
            for each in watched:
                self._late.remove(each)
            waits.over(entry)


def _leave_alone(context: grpc.ServicerContext, why: str) -> None:
    """Ends the call of a caller that did not do its part in time."""
    log.info("a caller is left, %s: it %s", quoted(context.peer()), why, extra={"sort": why})
    context.cancel()


class _Call:
    """What is to be done when a unary call's RPC is over."""

    def __init__(self) -> None:
        self._acts: list[Callable[[], object]] | None = []
        self._lock = threading.Lock()

    def at_end(self, act: Callable[[], object]) -> None:
        """Has `act` called when the RPC is over, or now where it is."""
        with self._lock:
            if self._acts is not None:
                self._acts.append(act)
                return
        act()

    def end(self) -> None:
        """The RPC is over."""
        with self._lock:
            acts, self._acts = self._acts or [], None
        for act in acts:
            act()
