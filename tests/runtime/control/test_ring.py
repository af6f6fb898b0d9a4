"""Rings in shared memory: what is written comes, in order; an end, a torn frame and garbage are an end."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import mmap
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from moeserve.runtime.control import rings
from moeserve.runtime.control.frames import Message, encoded
from moeserve.runtime.control.ring import Descriptors, RingEnd, make_rings, supported
from moeserve.runtime.control.rings import RingOffers, ring_wish, spin_of, take_ring
from moeserve.runtime.control.stream import Stream, StreamClosed, StreamSilent

pytestmark = pytest.mark.skipif(not supported(), reason="rings need x86-64 Linux")

SECONDS = 10.0
NBYTES = 1 << 12


def pair(nbytes: int = NBYTES, spin: float = 0.0) -> tuple[Stream, Stream]:
    """Two streams over one socket pair, both moved to rings."""
    streams = [Stream(one) for one in socket.socketpair()]
    descriptors = make_rings(nbytes)
    theirs = descriptors.copied()
    for stream, own, first in zip(streams, (descriptors, theirs), (True, False), strict=True):
        stream.attach(RingEnd(own, stream.fileno(), first=first, spin=spin))
    for stream in streams:
        stream.move()
    return streams[0], streams[1]


@pytest.fixture
def ends() -> Iterator[tuple[Stream, Stream]]:
    one, other = pair()
    yield one, other
    one.close()
    other.close()


def in_thread(act: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("spin", [0.0, 20e-6])
def test_frames_of_all_sizes_come_in_order_and_wrap_around(spin: float) -> None:
    one, other = pair(spin=spin)
    numbers = random.Random(0)
    sizes = [numbers.choice((0, 1, 60, 1000, NBYTES - 100, NBYTES - 5)) for _ in range(500)]
    frames = [{"kind": "x", "at": at, "data": bytes([at % 256]) * size} for at, size in enumerate(sizes)]
    sender = in_thread(lambda: [one.send(frame) for frame in frames])
    assert [other.receive() for _ in frames] == frames
    sender.join(SECONDS)
    assert one.moved and other.moved
    one.close()
    other.close()


def test_a_frame_larger_than_the_ring_comes_piece_by_piece(ends: tuple[Stream, Stream]) -> None:
    one, other = ends
    large = {"kind": "x", "data": random.Random(1).randbytes(40 * NBYTES + 17)}
    sender = in_thread(lambda: [one.send(large), one.send({"kind": "y"})])
    assert other.receive() == large and other.receive() == {"kind": "y"}
    sender.join(SECONDS)


def test_raw_bytes_come_behind_the_message_that_announced_them(ends: tuple[Stream, Stream]) -> None:
    one, other = ends
    data = memoryview(bytearray(random.Random(2).randbytes(3 * NBYTES + 8))).cast("Q")
    sender = in_thread(lambda: [one.send({"kind": "x"}), one.send_bytes(data), one.send({"kind": "y"})])
    assert other.receive() == {"kind": "x"}
    into = bytearray(data.nbytes)
    other.receive_bytes(memoryview(into))
    assert into == data.tobytes() and other.receive() == {"kind": "y"}
    sender.join(SECONDS)


def test_writers_of_several_threads_do_not_mix_their_frames(ends: tuple[Stream, Stream]) -> None:
    one, other = ends

    def write(writer: int) -> None:
        for at in range(200):
            one.send({"kind": "x", "from": writer, "at": at, "data": bytes([writer]) * (at * 7 % 3000)})

    writers = [in_thread(lambda writer=writer: write(writer)) for writer in range(4)]  # type: ignore[misc]
    came: dict[int, list[int]] = {writer: [] for writer in range(4)}
    for _ in range(4 * 200):
        frame = other.receive()
        assert set(frame["data"]) <= {frame["from"]}
        came[frame["from"]].append(frame["at"])
    assert set(map(tuple, came.values())) == {tuple(range(200))}
    for thread in writers:
        thread.join(SECONDS)


def test_what_was_sent_over_the_socket_comes_before_what_came_over_the_ring() -> None:
    streams = [Stream(one) for one in socket.socketpair()]
    descriptors = make_rings(NBYTES)
    theirs = descriptors.copied()
    streams[0].attach(RingEnd(descriptors, streams[0].fileno(), first=True))
    streams[1].attach(RingEnd(theirs, streams[1].fileno(), first=False))
    for at in range(5):
        streams[0].send({"kind": "x", "at": at})
    streams[0].move()
    for at in range(5, 9):
        streams[0].send({"kind": "x", "at": at})
    assert [streams[1].receive()["at"] for _ in range(9)] == list(range(9))
    streams[1].send({"kind": "y"})  # the other direction stays on the socket until its sender moves
    assert streams[0].receive() == {"kind": "y"}
    for stream in streams:
        stream.close()


def test_an_end_that_closes_is_seen_after_what_it_sent(ends: tuple[Stream, Stream]) -> None:
    one, other = ends
    one.send({"kind": "stop"})
    one.close()
    assert other.receive() == {"kind": "stop"}
    with pytest.raises(StreamClosed):
        other.receive()
    with pytest.raises(StreamClosed):
        one.send({"kind": "x"})


def test_a_thread_that_receives_ends_when_its_own_end_is_closed(ends: tuple[Stream, Stream]) -> None:
    caught: list[Exception] = []

    def receive() -> None:
        try:
            ends[0].receive()
        except StreamClosed as closed:
            caught.append(closed)

    thread = in_thread(receive)
    time.sleep(0.05)
    ends[0].close()
    thread.join(SECONDS)
    assert len(caught) == 1


def test_a_reader_that_stops_is_given_up_within_the_bound(ends: tuple[Stream, Stream]) -> None:
    one, _ = ends
    one.bound_sends(0.3)
    started = time.monotonic()
    with pytest.raises(StreamSilent, match=r"nothing of what is sent to it for 0\.3 s"):
        for _ in range(1000):
            one.send({"kind": "x", "data": bytes(1000)})
    assert 0.25 < time.monotonic() - started < 5.0


def test_a_reader_that_is_slow_is_not_given_up(ends: tuple[Stream, Stream]) -> None:
    one, other = ends
    one.bound_sends(2.0)
    one.send({"kind": "x"})
    assert other.receive() == {"kind": "x"}
    large = {"kind": "x", "data": bytes(3 * NBYTES)}
    sender = in_thread(lambda: one.send(large))
    into = bytearray(len(encoded(large)))
    for at in range(0, len(into), 512):  # takes 2.4 s in all, and never 2 s for a byte
        time.sleep(0.1)
        other.receive_bytes(memoryview(into)[at : at + 512])
    sender.join(SECONDS)
    assert into == encoded(large)


def test_a_writer_that_waits_for_room_sees_that_the_other_end_is_gone(ends: tuple[Stream, Stream]) -> None:
    one, other = ends
    threading.Timer(0.1, other.close).start()
    with pytest.raises(StreamClosed) as caught:
        for _ in range(1000):
            one.send({"kind": "x", "data": bytes(1000)})
    assert not isinstance(caught.value, StreamSilent)


GARBAGE = {
    "more than the ring holds": lambda counters: counters.__setitem__(0, 2 * NBYTES),
    "a counter that goes back": lambda counters: counters.__setitem__(0, 0),
    "a counter of all ones": lambda counters: counters.__setitem__(0, (1 << 64) - 1),
}


@pytest.mark.parametrize("spoil", GARBAGE.values(), ids=GARBAGE)
def test_counters_that_cannot_be_end_the_stream(
    ends: tuple[Stream, Stream], spoil: Callable[[memoryview], None]
) -> None:
    one, other = ends
    one.send({"kind": "x"})
    assert other.receive() == {"kind": "x"}
    assert one._ring is not None
    spoil(one._ring._out_counters)
    os.eventfd_write(one._ring._other, 1)
    with pytest.raises(StreamClosed, match="bytes are in a ring of 4096"):
        other.receive()


@pytest.mark.parametrize("count", [1 << 40, (1 << 64) - 1])
def test_a_reader_that_says_it_read_what_was_not_there_ends_the_stream(
    ends: tuple[Stream, Stream], count: int
) -> None:
    one, other = ends
    assert other._ring is not None
    other._ring._in_counters[8] = count
    with pytest.raises(StreamClosed, match="it has read"):
        one.send({"kind": "x"})


def test_bytes_that_are_no_frame_end_the_stream() -> None:
    for seed in range(50):
        one, other = pair()
        assert one._ring is not None
        one._ring.write(random.Random(seed).randbytes(200), 1.0)
        one.close()
        with pytest.raises(StreamClosed):
            other.receive()
        other.close()


def test_an_end_that_moves_without_a_ring_or_twice_is_turned_away(ends: tuple[Stream, Stream]) -> None:
    plain, other = (Stream(one) for one in socket.socketpair())
    plain.send({"kind": "moved"})
    with pytest.raises(StreamClosed, match="not offered"):
        other.receive()
    ends[0].send({"kind": "moved"})
    with pytest.raises(StreamClosed, match="not offered"):
        ends[1].receive()
    plain.close()
    other.close()


KILLED = """
import os, socket, sys
from moeserve.runtime.control.ring import Descriptors, RingEnd
from moeserve.runtime.control.stream import Stream
connection, *found = map(int, sys.argv[1:5])
stream = Stream(socket.socket(fileno=connection))
stream.attach(RingEnd(Descriptors(*found), connection, first=False))
stream.move()
stream.send({"kind": "ready"})
print(flush=True)
if sys.argv[5] == "small":
    class Killed:  # the bytes are there, and the counter is not written yet
        def __init__(self, counters):
            self.counters = counters
        def __getitem__(self, at):
            return self.counters[at]
        def __setitem__(self, at, count):
            os.kill(os.getpid(), 9)
    stream._ring._out_counters = Killed(stream._ring._out_counters)
    stream.send({"kind": "torn", "data": bytes(100)})
while True:
    stream.send({"kind": "torn", "data": bytes(1 << 20)})  # larger than the ring: waits for room
"""


@pytest.mark.parametrize("frame", ["small", "large"])
def test_a_process_that_is_killed_while_it_writes_leaves_no_frame(frame: str) -> None:
    ours, theirs = socket.socketpair()
    stream, descriptors = Stream(ours), make_rings(NBYTES)
    other = descriptors.copied()
    stream.attach(RingEnd(descriptors, stream.fileno(), first=True))
    arguments = [str(one) for one in (theirs.fileno(), *other)]
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, *arguments, frame],
        pass_fds=(theirs.fileno(), *other),
        stdout=subprocess.PIPE,
    )
    theirs.close()
    other.close()
    try:
        assert child.stdout is not None and child.stdout.readline()
        assert stream.receive() == {"kind": "ready"}
        if frame == "large":
            time.sleep(0.1)
            os.kill(child.pid, signal.SIGKILL)
        with pytest.raises(StreamClosed, match="closed the stream"):
            stream.receive()
    finally:
        child.kill()
        child.wait(SECONDS)
        stream.close()


def test_memory_that_could_be_cut_off_is_no_ring() -> None:
    descriptors = make_rings(NBYTES)
    with pytest.raises(PermissionError):
        os.ftruncate(descriptors.memory, mmap.PAGESIZE)
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, os.fstat(descriptors.memory).st_size)
    one, other = socket.socketpair()
    with pytest.raises(ValueError, match="not sealed"):
        RingEnd(Descriptors(unsealed, *descriptors[1:]), one.fileno(), first=False)
    os.ftruncate(unsealed, 100)
    fcntl.fcntl(unsealed, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    with pytest.raises(ValueError, match="no pair of rings"):
        RingEnd(Descriptors(unsealed, *descriptors[1:]), one.fileno(), first=False)
    os.close(unsealed)
    descriptors.close()
    one.close()
    other.close()


@pytest.mark.parametrize("nbytes", [0, 4095, 6000])
def test_rings_of_other_sizes_are_refused(nbytes: int) -> None:
    with pytest.raises(ValueError, match=f"a ring of {nbytes} bytes"):
        make_rings(nbytes)


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def left_open() -> int:
    """Descriptors that five pairs have left open in this process."""
    gc.collect()
    before = open_descriptors()
    for _ in range(5):
        one, other = pair()
        one.send({"kind": "x"})
        other.receive()
        one.close()
        other.close()
    del one, other
    gc.collect()
    return open_descriptors() - before


def test_nothing_is_left_open() -> None:
    """In a process of its own: threads of other tests open descriptors in this one meanwhile."""
    code = "import runpy, sys; print(runpy.run_path(sys.argv[1])['left_open']())"
    done = subprocess.run(
        [sys.executable, "-c", code, __file__], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "0"), done.stderr


def offered(take: bool = True) -> tuple[RingOffers, Stream, Stream, threading.Thread, list[Message]]:
    """Offers, the head's stream, the rank's, whose thread receives into the list."""
    offers = RingOffers(NBYTES, 0.0)
    head, rank = (Stream(one) for one in socket.socketpair())
    if take:
        rank.take_ring = lambda offer, stream: take_ring(offer, stream, 0.0)
    came: list[Message] = []

    def receive() -> None:
        try:
            while True:
                came.append(rank.receive())
        except StreamClosed:
            return

    return offers, head, rank, in_thread(receive), came


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_head_and_a_rank_move_to_the_rings_that_the_head_offers() -> None:
    offers, head, rank, thread, came = offered()
    head.send({"kind": "x", "at": 0})
    offers.offer(head)
    head.send({"kind": "x", "at": 1})
    until(lambda: rank.moved)
    assert not head.moved, "it moves when it hears that the rank has"
    sender = in_thread(lambda: rank.send({"kind": "y", "data": bytes(1 << 20)}))
    assert head.receive() == {"kind": "y", "data": bytes(1 << 20)}
    assert head.moved
    sender.join(SECONDS)
    head.send({"kind": "x", "at": 2})
    until(lambda: len(came) == 3)
    assert [one["at"] for one in came] == [0, 1, 2]
    head.close()
    thread.join(SECONDS)
    assert not thread.is_alive()
    rank.close()
    offers.close()


def test_a_rank_that_cannot_fetch_its_ring_stays_where_it_is() -> None:
    offers, head, rank, thread, came = offered()
    offers.close()  # nobody listens there any more
    with closing(head), closing(rank):
        offers.offer(head)
        head.send({"kind": "x"})
        until(lambda: bool(came))
        rank.send({"kind": "y"})
        assert head.receive() == {"kind": "y"}
        assert not head.moved and not rank.moved
    thread.join(SECONDS)


def test_a_ring_is_given_to_who_knows_its_name_alone(caplog: pytest.LogCaptureFixture) -> None:
    offers, head, rank, _, came = offered(take=False)
    offers.offer(head)
    until(lambda: bool(came))
    offer = came[0]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
        asking.settimeout(SECONDS)
        asking.connect(offer["socket"])
        asking.send(b"another name")
        assert asking.recv(16) == b""
    assert "none has the name" in caplog.text
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
        asking.settimeout(SECONDS)
        asking.connect(offer["socket"])
        asking.send(offer["name"].encode())
        _, found, _, _ = socket.recv_fds(asking, 16, 3)
        assert len(found) == 3
        for descriptor in found:
            os.close(descriptor)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
        asking.settimeout(SECONDS)
        asking.connect(offer["socket"])
        asking.send(offer["name"].encode())
        assert asking.recv(16) == b"", "once"
    head.close()
    rank.close()
    offers.close()
    assert not Path(offer["socket"]).exists()


def test_an_offer_ends_with_its_stream() -> None:
    offers, head, rank, thread, _ = offered(take=False)
    offers.offer(head)
    before = open_descriptors()
    head.close()
    thread.join(SECONDS)
    rank.close()
    assert open_descriptors() <= before - 3 and not offers._offered
    offers.close()


def test_an_offer_to_a_stream_that_has_ended_leaves_nothing_open() -> None:
    offers, head, rank, thread, _ = offered(take=False)
    rank.close()
    thread.join(SECONDS)
    gc.collect()
    before = open_descriptors()
    with contextlib.suppress(StreamClosed), closing(head):
        offers.offer(head)
        while True:
            head.receive()
    del head
    gc.collect()
    assert open_descriptors() < before and not offers._offered
    offers.close()


def until_it_ends(act: Callable[[], object], ended: list[BaseException]) -> None:
    """Repeats `act`, and keeps what it raises."""
    try:
        while True:
            act()
    except Exception as error:
        ended.append(error)


def test_garbage_in_all_of_the_memory_ends_both_directions_and_nothing_else() -> None:
    for seed in range(20):
        random_ = random.Random(seed)
        one, other = pair()
        other.bound_sends(0.3)
        ended: list[BaseException] = []
        threads = [
            in_thread(partial(until_it_ends, other.receive, ended)),
            in_thread(partial(until_it_ends, partial(other.send, {"kind": "x"}), ended)),
        ]
        assert one._ring is not None
        places = [(one._ring._out_counters, 0), (one._ring._in_counters, 8), (one._ring._in_counters, 0)]
        for _ in range(30):
            counters, at = random_.choice(places)
            counters[at] = random_.choice((random_.randrange(1 << 64), random_.randrange(2 * NBYTES)))
            one._ring._out[random_.randrange(NBYTES)] = random_.randrange(256)
            os.eventfd_write(one._ring._other, 1)
        one.close()
        for thread in threads:
            thread.join(SECONDS)
        assert [type(error) in (StreamClosed, StreamSilent) for error in ended] == [True, True]
        other.close()


def test_who_wishes_for_no_ring_gets_none() -> None:
    assert ring_wish(0) == {} and ring_wish(1 << 18) == {"ring": 1 << 18}


@pytest.mark.parametrize(
    ("cores", "ranks", "spins"), [(4, 1, True), (3, 1, False), (18, 8, True), (16, 8, False)]
)
def test_readers_spin_where_there_are_cores_for_it(
    cores: int, ranks: int, spins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    assert spin_of(5e-6, ranks) == (5e-6 if spins else 0.0)


@pytest.mark.parametrize("nbytes", [NBYTES, 3 * NBYTES])
def test_a_ring_that_is_read_while_its_writer_looks_is_written(
    nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader takes all that is there between two looks of the writer, and then waits for more."""
    descriptors, connections = make_rings(NBYTES), socket.socketpair()
    theirs = descriptors.copied()
    writer = RingEnd(descriptors, connections[0].fileno(), first=True)
    reader = RingEnd(theirs, connections[1].fileno(), first=False)
    writer.write(bytes(NBYTES), 1.0)
    looked, look = threading.Event(), writer._free

    def read_once() -> int:
        free = look()
        if not looked.is_set():
            looked.set()
            assert len(reader.read(NBYTES)) == NBYTES
        return free

    monkeypatch.setattr(writer, "_free", read_once)
    reading = in_thread(lambda: looked.wait(SECONDS) and reader.read(nbytes))
    writer.write(bytes(nbytes), 2.0)
    reading.join(SECONDS)
    assert not reading.is_alive()
    for end in (writer, reader):
        end.close()
    for one in connections:
        one.close()


def test_a_rank_that_cannot_map_its_ring_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the descriptors already: the head moves only when the rank has."""

    def no_memory(*given: object, **more: object) -> RingEnd:
        raise OSError(12, "Cannot allocate memory")

    offers, head, rank, thread, came = offered(take=False)
    tried = threading.Event()

    def take(offer: Message, stream: Stream) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(rings, "RingEnd", no_memory)
            take_ring(offer, stream, 0.0)
        tried.set()

    rank.take_ring = take
    with closing(head), closing(rank), closing(offers):
        offers.offer(head)
        assert tried.wait(SECONDS)
        time.sleep(0.1)
        for at in range(3):
            head.send({"kind": "x", "at": at})
        until(lambda: len(came) == 3)
        rank.send({"kind": "y"})
        assert head.receive() == {"kind": "y"}
        assert not head.moved and not rank.moved
    thread.join(SECONDS)


def test_steps_are_taken_and_all_else_is_left_to_who_receives(ends: tuple[Stream, Stream]) -> None:
    one, other = ends
    one.send({"kind": "x"})  # that the other end moved comes over the socket
    assert other.receive() == {"kind": "x"} and other.followed
    started = time.monotonic()
    assert other.take(("step",), 0.05) is None and not other.waits
    assert 0.04 < time.monotonic() - started < SECONDS
    for at in range(3):
        one.send({"kind": "step", "at": at})
    one.send({"kind": "abort"})
    one.send({"kind": "step", "at": 3})
    assert [other.take(("step",), SECONDS) for _ in range(3)] == [
        {"kind": "step", "at": at} for at in range(3)
    ]
    for _ in range(2):  # nothing comes before what was left
        assert other.take(("step",), SECONDS) is None and other.waits
    assert other.receive() == {"kind": "abort"}
    assert other.take(("step",), SECONDS) == {"kind": "step", "at": 3}


def test_a_step_that_comes_while_it_is_waited_for_is_taken(ends: tuple[Stream, Stream]) -> None:
    one, other = ends
    one.send({"kind": "x"})
    other.receive()
    threading.Timer(0.1, lambda: one.send({"kind": "step"})).start()
    assert other.take(("step",), SECONDS) == {"kind": "step"}


@pytest.mark.parametrize("how", ["other end", "own end", "garbage"])
def test_an_end_is_left_to_who_receives(ends: tuple[Stream, Stream], how: str) -> None:
    one, other = ends
    one.send({"kind": "x"})
    other.receive()
    act = {"other end": one.close, "own end": other.close, "garbage": lambda: one.send_bytes(b"\x01\0\0\0x")}[
        how
    ]
    threading.Timer(0.05, act).start()
    started = time.monotonic()
    assert other.take(("step",), SECONDS) is None and other.waits
    assert other.take(("step",), SECONDS) is None
    assert time.monotonic() - started < SECONDS / 2
    with pytest.raises(StreamClosed):
        other.receive()


def test_nothing_is_taken_from_a_socket() -> None:
    streams = [Stream(one) for one in socket.socketpair()]
    streams[0].send({"kind": "step"})
    assert streams[1].take(("step",), SECONDS) is None and streams[1].waits and not streams[1].followed
    assert streams[1].receive() == {"kind": "step"}
    for stream in streams:
        stream.close()


def test_a_reader_that_spins_lets_other_threads_run() -> None:
    """It gives the interpreter up between two looks: before, others had to wrest it from it at each turn."""
    one, other = pair(spin=0.5)
    one.send({"kind": "x"})
    other.receive()
    turns, ended = [0], threading.Event()

    def run() -> None:
        while not ended.is_set():
            time.sleep(0)
            turns[0] += 1

    before = sys.getswitchinterval()
    sys.setswitchinterval(0.2)  # nobody is made to give it up meanwhile
    thread = in_thread(run)
    try:
        assert other.take(("step",), 0.4) is None
    finally:
        sys.setswitchinterval(before)
        ended.set()
        thread.join(SECONDS)
    assert turns[0] > 50
    one.close()
    other.close()
