"""What may be held for long: a few callers leave places to others, and calls without a message threads."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator

import grpc
import pytest
from door_service import SECONDS, Service, held, request, silent, until

from moeserve.proto import moe_pb2
from moeserve.proto.errors import REASON_KEY
from moeserve.runtime.doors.calls.admission import Admission, DoorLimits
from moeserve.runtime.doors.calls.callers import FirstMessages, Places
from moeserve.runtime.doors.calls.calling import QUESTIONS
from moeserve.runtime.errors import LaneFull


def filled(places: Places, peer: str, limit: int) -> int:
    """How many a caller has that takes all it may have."""
    count = 0
    while not places.why_not(peer, limit, "places are taken"):
        places.take(peer)
        count += 1
    return count


def test_a_few_callers_leave_places_to_others_though_nobody_lets_go() -> None:
    places = Places()
    assert filled(places, "ipv4:10.0.0.1:1", 256) == 196, "of seven eighths that its host may have"
    assert filled(places, "ipv4:10.0.0.1:2", 256) == 25, "and seven eighths of what it left"
    assert "196 of this host and 0 of other hosts" in places.why_not("ipv4:10.0.0.1:2", 256, "are taken")
    assert filled(places, "ipv4:10.0.0.2:1", 256) > 25 and filled(places, "ipv6:[fd00::1]:1", 256) > 5
    assert not places.why_not("ipv4:10.0.0.3:1", len(places) + 1, "are taken"), "who has none has the last"
    for _ in range(196):
        places.give("ipv4:10.0.0.1:1")
    assert filled(places, "ipv4:10.0.0.2:2", 256) > 60 and len(places) < 256
    assert Places(["a", "a", "b"])._by_peer == {"a": 2, "b": 1}


def test_hosts_that_want_more_come_to_have_even_shares() -> None:
    places = Places()
    hosts = [f"ipv4:10.0.0.{host}:1" for host in range(4)]
    for _ in range(300):
        for host in hosts:
            filled(places, host, 256)
            places.give(host)
    has = [places._by_peer[host] for host in hosts]
    assert max(has) - min(has) <= 6 and sum(has) > 200


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_a_few_places_are_all_given(limit: int) -> None:
    places = Places()
    assert filled(places, "ipv4:10.0.0.1:1", limit) == min(limit, 3)
    assert (
        places.why_not("ipv4:10.0.0.2:1", limit, "are taken") == f"{limit} are taken, as many as there may be"
    )


def test_silent_streams_of_one_caller_leave_others_theirs(serve: Callable[..., Service]) -> None:
    service, ends = serve(calls=4, streams=8), threading.Event()
    streams = [service.stream(silent(ends)) for _ in range(20)]
    assert until(lambda: sum(stream.done() for stream in streams) == 13)
    over = next(stream for stream in streams if stream.done())
    assert "7 streams are open for this connection, which may have 7 of 8" in over.details()
    assert "server.max_streams" in over.details()
    with grpc.insecure_channel(service.address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        stream = channel.stream_stream("/moeserve.v1.LaneService/ForwardStream")
        (reply,) = stream(iter([moe_pb2.ForwardRequest(job_id="a").SerializeToString()]), timeout=SECONDS)
        assert moe_pb2.ForwardStreamReply.FromString(reply).job_id == "a"
    ends.set()
    assert until(lambda: held(service) == (0, 0, 0))


@pytest.mark.parametrize("path", ["/moeserve.v1.LaneService/ListRegions", "/grpc.health.v1.Health/Check"])
def test_questions_without_a_message_leave_others_their_threads(
    serve: Callable[..., Service], path: str
) -> None:
    """They come with their message: who has sent none after a second is left where threads are wanted."""
    service, ends = serve(calls=4, request_seconds=SECONDS), threading.Event()
    ask = service.channel.stream_unary(path)
    calls = [ask.future(silent(ends)) for _ in range(4 * QUESTIONS)]
    assert service.healthy() == "SERVING" and service.list() == b""
    assert until(lambda: sum(call.done() for call in calls) >= 3 * QUESTIONS)
    assert {call.code() for call in calls if call.done()} == {grpc.StatusCode.CANCELLED}
    for call in calls:
        call.cancel()
    ends.set()


def test_calls_without_a_message_leave_others_their_threads(serve: Callable[..., Service]) -> None:
    service, ends = serve(calls=4, request_seconds=SECONDS), threading.Event()
    service.go.set()
    forward = service.channel.stream_unary("/moeserve.v1.LaneService/Forward")
    calls = [forward.future(silent(ends)) for _ in range(40)]  # more than there are threads
    assert until(lambda: sum(call.done() for call in calls) == 24)
    over = next(call for call in calls if call.done())
    assert over.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert dict(over.trailing_metadata())[REASON_KEY] == "overloaded"
    assert "16 calls wait for their message for this connection" in over.details()
    with grpc.insecure_channel(service.address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        assert service.forward(1024, channel).result() == service.answer.SerializeToString()
    for call in calls:
        call.cancel()
    ends.set()
    assert until(lambda: held(service) == (0, 0, 0))


def test_late_small_messages_are_left_while_there_are_more_than_may_wait_and_large_ones_are_not() -> None:
    small = FirstMessages(2, small=True)
    entries = [small.begin(f"ipv4:10.0.0.{at}:1") for at in range(3)]
    assert all(small.late(entry) for entry in entries), "threads are wanted"
    small.over(entries[0])
    assert not any(small.late(entry) for entry in entries), "nobody else needs theirs"
    for entry in entries[1:]:
        small.over(entry)
    assert len(small._places) == len(small._waiting) == 0
    large = FirstMessages(16, small=False)
    entries = [large.begin("ipv4:10.0.0.1:1") for _ in range(13)]
    with pytest.raises(LaneFull, match=r"13 calls wait .* may have 13 of 16.* send it with the call"):
        large.begin("ipv4:10.0.0.1:1")
    large.begin("ipv4:10.0.0.2:1")
    large.over(entries[0])
    large.begin("ipv4:10.0.0.1:1")


def test_a_burst_of_questions_is_answered_whole(serve: Callable[..., Service]) -> None:
    """Their messages are read one after the other, while some threads wait."""
    service = serve(calls=4, request_seconds=SECONDS)
    ask = service.channel.unary_unary("/moeserve.v1.LaneService/ListRegions")
    calls = [ask.future(b"", timeout=SECONDS) for _ in range(20 * QUESTIONS)]
    assert [call.result() for call in calls] == [b""] * len(calls)


def test_a_stream_that_ends_while_a_reply_is_taken_leaves_no_deadline_for_it(
    serve: Callable[..., Service],
) -> None:
    """Or a caller who took all of them would be logged as one who takes none."""
    service = serve(calls=4, unread_seconds=6 * SECONDS)
    late = service.endpoint._calling._late
    for _ in range(10):
        asked = threading.Event()

        def requests(asked: threading.Event = asked) -> Iterator[bytes]:
            yield request(64).SerializeToString()
            asked.wait(SECONDS)

        stream = service.stream(requests())
        next(stream)
        stream.cancel()
        asked.set()
    assert until(lambda: not late._watched)


def test_a_stream_is_let_in_by_its_caller() -> None:
    admission = Admission(DoorLimits(streams=16))
    ends = [admission.open_stream("ipv4:10.0.0.1:1") for _ in range(13)]
    with pytest.raises(LaneFull, match=r"13 streams are open for this connection"):
        admission.open_stream("ipv4:10.0.0.1:1")
    ends += [admission.open_stream(f"ipv4:10.0.0.{host}:1") for host in (2, 3, 4)]
    assert admission.held == (0, 16, 0)
    with pytest.raises(
        LaneFull, match=r"16 streams are open, as many as there may be \(server.max_streams\)"
    ):
        admission.open_stream("ipv4:10.0.0.5:1")
    for end in ends:
        end()
    assert admission.held == (0, 0, 0) and Counter(admission._streams._by_host) == {}
