"""How many calls, streams and bytes a door lets in: nobody takes another's share, or health's threads."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable

import grpc
import pytest
from door_service import SECONDS, Service, held, request, silent, until
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc
from raw_http2 import RawConnection

from moeserve.proto import health, moe_pb2
from moeserve.proto.channel import MAX_MESSAGE_BYTES
from moeserve.proto.client.deadline_watch import DeadlineWatch
from moeserve.proto.errors import PUSHBACK_KEY, REASON_KEY
from moeserve.runtime.doors import health as health_servicer
from moeserve.runtime.doors.calls.admission import Admission, DoorLimits
from moeserve.runtime.doors.calls.framing import LARGE_BYTES, check_framing
from moeserve.runtime.doors.calls.stream_calls import StreamCalls, Unparsed
from moeserve.runtime.doors.health import Health
from moeserve.runtime.errors import LONGEST_PUSHBACK, LaneFull, pushback


def refusal(admission: Admission, peer: str, nbytes: int = 0) -> LaneFull:
    with pytest.raises(LaneFull) as refused:
        admission.enter(peer, nbytes)
    return refused.value


def test_a_connection_that_asks_without_a_pause_leaves_others_their_share() -> None:
    admission = Admission(DoorLimits(calls=8))
    for _ in range(8):
        admission.enter("rude", 0)  # alone it may have all
    assert "8 calls are under way" in str(refusal(admission, "polite"))
    admission = Admission(DoorLimits(calls=8))
    leave = [admission.enter("rude", 0) for _ in range(8)]
    refusal(admission, "polite")
    leave.pop()()
    assert "its share of 8 among 2 connections is 4" in str(refusal(admission, "rude"))
    admission.enter("polite", 0)
    leave.pop()()
    refusal(admission, "rude")
    admission.enter("polite", 0)


def test_bytes_are_let_in_up_to_a_limit_but_for_a_single_call() -> None:
    admission = Admission(DoorLimits(nbytes=100))
    leave = admission.enter("a", 500)
    assert "1 bytes do not fit: calls of 500 bytes are under way" in str(refusal(admission, "b", 1))
    leave()
    leave = admission.enter("a", 60)
    refusal(admission, "b", 41)
    admission.enter("b", 40)()
    leave()
    assert admission.held == (0, 0, 0)


def test_a_call_that_is_let_in_may_turn_out_larger() -> None:
    admission = Admission(DoorLimits(nbytes=100))
    leave = admission.enter("a", 10)
    less = admission.enlarge("a", 10, 490)  # alone it may have more
    assert admission.held == (1, 0, 500)
    less()
    other = admission.enter("b", 50)
    with pytest.raises(LaneFull, match="60 bytes do not fit: calls of 60 bytes are under way"):
        admission.enlarge("a", 10, 50)
    admission.enlarge("a", 10, 40)()
    other()
    leave()
    assert admission.held == (0, 0, 0)


class Clock:
    """A clock that a test turns."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_whoever_is_refused_again_is_told_to_wait_longer_and_not_all_alike() -> None:
    clock = Clock()
    admission = Admission(DoorLimits(calls=1), clock)
    leave = admission.enter("a", 0)
    told = []
    for _ in range(12):
        told.append(refusal(admission, "b").pushback)
        clock.now += told[-1]
    assert 0.025 <= told[0] <= 0.05 and told[3] > told[0] and told[-1] >= LONGEST_PUSHBACK / 2
    assert max(told) <= LONGEST_PUSHBACK
    leave()
    admission.enter("b", 0)()
    leave = admission.enter("a", 0)
    assert refusal(admission, "b").pushback <= 0.05
    assert len({pushback(3) for _ in range(50)}) > 40


def test_calls_that_are_refused_together_are_told_as_much_as_one() -> None:
    clock = Clock()
    admission = Admission(DoorLimits(calls=1), clock)
    admission.enter("a", 0)
    assert max(refusal(admission, "b").pushback for _ in range(30)) <= 0.05
    clock.now += 0.05
    assert 0.05 <= max(refusal(admission, "b").pushback for _ in range(30)) <= 0.1


def test_a_caller_with_many_calls_comes_back_as_quickly_as_it_is_let_in() -> None:
    clock, ends = Clock(), []
    admission = Admission(DoorLimits(calls=4), clock)
    waiting = [(clock.now, at) for at in range(40)]  # of forty workers that come back when they are told to
    asked = served = 0
    for _ in range(6000):
        clock.now += 0.01
        while ends and ends[0][0] <= clock.now:
            ends.pop(0)[1]()
        for at, (when, worker) in enumerate(waiting):
            if when <= clock.now:
                asked += 1
                try:
                    leave = admission.enter("polite", 0)
                except LaneFull as full:
                    waiting[at] = clock.now + full.pushback, worker
                else:
                    served += 1
                    ends.append((clock.now + 0.2, leave))
                    waiting[at] = clock.now, worker
    assert served >= 0.9 * 60 * 4 / 0.2, "the door is as good as always full"
    assert asked <= 4 * served


def test_many_connections_of_one_host_share_what_one_connection_of_another_has() -> None:
    admission = Admission(DoorLimits(calls=64))
    many = [f"ipv4:10.0.0.7:{port}" for port in range(30)]
    other = "ipv6:[fd00::8]:5"
    leaves = {peer: [admission.enter(peer, 0)] for peer in (*many, other)}
    for _ in range(200):
        for peer, own in leaves.items():
            with contextlib.suppress(LaneFull):
                own.append(admission.enter(peer, 0))
        leaves[many[0]].append(leaves[many[0]].pop(0))
    assert len(leaves[other]) == 32, "half of 64, though it is one of 31 connections"


def test_connections_that_are_gone_are_forgotten() -> None:
    admission = Admission(DoorLimits(calls=4))
    for peer in range(1000):
        admission.enter(str(peer), 0)()
    assert len(admission._callers) <= 10


# -- what a large message looks like


def garbage(kind: str, nbytes: int) -> bytes:
    """About `nbytes` that take long to parse, or are no message."""
    match kind:
        case "fields":
            return b"\x10\x01" * (nbytes // 2)
        case "shape":
            return moe_pb2.ForwardRequest(hidden=moe_pb2.Tensor(shape=[1] * nbytes)).SerializeToString()
        case "nested":
            inner = moe_pb2.Choice(ids=moe_pb2.Tensor(data=bytes(9))).SerializeToString()
            return moe_pb2.ForwardRequest().SerializeToString() + (b"\x32" + bytes([len(inner)]) + inner) * (
                nbytes // 15
            )
        case "name":
            return moe_pb2.ForwardRequest(model="m" * nbytes).SerializeToString()
        case "zeros":
            return bytes(nbytes)
    return b"\xff" * nbytes


def test_a_large_request_is_taken_as_it_is() -> None:
    check_framing(request(LARGE_BYTES).SerializeToString(), forward=True)
    logits = request(LARGE_BYTES)
    logits.logits.CopyFrom(logits.hidden)
    check_framing(logits.SerializeToString(), forward=True)


@pytest.mark.parametrize("kind", ["fields", "shape", "nested", "name", "zeros", "ones"])
def test_what_would_take_long_to_parse_is_refused_at_once(kind: str) -> None:
    data = garbage(kind, 4 * LARGE_BYTES)
    began = time.thread_time()
    with pytest.raises(DecodeError):
        check_framing(data, forward=True)
    assert time.thread_time() - began < 0.01


@pytest.mark.parametrize("cut", [1, 100, LARGE_BYTES])
def test_a_large_request_that_was_cut_is_refused(cut: int) -> None:
    with pytest.raises(DecodeError):
        check_framing(request(2 * LARGE_BYTES).SerializeToString()[:-cut], forward=True)


def test_a_large_question_is_refused_and_a_small_message_not_looked_at() -> None:
    with pytest.raises(DecodeError, match="this call takes 1048576 at most"):
        check_framing(request(LARGE_BYTES).SerializeToString(), forward=False)
    check_framing(b"\xff" * LARGE_BYTES, forward=True)


# -- at a server


def test_silent_streams_and_waiting_calls_leave_health_its_threads(serve: Callable[..., Service]) -> None:
    service, ends = serve(calls=4, streams=8), threading.Event()
    streams = [service.stream(silent(ends)) for _ in range(300)]
    calls = [service.forward() for _ in range(100)]
    assert until(lambda: held(service)[:2] == (4, 7))
    assert until(lambda: sum(stream.done() for stream in streams) == 293)
    over = next(stream for stream in streams if stream.done())
    assert over.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    trailing = dict(over.trailing_metadata())
    assert trailing[REASON_KEY] == "overloaded" and int(trailing[PUSHBACK_KEY]) > 0
    began = time.monotonic()
    assert service.healthy() == "SERVING" and service.list() == b""
    assert time.monotonic() - began < 5
    assert until(lambda: sum(call.done() for call in calls) == 96)
    service.go.set()
    ends.set()
    assert until(lambda: held(service) == (0, 0, 0))


def test_who_watches_health_takes_no_thread(serve: Callable[..., Service]) -> None:
    service = serve(calls=4)
    watch = service.channel.unary_stream("/grpc.health.v1.Health/Watch")
    watching = [watch(b"") for _ in range(60)]
    assert [health.decode_check(next(one)) for one in watching] == ["SERVING"] * 60
    assert service.healthy() == "SERVING"
    service.endpoint.set_serving(serving=False)
    assert [health.decode_check(next(one)) for one in watching] == ["NOT_SERVING"] * 60


def test_a_deadline_s_act_that_fails_is_not_the_last() -> None:
    watch, acted = DeadlineWatch(), threading.Event()

    def fail() -> None:
        raise RuntimeError("of a call that has ended")

    watch.add(0.0, fail)
    time.sleep(0.1)
    watch.add(0.0, acted.set)
    assert acted.wait(SECONDS)
    watch.close()


def test_calls_whose_message_does_not_come_are_cancelled(serve: Callable[..., Service]) -> None:
    service, ends = serve(calls=4, request_seconds=2.0), threading.Event()
    half_open = service.channel.stream_unary("/moeserve.v1.LaneService/Forward")
    calls = [half_open.future(silent(ends)) for _ in range(40)]  # more than there are threads
    assert service.healthy() == "SERVING" and service.list() == b""
    assert until(lambda: all(call.done() for call in calls))
    assert Counter(call.code().name for call in calls) == {"CANCELLED": 16, "RESOURCE_EXHAUSTED": 24}
    service.go.set()
    assert service.forward().result() == moe_pb2.ForwardReply(epoch=5).SerializeToString()
    ends.set()


def test_a_call_that_ends_without_its_message_is_refused(serve: Callable[..., Service]) -> None:
    service = serve(calls=4)
    call = service.channel.stream_unary("/moeserve.v1.LaneService/Forward")
    with pytest.raises(grpc.RpcError) as refused:
        call(iter([]), timeout=SECONDS)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_stream_that_nobody_reads_is_read_no_further_and_then_left(serve: Callable[..., Service]) -> None:
    service = serve(calls=256, unread_seconds=2.0)
    one = request(4 << 20).SerializeToString()
    stream = service.stream(one for _ in range(100))
    assert until(lambda: service.read > 0)
    time.sleep(1.0)
    assert held(service)[2] <= 64 << 20
    assert service.read <= 8  # of 12 MiB each
    assert until(lambda: held(service) == (0, 0, 0))
    stream.cancel()


def test_a_stream_that_is_read_goes_on_for_any_number_of_calls(serve: Callable[..., Service]) -> None:
    service = serve(calls=4, nbytes=1 << 20, unread_seconds=5.0)
    names = [str(at) for at in range(500)]
    asked = (moe_pb2.ForwardRequest(job_id=name).SerializeToString() for name in names)
    replies = [moe_pb2.ForwardStreamReply.FromString(reply).job_id for reply in service.stream(asked)]
    assert replies == names
    assert until(lambda: held(service) == (0, 0, 0))


def test_bytes_of_calls_are_limited(serve: Callable[..., Service]) -> None:
    service = serve(calls=16, nbytes=40 << 20)
    first = service.forward(10 << 20)  # 30 MiB, with ids and weights
    assert until(lambda: held(service)[0] == 1)
    with pytest.raises(grpc.RpcError) as refused:
        service.forward(10 << 20).result()
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "bytes do not fit" in refused.value.details()
    small = service.forward(1024)
    service.go.set()
    assert first.result() == small.result()
    assert until(lambda: held(service) == (0, 0, 0))


def small_request(answer_bytes: int, output: bool = False, job_id: str = "j") -> bytes:
    """A request of some bytes whose hidden states lie in a region, and so its answer too where it says so."""
    region = moe_pb2.Region(name="r", size=answer_bytes)
    tensor = moe_pb2.Tensor(dtype=moe_pb2.DTYPE_FP32, shape=[1, answer_bytes // 4], region=region)
    made = moe_pb2.ForwardRequest(job_id=job_id, hidden=tensor)
    if output:
        made.output.CopyFrom(region)
    return made.SerializeToString()


def test_bytes_of_replies_count_where_the_hidden_states_lie_in_a_region(
    serve: Callable[..., Service],
) -> None:
    service = serve(calls=16, nbytes=40 << 20)
    forward = service.channel.unary_unary("/moeserve.v1.LaneService/Forward").future
    first = forward(small_request(30 << 20), timeout=SECONDS)
    assert until(lambda: held(service)[0] == 1)
    assert held(service)[2] == 30 << 20
    with pytest.raises(grpc.RpcError) as refused:
        forward(small_request(30 << 20), timeout=SECONDS).result()
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "31457280 bytes do not fit" in refused.value.details()
    in_place = forward(small_request(30 << 20, output=True), timeout=SECONDS)  # its reply has no rows
    assert until(lambda: held(service)[0] == 2)
    assert held(service)[2] < 31 << 20
    service.go.set()
    assert first.result() == in_place.result()
    assert until(lambda: held(service) == (0, 0, 0))


def test_replies_that_nobody_reads_hold_a_stream_whose_requests_are_small(
    serve: Callable[..., Service],
) -> None:
    service = serve(calls=256, unread_seconds=4.0)
    service.reply_bytes = 20 << 20
    stream = service.stream(small_request(20 << 20) for _ in range(100))
    assert until(lambda: service.read == 3)
    time.sleep(0.5)
    assert service.read == 3, "a fourth reply of 20 MiB would be more than 64 MiB"
    assert held(service)[2] == 60 << 20
    assert until(lambda: held(service) == (0, 0, 0))
    stream.cancel()


def test_a_reply_that_is_an_error_holds_no_more_than_its_own_bytes() -> None:
    """Or a request of no truth at all, with an error that nobody takes, would hold all that there is."""
    admission = Admission(DoorLimits(nbytes=1 << 20))
    calls = StreamCalls(admission, moe_pb2.ForwardRequest.FromString)
    list(calls.requests(iter([Unparsed(small_request(1 << 62))])))
    assert admission.held[2] == MAX_MESSAGE_BYTES, "its caller's word counts as far as a reply may go"
    reply = moe_pb2.ForwardStreamReply(job_id="j", error=moe_pb2.Error(code=3, message="no such region"))
    calls.answered(reply)
    assert admission.held[2] == reply.ByteSize()
    calls.taken(reply)
    assert admission.held[2] == 0


def test_answers_that_nobody_takes_are_held_and_then_left(serve: Callable[..., Service]) -> None:
    service = serve(calls=4, unread_seconds=3.0)
    service.answer = moe_pb2.ForwardReply(hidden=moe_pb2.Tensor(data=bytes(1 << 20)))
    service.go.set()
    raw = RawConnection(service.address, window=0)
    for _ in range(10):
        raw.ask("/moeserve.v1.LaneService/Forward", b"")
    assert until(lambda: held(service)[0] == 4)
    time.sleep(0.3)
    assert held(service)[0] == 4, "their answers are still here"
    assert service.healthy() == "SERVING"
    assert until(lambda: held(service) == (0, 0, 0))
    assert len(service.forward().result()) > 1 << 20
    raw.close()


def test_a_caller_that_leaves_gives_its_room_back(serve: Callable[..., Service]) -> None:
    service = serve(calls=2)
    calls = [service.forward() for _ in range(2)]
    assert until(lambda: held(service)[0] == 2)
    for call in calls:
        call.cancel()
    service.go.set()
    assert until(lambda: held(service) == (0, 0, 0))


def test_watchers_that_leave_while_health_changes_hold_up_nobody(serve: Callable[..., Service]) -> None:
    """gRPC's thread ends for ever where two threads send on one stream, or what it waits for waits for it."""
    for _ in range(3):
        service, enough = serve(), threading.Event()
        stub = health_pb2_grpc.HealthStub(service.channel)
        changing = threading.Thread(target=change_health, args=(service, enough), daemon=True)
        changing.start()
        for _ in range(50):
            watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=SECONDS)
            next(watch)
            watch.cancel()
        enough.set()
        changing.join(SECONDS)
        assert not changing.is_alive()
        found = stub.Check(health_pb2.HealthCheckRequest(), timeout=SECONDS)
        assert found.status == health_pb2.HealthCheckResponse.NOT_SERVING


def change_health(service: Service, enough: threading.Event) -> None:
    while not enough.is_set():
        service.endpoint.set_serving(serving=True)
        service.endpoint.set_serving(serving=False)


class FakeWatch:
    """A watch as gRPC has it: what is sent is there only when the thread that ends watches is free again."""

    def __init__(self, stays: bool = True) -> None:
        self.heard: list[int] = []
        self.ends: list[Callable[[], None]] = []
        self.taken, self.stuck, self._stays = threading.Event(), threading.Event(), stays

    def told(self, response: health_pb2.HealthCheckResponse) -> None:
        self.heard.append(response.status)
        if len(self.heard) == 2:
            self.stuck.set()
            self.taken.wait(SECONDS)

    def add_callback(self, callback: Callable[[], None]) -> bool:
        self.ends.append(callback)
        return self._stays

    def peer(self) -> str:
        return "ipv4:127.0.0.1:5"

    def cancel(self) -> None:
        self.taken.set()

    def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise RuntimeError(f"{code.name}: {details}")


def watched(given: Health, fake: FakeWatch) -> FakeWatch:
    given.watch(health_pb2.HealthCheckRequest(), fake, fake.told)
    until(lambda: bool(fake.heard))
    return fake


def test_a_watch_ends_while_its_watcher_is_being_told() -> None:
    given = Health(unread_seconds=SECONDS)
    given.tell("", health_pb2.HealthCheckResponse.SERVING)
    slow = watched(given, FakeWatch())
    begun = time.monotonic()
    for _ in range(100):
        given.tell("", health_pb2.HealthCheckResponse.NOT_SERVING)
        given.tell("", health_pb2.HealthCheckResponse.SERVING)
    given.tell("", health_pb2.HealthCheckResponse.NOT_SERVING)
    assert slow.stuck.wait(SECONDS) and time.monotonic() - begun < SECONDS / 2, "whoever tells does not wait"
    ending = threading.Thread(target=slow.ends[0], daemon=True)
    ending.start()
    ending.join(SECONDS / 2)
    assert not ending.is_alive()
    slow.taken.set()
    given.end()
    assert len(slow.heard) == 2, "and it is told nothing more"


def test_a_watcher_that_takes_nothing_is_left_and_the_others_are_told() -> None:
    given = Health(unread_seconds=0.2)
    given.tell("", health_pb2.HealthCheckResponse.SERVING)
    slow, quick = watched(given, FakeWatch()), watched(given, FakeWatch())
    quick.taken.set()
    given.tell("", health_pb2.HealthCheckResponse.NOT_SERVING)
    assert until(lambda: quick.heard[-1] == health_pb2.HealthCheckResponse.NOT_SERVING)
    assert until(slow.taken.is_set), "it was cancelled"
    given.end()


def test_watchers_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_servicer, "MOST_WATCHERS", 2)
    given = Health(unread_seconds=SECONDS)
    given.tell("", health_pb2.HealthCheckResponse.SERVING)
    for _ in range(3):  # who has left before it was let in counts no more
        given.watch(health_pb2.HealthCheckRequest(), FakeWatch(stays=False), lambda response: None)
    first, _ = watched(given, FakeWatch()), watched(given, FakeWatch())
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED: 2 watch health here already"):
        watched(given, FakeWatch())
    first.ends[0]()
    watched(given, FakeWatch())
    given.end()
