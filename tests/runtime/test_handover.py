"""The thread that hands over regions: it outlives whatever one client does, and ends once."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from moeserve.proto import moe_pb2
from moeserve.proto.errors import Unavailable
from moeserve.proto.transports.shared_memory import RemoteRegion, socket_address
from moeserve.runtime.doors.payloads import Regions
from moeserve.runtime.doors.payloads.handover import Handover

SECONDS = 10.0


class Owner:
    """Regions whose every question the test answers."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.answer = threading.Event()
        self.take_call: Callable[..., Callable[[], None]] | None = None
        self.together: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext

    def grant(self, name: str) -> int:
        self.asked.set()
        assert self.answer.wait(SECONDS)
        raise LookupError(name)

    def lease_ended(self, name: str) -> None: ...

    def sweep(self) -> None: ...


@pytest.fixture
def regions() -> Iterator[Regions]:
    made = Regions()
    yield made
    made.close()


def make(regions: Regions) -> moe_pb2.CreateRegionReply:
    name, size = regions.create(4096)
    return moe_pb2.CreateRegionReply(name=name, size=size, socket=regions.socket)


def at_once(act: Callable[[], object], threads: int) -> list[BaseException]:
    """What `act` raises when so many threads do it together."""
    together, raised = threading.Barrier(threads), []

    def run() -> None:
        together.wait(SECONDS)
        try:
            act()
        except BaseException as error:
            raised.append(error)

    running = [threading.Thread(target=run) for _ in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(SECONDS)
    return raised


def test_any_number_of_threads_may_close_it_at_once() -> None:
    for _ in range(200):
        assert at_once(Regions().close, 3) == []


def test_a_lease_that_ends_while_it_closes_hurts_nobody() -> None:
    for _ in range(100):
        owner = Owner()
        handover = Handover(owner)
        closing = threading.Thread(target=handover.close)
        closing.start()
        for _ in range(20):
            handover.end("region")
        closing.join(SECONDS)
        assert not closing.is_alive()


def test_ending_leases_never_waits_for_the_thread() -> None:
    """Whoever ends a lease holds the regions' lock, for which the thread may be waiting."""
    owner = Owner()
    handover = Handover(owner)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.connect(socket_address(handover.address))
        client.send(b"region")
        assert owner.asked.wait(SECONDS)

        def end_many() -> None:
            for _ in range(5000):
                handover.end("region")

        ending = threading.Thread(target=end_many, daemon=True)
        ending.start()
        ending.join(SECONDS)
        waits = ending.is_alive()
        owner.answer.set()
    handover.close()
    assert not waits


@contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """This process may open `count` descriptors more, and no other."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 8, hard))
    filling: list[int] = []
    try:
        try:
            while True:
                filling.append(os.dup(0))
        except OSError:
            for _ in range(count):
                os.close(filling.pop())
        yield
    finally:
        for descriptor in filling:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("left", [0, 1], ids=["to accept a client", "to hand over"])
def test_a_process_without_a_free_descriptor_hands_over_again_later(regions: Regions, left: int) -> None:
    made = make(regions)
    client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with client:
        client.settimeout(SECONDS)
        with descriptors_left(left):
            client.connect(socket_address(made.socket))
            client.send(made.name.encode())
            if left:
                assert b"could not hand it over: Too many open files" in client.recv(256)
            else:
                client.settimeout(0.3)
                with pytest.raises(TimeoutError):
                    client.recv(256)
                client.settimeout(SECONDS)
        if not left:
            assert client.recv(256).startswith(b"+")  # it was waiting, and is taken now
        region = RemoteRegion.open(made)
        assert region.alive
        region.close()


def test_a_call_that_cannot_be_taken_ends_its_own_connection_only(regions: Regions) -> None:
    def take_call(packet: bytes, answer: Callable[[bytes], None], peer: str) -> Callable[[], None]:
        if packet.startswith(b"\x12"):  # job_id is not what this begins with
            raise RuntimeError("unforeseen")
        return lambda: None

    regions.take_call = take_call
    bad, good = (RemoteRegion.open(make(regions)) for _ in range(2))
    assert bad.calls is not None
    assert bad.calls.send(moe_pb2.ForwardRequest(), 5.0)
    bad._lease.send(b"\x12")
    with pytest.raises(Unavailable, match="gone or stopping"):
        bad.calls.receive("a")
    assert good.alive
    RemoteRegion.open(make(regions)).close()


def test_calls_that_come_at_once_are_taken_together(regions: Regions) -> None:
    happened: list[str] = []
    blocked, release = threading.Event(), threading.Event()
    all_taken = threading.Event()

    @contextlib.contextmanager
    def together() -> Iterator[None]:
        happened.append("[")
        yield
        happened.append("]")
        all_taken.set()

    def take_call(packet: bytes, answer: Callable[[bytes], None], peer: str) -> Callable[[], None]:
        happened.append(moe_pb2.ForwardRequest.FromString(packet).job_id)
        blocked.set()
        assert release.wait(SECONDS)
        return lambda: None

    regions.take_call, regions.together = take_call, together
    clients = [RemoteRegion.open(make(regions)) for _ in range(4)]
    del happened[:]  # clients, too, may have come together

    def send(client: RemoteRegion, job_id: str) -> None:
        assert client.calls is not None and client.calls.send(moe_pb2.ForwardRequest(job_id=job_id), 5.0)

    send(clients[0], "alone")
    assert blocked.wait(SECONDS)
    for at in range(1, 4):
        send(clients[at], f"{at}")
    release.set()
    assert all_taken.wait(SECONDS)
    assert (
        happened[:2] == ["alone", "["] and happened[-1] == "]" and sorted(happened[2:-1]) == ["1", "2", "3"]
    )
