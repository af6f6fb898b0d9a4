"""Data connections of a door without a rank: who is let in, what is refused, and who is left."""

from __future__ import annotations

import logging
import mmap
import os
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from data_doors import MOST, SECONDS, Door, Encryption, job, rows, until
from made_certificates import Authority

from moeserve.proto import moe_pb2
from moeserve.proto.credentials import Credentials
from moeserve.proto.errors import DeadlineExceeded, InvalidArgument, Overloaded, Unavailable
from moeserve.proto.transports import awake
from moeserve.proto.transports import data_connections as ends
from moeserve.proto.transports.carried import Carried
from moeserve.proto.transports.data_connections import SECRET_BYTES, DataConnection
from moeserve.proto.transports.frames import HEADER, MAGIC
from moeserve.proto.transports.kept import OPEN_SECONDS
from moeserve.runtime.doors.calls import data_connection as server
from moeserve.runtime.doors.calls.admission import Admission, DoorLimits
from moeserve.runtime.doors.calls.data_connections import DataConnections
from moeserve.runtime.doors.failures import status_of
from moeserve.runtime.doors.operations import BadRequest
from moeserve.runtime.errors import LaneFull


class Echo:
    """Stands for the lane of a connection: it answers with the rows, at once or after a while."""

    held = takes = True
    after = 0.0

    def __init__(self, *of: object) -> None:
        self.memory = bytearray()

    def room(self, request: moe_pb2.ForwardRequest, nbytes: int) -> memoryview:
        self.memory = bytearray(nbytes)
        return memoryview(self.memory)

    def answered(
        self, request: moe_pb2.ForwardRequest, there: Callable[[], bool]
    ) -> moe_pb2.ForwardReply | None:
        time.sleep(self.after)
        return moe_pb2.ForwardReply(epoch=7)

    def answer(self) -> memoryview:
        return memoryview(self.memory)

    def close(self) -> None:
        """Nothing is attached."""


NOW = Encryption.none()
"""That of the test that runs."""


@pytest.fixture(autouse=True, params=["plain", "tls"])
def encryption(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "tls":
        made = Encryption.tls(tmp_path)
        monkeypatch.setattr(NOW, "keys", made.keys)
        monkeypatch.setattr(NOW, "trusts", made.trusts)


@pytest.fixture
def door() -> Door:
    return Door()


@pytest.fixture
def admission() -> Admission:
    return Admission(
        DoorLimits(calls=2, streams=3, nbytes=4 * MOST, request_seconds=SECONDS, unread_seconds=SECONDS)
    )


@pytest.fixture
def there(door: Door, admission: Admission) -> Iterator[DataConnections]:
    made = DataConnections(
        "127.0.0.1",
        door,  # type: ignore[arg-type]
        door.regions,
        admission,
        MOST,
        keys=NOW.keys,
        observe=lambda *told: door.refused.append(told[:3]),
    )
    yield made
    made.close()
    assert until(lambda: not door.regions.list() and not door.regions.bytes), "no region is kept"
    door.regions.close()
    assert until(lambda: admission.held == (0, 0, 0)) and not made._there, "nothing stays taken"


@pytest.fixture
def connection(there: DataConnections) -> Iterator[DataConnection]:
    made = opened(there)
    yield made
    made.close()


def opened(there: DataConnections) -> DataConnection:
    return DataConnection.open("127.0.0.1", there.offer("ipv4:1.2.3.4:5"), 5.0, NOW.trusts)


def raw(there: DataConnections) -> socket.socket:
    """A connection that is let in, and keeps to no form."""
    made = NOW.wrapped(socket.create_connection(("127.0.0.1", there.port), 5.0))
    made.sendall(there.offer("ipv4:1.2.3.4:5").secret)
    assert made.recv(1) == b"+"
    return made


@pytest.mark.parametrize("count", [1, 100, (1 << 16) - 60, 1 << 16, 300_000, MOST - 100])
def test_a_call_is_answered_with_data_of_any_size(connection: DataConnection, door: Door, count: int) -> None:
    for turn in range(3):
        connection.send(rows(count), 5.0)
        answer = np.random.default_rng(turn).integers(0, 255, count, np.uint8)
        door.reply(answer.tobytes(), reply=moe_pb2.ForwardReply(epoch=turn + 1))
        reply = connection.receive(0.001 * turn)
        assert isinstance(reply, Carried) and reply.message.epoch == turn + 1
        assert reply.data is not None and bytes(reply.data) == answer.tobytes()
        assert reply.message.hidden.WhichOneof("payload") == "data"
        (asked, _, peer) = door.asked[-1]
        assert peer == "ipv4:1.2.3.4:5" and door.rows() == np.arange(count, dtype=np.uint8).tobytes()
        assert asked.timeout_ms == 5000


def test_messages_without_data_and_errors_come_home(connection: DataConnection, door: Door) -> None:
    connection.send(job(layer=3), 5.0)
    door.reply(reply=moe_pb2.ForwardReply(epoch=7))
    reply = connection.receive()
    assert isinstance(reply, moe_pb2.ForwardReply) and reply.epoch == 7
    connection.send(job("b"), 5.0)
    door.reply(error=moe_pb2.Error(code=3, reason="bad_tensor", message="hidden: no"))
    with pytest.raises(InvalidArgument, match=r"INVALID_ARGUMENT \(bad_tensor\): hidden: no"):
        connection.receive()
    door.at_once = moe_pb2.ForwardStreamReply(reply=moe_pb2.ForwardReply(epoch=9))
    connection.send(job("c"), 5.0)
    assert connection.receive().epoch == 9 and connection.fresh  # type: ignore[union-attr]


def test_a_secret_lets_in_one_connection_and_not_for_long(
    there: DataConnections, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = there.offer("ipv4:1.2.3.4:5")
    DataConnection.open("127.0.0.1", given, 5.0, NOW.trusts).close()
    with pytest.raises(OSError):
        DataConnection.open("127.0.0.1", given, 5.0, NOW.trusts)
    for wrong in (b"\0" * SECRET_BYTES, os.urandom(SECRET_BYTES)):
        with pytest.raises(OSError):
            DataConnection.open(
                "127.0.0.1", moe_pb2.OpenDataConnectionReply(port=there.port, secret=wrong), 5.0, NOW.trusts
            )
    limits = there._terms.admission.limits
    monkeypatch.setattr(there._terms.admission, "limits", replace(limits, hello_seconds=0.05))
    late = there.offer("ipv4:1.2.3.4:5")
    time.sleep(0.1)
    with pytest.raises(OSError):
        DataConnection.open("127.0.0.1", late, 5.0, NOW.trusts)
    with NOW.wrapped(socket.create_connection(("127.0.0.1", there.port), 5.0)) as silent:
        silent.sendall(b"\1" * 5)
        assert silent.recv(1) == b"", "who shows no secret in time is left"
    monkeypatch.setattr(there._terms.admission, "limits", limits)
    for _ in range(3):
        there.offer("ipv4:1.2.3.4:5")
    with pytest.raises(LaneFull, match="are there or to come"):
        there.offer("ipv4:1.2.3.4:5")


def test_so_many_connections_are_open_as_streams_may_be(there: DataConnections) -> None:
    made = [opened(there) for _ in range(3)]
    with pytest.raises(LaneFull, match=r"3 data connections .* \(server\.max_streams\)"):
        opened(there)
    there._terms.admission.open_stream("ipv4:1.2.3.4:5")()  # streams have their own
    made[0].close()
    assert until(lambda: len(there._there) == 2)
    made[0] = opened(there)
    for one in made:
        one.close()


def test_a_host_that_comes_finds_a_connection(
    there: DataConnections, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many one caller has, to come and made, and never uses."""
    limits = replace(there._terms.admission.limits, streams=16)
    monkeypatch.setattr(there._terms.admission, "limits", limits)
    made = [opened(there) for _ in range(2)]
    for _ in range(11):
        there.offer("ipv4:1.2.3.4:5")
    with pytest.raises(LaneFull, match=r"13 data connections .* may have 13 of 16 .*\(server\.max_streams\)"):
        there.offer("ipv4:1.2.3.4:5")
    there.offer("ipv4:1.2.3.4:6")
    there.offer("ipv4:1.2.3.5:5")
    for one in made:
        one.close()


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        HEADER.pack(b"moe2", 3, 0) + b"abc",
        HEADER.pack(MAGIC, MOST + 1, 0),
        HEADER.pack(MAGIC, 1, MOST),
        HEADER.pack(MAGIC, (1 << 32) - 1, (1 << 64) - 1),
        HEADER.pack(MAGIC, 2, 0) + b"\x08\x01\x08",
    ],
)
def test_what_is_no_frame_ends_its_connection_and_no_other(
    there: DataConnections,
    connection: DataConnection,
    door: Door,
    sent: bytes,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO), raw(there) as one:
        one.sendall(sent)
        one.settimeout(5.0)
        assert one.recv(1) == b"" and until(lambda: "a data connection of" in caplog.text)
    connection.send(job(), 5.0)
    door.reply(reply=moe_pb2.ForwardReply(epoch=1))
    connection.receive()


def test_messages_that_are_none_are_refused_by_name(
    there: DataConnections, connection: DataConnection
) -> None:
    with raw(there) as one:
        one.sendall(HEADER.pack(MAGIC, 4, 0) + b"\xff\xff\xff\xff")
        assert b"are no ForwardRequest" in one.recv(1000)
    with_data = rows(8)
    with_data.message.hidden.data = b"12345678"
    connection.send(with_data, 5.0)
    with pytest.raises(InvalidArgument, match="hidden: data behind a message that has them already"):
        connection.receive()
    named = job(hidden=moe_pb2.Tensor(region=moe_pb2.Region(name="region-1", size=8)))
    for wrong in (named, job(output=moe_pb2.Region(name="region-1", size=8))):
        connection.send(wrong, 5.0)
        with pytest.raises(InvalidArgument, match="brings its rows, and takes its answer"):
            connection.receive()
    assert connection.fresh


@pytest.mark.parametrize(
    "sent", [b"", b"mo", HEADER.pack(MAGIC, 9, 0), HEADER.pack(MAGIC, 1, 99) + b"x" * 40]
)
def test_a_message_has_to_come_in_time_once_it_has_begun(there: DataConnections, sent: bytes) -> None:
    with raw(there) as one:
        one.settimeout(3 * SECONDS)
        one.sendall(sent)
        if not sent:  # an idle connection may stay
            with pytest.raises(TimeoutError):
                one.recv(1)
            return
        began = time.monotonic()
        assert one.recv(1) == b"" and time.monotonic() - began > SECONDS / 2


def test_who_leaves_or_sends_more_before_the_answer_has_its_call_given_up(
    there: DataConnections, door: Door
) -> None:
    for ends_it in (lambda one: one.close(), lambda one: one.sendall(HEADER.pack(MAGIC, 0, 0))):
        one, before = raw(there), len(door.left)
        one.sendall(HEADER.pack(MAGIC, 0, 0))
        assert door.came.acquire(timeout=5)
        assert there.busy
        ends_it(one)
        assert until(lambda before=before: len(door.left) == before + 1) and door.left[-1] is door.calls[-1]
        assert until(lambda: not there.busy)
        door.asked[-1][1](moe_pb2.ForwardStreamReply())  # it ends all the same
        one.close()


def test_a_caller_without_an_answer_is_told_so_in_its_time(connection: DataConnection, door: Door) -> None:
    connection.send(job(), 0.1)
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        connection.receive()
    assert 0.05 < time.monotonic() - began < 2.0 and connection.closed and not connection.fresh
    assert until(lambda: len(door.left) == 1)
    assert door.came.acquire(timeout=5)
    door.asked[-1][1](moe_pb2.ForwardStreamReply())


def test_a_caller_that_takes_no_reply_holds_up_nobody_and_is_left(there: DataConnections, door: Door) -> None:
    with raw(there) as slow:
        slow.sendall(HEADER.pack(MAGIC, 0, 0))
        began = time.monotonic()
        door.reply(bytes(16 << 20), reply=moe_pb2.ForwardReply())
        assert time.monotonic() - began < SECONDS, "who ends calls does not wait for callers"
        assert there.busy
        other = opened(there)
        other.send(job("b"), 5.0)
        door.reply(reply=moe_pb2.ForwardReply(epoch=2))
        assert other.receive().epoch == 2  # type: ignore[union-attr]
        other.close()
        assert until(lambda: not there.busy)


def test_a_caller_that_reads_slowly_gets_all(there: DataConnections, door: Door) -> None:
    with raw(there) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        slow.sendall(HEADER.pack(MAGIC, 0, 0))
        data = np.random.default_rng(1).integers(0, 255, 1 << 20, np.uint8)
        door.reply(data.tobytes(), reply=moe_pb2.ForwardReply())
        came = b""
        while len(came) < HEADER.size or len(came) < HEADER.size + sum(HEADER.unpack_from(came)[1:]):
            came += slow.recv(1 << 16)
            time.sleep(0.005)
        assert came.endswith(data.tobytes())


def test_calls_over_the_limits_are_refused_and_may_come_back(
    there: DataConnections, connection: DataConnection, door: Door
) -> None:
    others = [opened(there) for _ in range(2)]
    for one in others:
        one.send(job("other"), 5.0)
        assert door.came.acquire(timeout=5)
    connection.send(rows(500_000), 5.0)
    with pytest.raises(Overloaded, match=r"server\.max_concurrent_calls") as refused:
        connection.receive()
    assert refused.value.retry_after and connection.fresh, "its message was read, and thrown away"
    assert door.refused == [("DataConnection", "inline", "RESOURCE_EXHAUSTED")]
    for _, ended, _ in list(door.asked):
        ended(moe_pb2.ForwardStreamReply(reply=moe_pb2.ForwardReply()))
    for one in others:
        one.receive()
        one.close()
    connection.send(rows(500_000), 5.0)
    door.reply(reply=moe_pb2.ForwardReply(epoch=4))
    assert connection.receive().epoch == 4  # type: ignore[union-attr]


def test_what_a_header_claims_takes_no_room_from_others(
    there: DataConnections, connection: DataConnection, door: Door
) -> None:
    """Two such calls would be all that there is, and more of them all bytes."""
    silent = [raw(there) for _ in range(2)]
    for one in silent:
        one.sendall(HEADER.pack(MAGIC, 9, MOST - 9))
    time.sleep(0.05)
    assert there._terms.admission.held == (0, 0, 0)
    connection.send(rows(500_000), 5.0)
    door.reply(reply=moe_pb2.ForwardReply(epoch=4))
    assert connection.receive().epoch == 4  # type: ignore[union-attr]
    for one in silent:
        one.close()


def test_what_a_header_claims_takes_no_memory(
    there: DataConnections, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither for rows nor for a message: sixteen bytes of many callers would take all that a host has."""
    most = 64 * MOST
    monkeypatch.setattr(there, "_terms", replace(there._terms, most_bytes=most))

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    before = resident()
    for message, data in ((most, 0), (9, most - 9)):
        silent = [raw(there) for _ in range(3)]
        for one in silent:
            one.sendall(HEADER.pack(MAGIC, message, data) + bytes(10))
        assert not until(lambda: resident() - before > most, seconds=0.3)
        for one in silent:
            one.close()
        assert until(lambda: not there._there), "or the next ones find no place"


def test_what_has_come_of_a_request_counts_and_what_finds_no_room_is_refused(
    there: DataConnections, connection: DataConnection, door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(there, "_terms", replace(there._terms, most_bytes=4 * MOST))
    admission, message = there._terms.admission, job("large").SerializeToString()
    with raw(there) as large:
        frame = HEADER.pack(MAGIC, len(message), 3 * MOST) + message + bytes(3 * MOST)
        large.settimeout(5.0)
        large.sendall(frame[: 2 * MOST])
        assert until(lambda: admission.held[2] >= 2 * MOST) and admission.held[2] <= 4 * MOST, "twice"
        large.sendall(frame[2 * MOST :])
        assert door.came.acquire(timeout=5) and admission.held == (1, 0, 2 * (len(frame) - HEADER.size))
        door.asked[-1][1](moe_pb2.ForwardStreamReply())
        assert large.recv(1000) and admission.held == (0, 0, 0)
        others = admission.enlarge("other", 0, 3 * MOST)
        large.sendall(frame)
        assert b"bytes do not fit" in large.recv(1000) and admission.held == (0, 0, 3 * MOST)
        others()
        large.sendall(frame)
        assert door.came.acquire(timeout=5)
        door.asked[-1][1](moe_pb2.ForwardStreamReply())


def test_a_message_that_would_take_long_to_parse_is_refused_unparsed(
    there: DataConnections, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As gRPC's are: nobody else would have the interpreter meanwhile."""
    monkeypatch.setattr(there, "_terms", replace(there._terms, most_bytes=4 * MOST))
    fields = b"\x10\x01" * MOST  # the layer, again and again
    with raw(there) as one:
        one.sendall(HEADER.pack(MAGIC, len(fields), 0) + fields)
        one.settimeout(5.0)
        assert b"has more than 64 fields" in one.recv(1000)


def test_a_door_that_fails_ends_the_connection_alone(
    there: DataConnections, connection: DataConnection, door: Door, caplog: pytest.LogCaptureFixture
) -> None:
    door.fails = RuntimeError("so it is")
    connection.send(job(), 5.0)
    with pytest.raises(Unavailable, match="connection"):
        connection.receive()
    assert until(lambda: "so it is" in caplog.text and there._terms.admission.held == (0, 0, 0))
    door.fails = None
    again = opened(there)
    again.send(job(), 5.0)
    door.reply(reply=moe_pb2.ForwardReply(epoch=1))
    again.receive()
    again.close()


def test_a_door_that_closes_ends_calls_and_connections(there: DataConnections, door: Door) -> None:
    idle, busy = opened(there), opened(there)
    busy.send(job(), 5.0)
    assert door.came.acquire(timeout=5)
    began = time.monotonic()
    there.close()
    assert time.monotonic() - began < 1.0 and len(door.left) == 1
    with pytest.raises(Unavailable):
        busy.receive()
    assert not idle.fresh
    idle.close()
    with pytest.raises(OSError):
        opened(there)
    door.asked[-1][1](moe_pb2.ForwardStreamReply())


def test_a_client_keeps_what_is_answered_and_asks_seldom_where_there_is_none(
    there: DataConnections, door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[float]()

    def ask(timeout: float) -> moe_pb2.OpenDataConnectionReply:
        asked.append(timeout)
        return there.offer("ipv4:1.2.3.4:5")

    client = ends.DataConnections(f"127.0.0.1:{there.port}", ask, NOW.trusts)
    assert client.likely
    first = client.take(5.0)
    assert first is not None
    first.send(job(), 5.0)
    door.reply(reply=moe_pb2.ForwardReply())
    first.receive()
    client.give(first)
    assert client.take(5.0) is first and len(asked) == 1 and asked[0] == OPEN_SECONDS
    first.close()
    client.give(first)
    second = client.take(0.5)
    assert second is not None and second is not first and asked[1] == 0.25
    client.give(second)
    there.close()
    assert client.take(5.0) is None and not client.likely, "one that has ended is not given out"
    count = len(asked)
    assert client.take(5.0) is None and len(asked) == count, "and a lane that has none is left alone"
    monkeypatch.setattr(client._kept, "_again", 0.0)
    client.close()
    assert client.take(5.0) is None and len(asked) == count


def test_rows_lie_in_one_region_which_is_given_back_after_a_while(
    there: DataConnections, door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = replace(there._terms.admission.limits, rest_seconds=0.05)
    monkeypatch.setattr(there._terms.admission, "limits", limits)
    connection = opened(there)
    for count in (5000, 9000, 200_000, 7000):
        connection.send(rows(count), 5.0)
        answer = os.urandom(count)
        door.reply(answer, reply=moe_pb2.ForwardReply())
        reply = connection.receive()
        assert isinstance(reply, Carried) and bytes(reply.data) == answer
        (asked, _, _) = door.asked[-1]
        assert asked.hidden.region.name == asked.output.name and asked.output.offset >= count
        assert len(door.regions.list()) <= 1
    assert until(lambda: not door.regions.bytes)
    connection.send(rows(5000), 5.0)
    assert until(lambda: len(door.asked) == 5)
    time.sleep(0.2)
    assert door.regions.bytes, "not while a call is under way"
    door.reply(answer[:5000], reply=moe_pb2.ForwardReply())
    connection.receive()
    connection.close()


def test_a_call_is_answered_where_there_is_no_room_for_a_region(
    there: DataConnections, connection: DataConnection, door: Door
) -> None:
    taken = [door.regions.create(3 * MOST)[0]]
    connection.send(rows(900_000), 5.0)
    answer = os.urandom(900_000)
    door.reply(answer, reply=moe_pb2.ForwardReply(epoch=3))
    reply = connection.receive()
    assert isinstance(reply, moe_pb2.ForwardReply) and reply.hidden.data == answer
    (asked, _, _) = door.asked[-1]
    assert not asked.HasField("output") and door.rows() == np.arange(900_000, dtype=np.uint8).tobytes()
    door.regions.release(taken[0])
    connection.send(rows(900_000), 5.0)
    door.reply(answer, reply=moe_pb2.ForwardReply(epoch=3))
    assert isinstance(connection.receive(), Carried)


@pytest.mark.parametrize("cores", [2, 8])
def test_both_ends_may_look_for_what_comes_next(
    there: DataConnections, monkeypatch: pytest.MonkeyPatch, cores: int
) -> None:
    """Where there are cores to spare, and as they do without: who rests, stalls or leaves costs nothing."""
    monkeypatch.setattr(awake, "usable_cores", lambda: cores)
    monkeypatch.setattr(server, "ConnectionLane", Echo)
    observed = list[tuple[object, ...]]()
    own = SimpleNamespace(spin=awake.awake_seconds(), observe=lambda *told: observed.append(told))
    monkeypatch.setattr(there, "_terms", replace(there._terms, lanes=own))
    address = f"127.0.0.1:{there.port}"
    client = ends.DataConnections(address, lambda seconds: there.offer("ipv4:1.2.3.4:5"), NOW.trusts)
    alone = list[bool]()
    for number in range(30):
        connection = client.take(5.0)
        assert connection is not None
        alone.append(connection.alone)
        Echo.after = {20: 0.3, 21: 0.003}.get(number, 0.0)
        count = 5000 + number * 9000
        connection.send(rows(count), 5.0)
        reply = connection.receive(None)
        assert isinstance(reply, Carried) and reply.message.epoch == 7
        assert bytes(reply.data) == np.arange(count, dtype=np.uint8).tobytes()
        client.give(connection)
        time.sleep({10: 0.2, 11: 0.002}.get(number, 0.0))
    assert alone == [False] * 9 + [True] * 21
    one, other = client.take(5.0), client.take(5.0)
    assert one is not None and other is not None and not other.alone
    one.close()
    Echo.after = 0.5
    other.send(rows(5000), 0.1)
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        other.receive(None)
    assert 0.05 < time.monotonic() - began < 0.4
    client.close()
    assert until(lambda: len(observed) == 31) and {told[2] for told in observed} == {"OK"}


def test_a_call_whose_lane_fails_it_gives_its_room_back(
    there: DataConnections, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(Echo):
        def answered(self, request: moe_pb2.ForwardRequest, there: Callable[[], bool]) -> None:
            return None

        def place(self, request: moe_pb2.ForwardRequest) -> None:
            raise RuntimeError("so it is")

    monkeypatch.setattr(server, "ConnectionLane", Failing)
    own = SimpleNamespace(spin=0.0, observe=lambda *told: None)
    monkeypatch.setattr(there, "_terms", replace(there._terms, lanes=own))
    connection = opened(there)
    connection.send(rows(5000), 5.0)
    with pytest.raises(Unavailable):
        connection.receive()
    assert until(lambda: "so it is" in caplog.text and there._terms.admission.held == (0, 0, 0))


@pytest.mark.parametrize("seconds, code", [(0.3, "DEADLINE_EXCEEDED"), (5.0, "CANCELLED")])
def test_a_call_over_a_lane_that_is_left_at_its_deadline_is_late(
    there: DataConnections, monkeypatch: pytest.MonkeyPatch, seconds: float, code: str
) -> None:
    class Silent(Echo):
        def answered(self, request: moe_pb2.ForwardRequest, there: Callable[[], bool]) -> None:
            while there():
                time.sleep(0.001)
            raise ConnectionResetError("its caller has left")

    observed = list[object]()
    monkeypatch.setattr(server, "ConnectionLane", Silent)
    own = SimpleNamespace(spin=0.0, observe=lambda *told: observed.append(told[2]))
    monkeypatch.setattr(there, "_terms", replace(there._terms, lanes=own))
    connection = opened(there)
    connection.send(rows(5000), seconds)
    time.sleep(0.29)
    connection.close()
    assert until(lambda: observed == [code]), observed


@pytest.mark.parametrize("what", ["the secret", "its first record"])
def test_who_sends_a_byte_now_and_then_is_left_in_time(
    there: DataConnections, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """However often one comes: a record of TLS has thousands."""
    limits = replace(there._terms.admission.limits, hello_seconds=0.4)
    monkeypatch.setattr(there._terms.admission, "limits", limits)
    sent, pause, began = bytes(1 << 14), 0.02, time.monotonic()
    with socket.create_connection(("127.0.0.1", there.port), 5.0) as slow:
        if what == "its first record":
            sent, pause = b"\x16\x03\x01\x40\x00" + sent, 0.0003
        elif NOW.trusts is not None:
            incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
            tls = ssl.create_default_context(cafile=NOW.trusts.ca).wrap_bio(
                incoming, outgoing, server_hostname="127.0.0.1"
            )
            while True:
                try:
                    tls.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    slow.sendall(outgoing.read())
                    incoming.write(slow.recv(1 << 16))
            slow.sendall(outgoing.read())
            tls.write(sent)
            sent = outgoing.read()
        slow.settimeout(pause)
        for byte in sent:
            try:
                slow.sendall(bytes([byte]))
                if slow.recv(1) != b"+":
                    break
            except TimeoutError:
                pass
            except OSError:
                break
            assert time.monotonic() - began < 2.5, "it is left"


def test_who_speaks_another_tongue_than_the_lane_is_left(
    there: DataConnections, connection: DataConnection, door: Door, tmp_path: Path
) -> None:
    stranger = Credentials(ca=Authority(tmp_path / "stranger", "stranger").path)
    other = None if NOW.trusts is not None else stranger
    for trusts in (other, stranger):
        began = time.monotonic()
        with pytest.raises(OSError):
            DataConnection.open("127.0.0.1", there.offer("ipv4:1.2.3.4:5"), 2.0, trusts)
        assert time.monotonic() - began < 3.0
    connection.send(rows(5000), 5.0)
    door.reply(bytes(5000), reply=moe_pb2.ForwardReply(epoch=1))
    connection.receive()


def test_memory_that_a_step_without_an_answer_may_touch_is_not_used_again(
    there: DataConnections, connection: DataConnection, door: Door
) -> None:
    """Its error was sent at the deadline, and the step goes on."""
    asked = list[moe_pb2.ForwardRequest]()
    for turn, (touched, error) in enumerate(((True, False), (True, True), (False, True), (False, False))):
        connection.send(rows(5000), 5.0)
        assert door.came.acquire(timeout=5)
        request, ended, _ = door.asked[-1]
        asked.append(request)
        place = request.output
        held = door.regions.hold(place.name, place.offset, place.size) if touched else None
        reply = moe_pb2.ForwardStreamReply(job_id=request.job_id)
        if error:
            reply.error.CopyFrom(status_of(BadRequest("late")).as_message())
        ended(reply)
        if error:
            with pytest.raises(InvalidArgument, match="late"):
                connection.receive()
        else:
            connection.receive()
        if held is not None and not error:
            held.close()
        if turn == 1:
            late = held
    first, second, third, fourth = (request.output.name for request in asked)
    assert first == second != third, "the step of the second may still write there"
    assert third == fourth, "nothing held it"
    assert late is not None
    late.close()
