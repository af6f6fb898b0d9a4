"""What was answered is let go of at once, by reference counts alone: a step's output is large."""

from __future__ import annotations

import gc
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from moeserve.proto import moe_pb2
from moeserve.proto.tensors import encode, plain
from moeserve.runtime.control.stream import StreamClosed
from moeserve.runtime.doors.calls.rows import RowAdmission, RowLimits
from moeserve.runtime.doors.deadlines import waited_out
from moeserve.runtime.doors.failures import status_of
from moeserve.runtime.doors.lane_door import ASIDE_BYTES, ASIDE_THREADS, LaneDoor
from moeserve.runtime.doors.payloads import Payloads, Regions
from moeserve.runtime.doors.payloads.registration import Registrar
from moeserve.runtime.doors.request import CheckedRequest
from moeserve.runtime.errors import BatchTooLarge, GroupUnavailable, LaneFull
from moeserve.runtime.rank.lanes.lane import Lane
from moeserve.runtime.rank.lanes.lane_call import LaneBatch
from moeserve.runtime.rank.transfers.transfers import AHEAD_BYTES
from moeserve.runtime.step import Announcement, Job, Stamp

HIDDEN = 8


class Reader:
    """Takes every request as it is."""

    def __init__(self, payloads: Payloads) -> None:
        self._payloads = payloads

    def heavy(self, request: moe_pb2.ForwardRequest) -> bool:
        return request.attempt == 7

    def read(
        self,
        request: moe_pb2.ForwardRequest,
        deadline: float,
        data: memoryview | None,
        enter: Callable[[int], object],
    ) -> CheckedRequest:
        opened = self._payloads.open(request, data)
        enter(opened.hidden.shape[0])
        assert opened.experts is not None and opened.weights is not None
        batch = LaneBatch(request.layer, opened.hidden, opened.experts, opened.weights, deadline)
        return CheckedRequest(batch, opened)


class Context:
    """An RPC with a deadline of 0.2 s."""

    def peer(self) -> str:
        return "ipv4:127.0.0.1:5"

    def time_remaining(self) -> float:
        return 0.2

    def add_callback(self, act: Callable[[], None]) -> bool:
        return True

    def set_trailing_metadata(self, pairs: object) -> None: ...

    def abort(self, code: object, text: str) -> None:
        raise ConnectionAbortedError(text)


class Ranked:
    """A lane, its door, and steps that the test runs."""

    def __init__(self, regions: Regions, capacity: int = 4) -> None:
        self.announced: list[Announcement] = []
        self.lane = Lane(0, capacity, queue_limit=100)
        self.lane.announce = self.announce
        self.lane.open()
        self.began: list[str] = []  # the threads that calls began in
        reader: Any = Reader(Payloads(regions))
        self.regions = regions
        self.counted: list[tuple[object, ...]] = []  # calls that ended, as metrics count them
        self.door = LaneDoor(reader, self.lane, regions, lambda: 1, lambda *seen: self.counted.append(seen))

    def announce(self, job: Announcement) -> None:
        self.began.append(threading.current_thread().name)
        self.announced.append(job)

    def step(self) -> Callable[[], object]:
        """Runs all jobs; returns what says whether the step's output is still there."""
        named = tuple((job.job, job.rows) for job in self.announced)
        self.announced.clear()
        answer, at = torch.ones(sum(rows for _, rows in named), HIDDEN), 0
        for (_, rows), job in zip(named, self.lane.take(named), strict=True):
            if job is not None:
                job.finish(answer[at : at + rows], Stamp(1, 1))
            at += rows
        return weakref.ref(answer.untyped_storage())

    def named(self, rows: int, region: str) -> moe_pb2.ForwardRequest:
        """A request whose hidden states lie in `region`, and its answer after them."""
        made = self.request(rows, region)
        made.hidden.region.CopyFrom(made.output)
        made.output.offset = made.output.size
        return made

    def request(self, rows: int, output: str = "") -> moe_pb2.ForwardRequest:
        choice = moe_pb2.Choice(
            ids=encode(plain(torch.zeros(rows, 2, dtype=torch.int32), "x")),
            weights=encode(plain(torch.ones(rows, 2), "x")),
        )
        hidden = encode(plain(torch.ones(rows, HIDDEN), "x"))
        request = moe_pb2.ForwardRequest(job_id="a", hidden=hidden, choice=choice)
        if output:
            request.output.CopyFrom(moe_pb2.Region(name=output, offset=0, size=rows * HIDDEN * 4))
        return request


@pytest.fixture
def ranked() -> Iterator[Ranked]:
    regions = Regions()
    gc.collect()
    gc.disable()
    try:
        yield Ranked(regions)
    finally:
        gc.enable()
        regions.close()


def test_a_call_and_its_jobs_go_when_the_answer_was_read(ranked: Ranked) -> None:
    columns = torch.ones(10, HIDDEN), torch.zeros(10, 2, dtype=torch.int32), torch.ones(10, 2)
    call = ranked.lane.submit(LaneBatch(0, *columns))
    there = ranked.step()
    assert call.result()[0].shape == (10, HIDDEN)
    kept = weakref.ref(call), weakref.ref(call.jobs[0])
    del call
    assert [found() for found in kept] == [None, None] and there() is None


def test_a_call_that_was_given_up_goes_too(ranked: Ranked) -> None:
    columns = torch.ones(10, HIDDEN), torch.zeros(10, 2, dtype=torch.int32), torch.ones(10, 2)
    call = ranked.lane.submit(LaneBatch(0, *columns))
    call.give_up(RuntimeError("left"))
    ranked.step()
    kept = weakref.ref(call), weakref.ref(call.jobs[0])
    del call
    assert [found() for found in kept] == [None, None]


def test_a_clock_that_is_set_moves_no_deadline(ranked: Ranked, monkeypatch: pytest.MonkeyPatch) -> None:
    def announce(job: Announcement) -> None:
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + 3600)
        ranked.announced.append(job)
        threading.Timer(0.05, ranked.step).start()

    ranked.lane.announce = announce
    context: Any = Context()
    assert ranked.door.Forward(ranked.request(4), context).HasField("hidden")


@pytest.mark.parametrize("busy", [False, True])
def test_a_call_whose_time_is_over_is_told_so(ranked: Ranked, busy: bool) -> None:
    """Also where the lane holds as many rows as it may: there is no use in coming again."""
    context: Any = Context()
    context.time_remaining = lambda: -0.001
    ranked.door.admission = RowAdmission(RowLimits(rows=6))
    if busy:
        ranked.door.admission.enter("ipv4:127.0.0.1:6", 4, math.inf)
    with pytest.raises(ConnectionAbortedError, match="time was over before its rows were let in"):
        ranked.door.Forward(ranked.request(4), context)
    assert [seen[2] for seen in ranked.counted] == ["DEADLINE_EXCEEDED"]
    assert ranked.door.admission.rows == 4 * busy and not ranked.announced


def test_a_batch_that_no_lane_ever_takes_is_not_told_to_come_again(ranked: Ranked) -> None:
    rows = 4 * 100 + 1
    batch = LaneBatch(0, torch.ones(rows, 1), torch.zeros(rows, 2, dtype=torch.int32), torch.ones(rows, 2))
    with pytest.raises(BatchTooLarge, match="401 rows in one call, and lane 0 takes 100 x 4") as refused:
        ranked.lane.submit(batch)
    status = status_of(refused.value)
    assert (status.code, status.pushback) == ("INVALID_ARGUMENT", None)


def test_a_full_lane_is_told_to_be_left_alone_for_longer_each_time(ranked: Ranked) -> None:
    batch = LaneBatch(0, torch.ones(400, 1), torch.zeros(400, 2, dtype=torch.int32), torch.ones(400, 2))
    ranked.lane.submit(batch)
    told = []
    for _ in range(8):
        with pytest.raises(LaneFull) as refused:
            ranked.lane.submit(batch)
        told.append(refused.value.pushback)
    assert told[0] <= 0.05 and told[3] > told[0] and 1 <= told[-1] <= 2


def test_a_call_of_many_parts_finds_room_beside_few_others(ranked: Ranked) -> None:
    """It would not while there are any, and others come and go."""
    batch = LaneBatch(0, torch.ones(400, 1), torch.zeros(400, 2, dtype=torch.int32), torch.ones(400, 2))
    few = LaneBatch(0, torch.ones(4, 1), torch.zeros(4, 2, dtype=torch.int32), torch.ones(4, 2))
    for _ in range(7):
        ranked.lane.submit(few)
    call = ranked.lane.submit(batch)
    text = (
        "lane 0 has 107 parts of calls under way, and server.max_concurrent_calls is 100; a call has one for "
        r"every 4 rows \(step.lane_rows\)"
    )
    for refused in (few, batch):
        with pytest.raises(LaneFull, match=text):
            ranked.lane.submit(refused)
    ranked.step()
    assert call.ended and ranked.lane.in_flight == 0
    ranked.lane.submit(few)


def test_a_rank_without_its_coordinator_is_unavailable(ranked: Ranked) -> None:
    def announce(job: Announcement) -> None:
        raise StreamClosed("the other end closed the stream")

    ranked.lane.announce = announce
    replies: list[moe_pb2.ForwardStreamReply] = []
    assert ranked.door.begin(ranked.request(4), replies.append, "peer") is None
    assert (replies[0].error.code, replies[0].error.reason) == (14, "not_serving")
    assert ranked.lane.in_flight == 0


def test_a_call_that_ends_while_it_cannot_be_announced_ends_once(ranked: Ranked) -> None:
    def announce(job: Announcement) -> None:
        ranked.lane.close("the group forms again")
        raise StreamClosed("the other end closed the stream")

    ranked.lane.announce = announce
    replies: list[moe_pb2.ForwardStreamReply] = []
    call = ranked.door.begin(ranked.request(4), replies.append, "peer")
    assert call is not None and call.ended, "the call's own end is the one that is told"
    assert [reply.error.message for reply in replies] == ["the group forms again"]
    assert ranked.door.admission.rows == 0 and ranked.lane.in_flight == 0


def test_a_call_that_was_refused_is_told_of_no_end_of_its_jobs(ranked: Ranked) -> None:
    taken: list[Job] = []

    def announce(job: Announcement) -> None:
        taken.extend(found for found in ranked.lane.take(((job.job, job.rows),)) if found is not None)
        raise StreamClosed("the other end closed the stream")

    ranked.lane.announce = announce
    replies: list[moe_pb2.ForwardStreamReply] = []
    assert ranked.door.begin(ranked.request(4), replies.append, "peer") is None
    (job,) = taken
    job.finish(torch.ones(4, HIDDEN), Stamp(1, 1))  # a step had it
    assert len(replies) == 1 and ranked.door.admission.rows == 0


@pytest.mark.parametrize("over", [False, True], ids=["failed", "late"])
def test_a_unary_call_without_an_answer_goes_too(ranked: Ranked, over: bool) -> None:
    there: list[Callable[[], object]] = []

    def announce(job: Announcement) -> None:
        (found,) = ranked.lane.take(((job.job, job.rows),))
        assert found is not None
        there.append(weakref.ref(found.hidden))
        if not over:
            found.fail(GroupUnavailable("no"))

    ranked.lane.announce = announce
    context: Any = Context()
    with pytest.raises(ConnectionAbortedError, match="no answer within the deadline" if over else "^no$"):
        ranked.door.Forward(ranked.request(4), context)
    assert [found() for found in there] == [None] and ranked.lane.in_flight == 0


def test_an_idle_lease_keeps_no_answer(ranked: Ranked) -> None:
    name, _ = ranked.regions.create(4096)
    replies: list[bytes] = []
    leave = ranked.door.leases.take_packet(ranked.request(4, name).SerializeToString(), replies.append)
    there = ranked.step()
    assert moe_pb2.ForwardStreamReply.FromString(replies[0]).HasField("reply")
    assert there() is None
    leave()  # nothing is under way


def test_a_lease_that_ends_gives_up_the_call_under_way(ranked: Ranked) -> None:
    name, _ = ranked.regions.create(4096)
    replies: list[bytes] = []
    leave = ranked.door.leases.take_packet(ranked.request(4, name).SerializeToString(), replies.append)
    leave()
    assert moe_pb2.ForwardStreamReply.FromString(replies[0]).error.reason == "caller_left"
    assert ranked.lane.in_flight == 0


@pytest.mark.parametrize(
    "timeout_ms, code", [(30, "DEADLINE_EXCEEDED"), (60_000, "CANCELLED"), (0, "CANCELLED")]
)
def test_who_leaves_at_its_deadline_has_not_given_the_call_up(
    ranked: Ranked, timeout_ms: int, code: str
) -> None:
    """A client closes the lease, or the connection, of a call that is late, by its own clock: a millisecond
    before its deadline has passed here, or before anybody looks.
    """
    name, _ = ranked.regions.create(4096)
    request, replies = ranked.request(4, name), list[bytes]()
    request.timeout_ms = timeout_ms
    leave = ranked.door.leases.take_packet(request.SerializeToString(), replies.append)
    time.sleep(0.02)
    leave()
    assert [seen[2] for seen in ranked.counted] == [code]


def test_who_leaves_a_short_call_at_once_has_given_it_up() -> None:
    """As who asks two services, and takes the first answer: neither its errors nor its time say anything."""
    assert not waited_out(0.039, 0.04)
    assert waited_out(0.01, 0.04)
    assert waited_out(0.05, 4.0) and not waited_out(0.2, 4.0)


def replied(replies: list[bytes], count: int) -> list[moe_pb2.ForwardStreamReply]:
    """The first `count` replies, once they are there."""
    until = time.monotonic() + 5
    while len(replies) < count and time.monotonic() < until:
        time.sleep(0.001)
    return [moe_pb2.ForwardStreamReply.FromString(reply) for reply in replies]


def test_a_lease_has_one_call_under_way(ranked: Ranked) -> None:
    name, _ = ranked.regions.create(4096)
    replies: list[bytes] = []
    for job_id in "abc":
        request = ranked.request(4, name)
        request.job_id = job_id
        ranked.door.leases.take_packet(request.SerializeToString(), replies.append)
        assert ranked.lane.in_flight == 1, "the caller that sends another has left the one before"
    assert [(reply.job_id, reply.error.reason) for reply in replied(replies, 2)] == [
        ("a", "caller_left"),
        ("b", "caller_left"),
    ]
    ranked.announced[:] = ranked.announced[2:]
    ranked.step()
    assert replied(replies, 3)[2].HasField("reply") and replied(replies, 3)[2].job_id == "c"


def test_packets_of_a_lease_do_not_gather_while_its_call_waits_to_begin(ranked: Ranked) -> None:
    name, _ = ranked.regions.create(4096)
    go = threading.Event()
    for _ in range(ASIDE_THREADS):
        ranked.door._aside.submit(go.wait, 5)
    request = ranked.request(4, name)
    request.attempt = 7  # heavy
    replies: list[bytes] = []
    try:
        leave = [
            ranked.door.leases.take_packet(request.SerializeToString(), replies.append) for _ in range(100)
        ]
        bad = ranked.door.leases.take_packet(b"\xff", replies.append)
        assert ranked.door._aside._work_queue.qsize() == 1
    finally:
        go.set()
    told = replied(replies, 101)
    refused = [seen[:3] for seen in ranked.counted if seen[2] != "CANCELLED"]
    assert refused.count(("RegionCall", "shared_memory", "INVALID_ARGUMENT")) == 1
    assert refused.count(("RegionCall", "shared_memory", "RESOURCE_EXHAUSTED")) == 99
    reasons = [reply.error.reason for reply in told]
    assert reasons[:99] == ["overloaded"] * 99 and reasons[100:] == ["caller_left"]
    assert told[0].error.pushback_ms > 0 and told[99].error.code == 3
    assert bad == leave[0] == leave[-1], "the lease's end gives up the call that is under way"
    assert ranked.lane.in_flight == 0
    light = ranked.request(4, name).SerializeToString()
    ranked.door.leases.take_packet(light, replies.append)
    ranked.step()
    assert replied(replies, 102)[-1].HasField("reply"), "and the lease is free again"


class Driver:
    """A device with which any memory can be registered."""

    def register(self, address: int, nbytes: int) -> str:
        return ""

    def unregister(self, address: int) -> str:
        return ""


@pytest.mark.parametrize("registered", [False, True])
def test_rows_that_the_host_copies_hold_up_no_other_lease(registered: bool) -> None:
    """Large rows go to the device as a call begins; the host copies those whose region is not registered."""
    rows = AHEAD_BYTES // (4 * HIDDEN)
    regions = Regions(registrar=Registrar(Driver(), 2 * AHEAD_BYTES) if registered else None)
    try:
        ranked, replies = Ranked(regions, capacity=rows), []
        name, _ = regions.create(2 * AHEAD_BYTES)
        for ended, count in enumerate((rows, rows - 1), start=1):
            ranked.door.leases.take_packet(ranked.named(count, name).SerializeToString(), replies.append)
            until = time.monotonic() + 5
            while not ranked.announced and time.monotonic() < until:
                time.sleep(0.001)
            ranked.step()
            assert replied(replies, ended)[-1].HasField("reply")
        large, small = ranked.began
        assert large.startswith("aside") != registered
        assert small == threading.current_thread().name
    finally:
        regions.close()


@pytest.mark.parametrize("another", [False, True])
def test_a_large_answer_is_copied_aside_where_another_call_waits(another: bool) -> None:
    """To wake another thread takes longer than the copy, which nobody else waits for."""
    rows, regions, threads = ASIDE_BYTES // (4 * HIDDEN), Regions(), list[str]()
    try:
        ranked = Ranked(regions, capacity=rows)
        name, _ = regions.create(2 * ASIDE_BYTES)
        request = ranked.named(rows, name).SerializeToString()
        ranked.door.leases.take_packet(request, lambda reply: threads.append(threading.current_thread().name))
        until = time.monotonic() + 5
        while not ranked.announced and time.monotonic() < until:
            time.sleep(0.001)
        first, ranked.announced = ranked.announced, []
        if another:
            columns = torch.ones(1, HIDDEN), torch.zeros(1, 2, dtype=torch.int32), torch.ones(1, 2)
            ranked.lane.submit(LaneBatch(0, *columns))
        ranked.announced = first
        ranked.step()
        while not threads and time.monotonic() < until:
            time.sleep(0.001)
        assert len(threads) == 1 and threads[0].startswith("aside") == another
    finally:
        regions.close()


def test_a_large_call_that_fails_waits_behind_no_copy() -> None:
    """There is nothing to copy, and its lease's next packet is refused until it has ended."""
    rows, regions, go = ASIDE_BYTES // (4 * HIDDEN), Regions(on_device=True), threading.Event()
    try:
        ranked = Ranked(regions, capacity=rows)
        name, _ = regions.create(2 * ASIDE_BYTES)
        columns = torch.ones(1, HIDDEN), torch.zeros(1, 2, dtype=torch.int32), torch.ones(1, 2)
        ranked.lane.submit(LaneBatch(0, *columns))  # another call waits
        for _ in range(ASIDE_THREADS):
            ranked.door._aside.submit(go.wait, 5)  # others' answers are copied
        replies: list[bytes] = []
        packet = ranked.named(rows, name).SerializeToString()
        ranked.door.leases.take_packet(packet, replies.append)
        ranked.door.leases.take_packet(packet, replies.append)  # its caller has left the one before
        (told,) = replied(replies, 1)
        assert told.error.reason == "caller_left" and len(ranked.announced) == 3
    finally:
        go.set()
        regions.close()
