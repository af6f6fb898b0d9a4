"""Shared-memory regions: bytes equal, lifetime, a dead owner, and everything forged refused."""

import errno
import fcntl
import mmap
import multiprocessing
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from multiprocessing import shared_memory

import numpy as np
import pytest
import torch

from moeserve.proto import moe_pb2
from moeserve.proto.errors import Unavailable
from moeserve.proto.tensors import Spec, TensorError, known
from moeserve.proto.transports.shared_memory import RemoteRegion, socket_address
from moeserve.runtime.doors.payloads import RegionLimits, Regions
from moeserve.runtime.doors.payloads.errors import NamedRegionRefused, RegionLimit, UnknownRegion


@pytest.fixture
def kept():
    made = Regions(RegionLimits(fetch_seconds=60.0))  # a process that fetches one has to start first
    yield made
    made.close()


def make(kept: Regions, size: int = 8192) -> moe_pb2.CreateRegionReply:
    name, size = kept.create(size)
    return moe_pb2.CreateRegionReply(name=name, size=size, socket=kept.socket)


def soon(check, seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while not check() and time.monotonic() < end:
        time.sleep(0.01)
    return check()


def test_both_sides_see_the_same_bytes(kept):
    region = RemoteRegion.open(make(kept))
    mine = region.view(4096, Spec(known("x", "fp32"), (2, 8))).storage
    mine[:] = np.arange(16).reshape(2, 8)
    with kept.hold(region.name, 4096, 64) as theirs:
        assert bytes(theirs) == mine.tobytes()
        theirs[:4] = np.float32(99).tobytes()
    assert mine[0, 0] == 99
    region.close()


def test_size_is_rounded_up_to_whole_pages_and_none_is_refused(kept):
    assert kept.create(1)[1] == mmap.PAGESIZE
    assert kept.create(mmap.PAGESIZE + 1)[1] == 2 * mmap.PAGESIZE
    with pytest.raises(TensorError, match="size: a region of 0 bytes cannot be made"):
        kept.create(0)


# -- the seal


def descriptor_of(made: moe_pb2.CreateRegionReply) -> tuple[int, socket.socket]:
    lease = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    lease.connect(socket_address(made.socket))
    lease.send(made.name.encode())
    _, (descriptor,), _, _ = socket.recv_fds(lease, 16, 1)
    return descriptor, lease


@pytest.mark.parametrize(
    "attack",
    [
        lambda fd: os.ftruncate(fd, 0),
        lambda fd: os.ftruncate(fd, 1 << 20),
        lambda fd: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
    ],
    ids=["shrink", "grow", "seal"],
)
def test_who_holds_the_descriptor_can_neither_resize_nor_seal_it(kept, attack):
    descriptor, lease = descriptor_of(make(kept))
    with pytest.raises(OSError) as raised:
        attack(descriptor)
    assert raised.value.errno == errno.EPERM
    os.close(descriptor)
    lease.close()


# -- lifetime


def test_a_region_ends_with_its_last_lease(kept):
    made = make(kept)
    first, second = RemoteRegion.open(made), RemoteRegion.open(made)
    assert [row.in_use for row in kept.list()] == [0]
    first.close()
    time.sleep(0.1)
    assert len(kept.list()) == 1
    second.close()
    assert soon(lambda: kept.list() == () and kept.bytes == 0)
    with pytest.raises(UnknownRegion):
        kept.hold(made.name, 0, 1)


def die_with_a_region(made_bytes: bytes, ready) -> None:
    region = RemoteRegion.open(moe_pb2.CreateRegionReply.FromString(made_bytes))
    region.view(0, Spec(known("x", "fp32"), (1024,))).storage[:] = 5
    ready.set()
    time.sleep(60)


def test_a_dead_client_s_region_is_reclaimed_once_no_call_holds_it(kept):
    made = make(kept)
    spawn = multiprocessing.get_context("spawn")
    ready = spawn.Event()
    client = spawn.Process(target=die_with_a_region, args=(made.SerializeToString(), ready), daemon=True)
    client.start()
    assert ready.wait(30)
    hold = kept.hold(made.name, 0, 4096)
    client.kill()
    client.join()
    assert soon(lambda: kept.list() == ())
    assert kept.bytes == made.size
    assert np.all(np.frombuffer(hold.memory, np.float32) == 5)
    hold.close()
    hold.close()
    assert kept.bytes == 0


def test_a_tensor_over_a_region_outlives_it(kept):
    region = RemoteRegion.open(make(kept))
    with kept.hold(region.name, 0, 64) as memory:
        tensor = torch.frombuffer(memory, dtype=torch.float32)
    kept.release(region.name)
    region.close()
    tensor.fill_(3)
    assert tensor.sum() == 48


def test_a_region_that_nobody_fetches_is_swept():
    kept = Regions(RegionLimits(fetch_seconds=0.2))
    try:
        make(kept)
        assert soon(lambda: kept.list() == ())
    finally:
        kept.close()


def test_a_released_region_says_so_to_its_client(kept):
    region = RemoteRegion.open(make(kept))
    assert region.alive
    kept.release(region.name)
    assert soon(lambda: not region.alive)
    with pytest.raises(UnknownRegion, match=r"no region 'region-1'$"):
        kept.release(region.name)


def test_closing_ends_every_lease_and_makes_no_more():
    kept = Regions()
    region = RemoteRegion.open(make(kept))
    kept.close()
    kept.close()
    assert soon(lambda: not region.alive)
    assert kept.bytes == 0
    with pytest.raises(RegionLimit, match="shutting down"):
        kept.create(1)


def test_many_threads_hold_and_make_at_once(kept):
    wrong = []

    def work() -> None:
        for _ in range(50):
            made = make(kept, 4096)
            region = RemoteRegion.open(made)
            with kept.hold(made.name, 0, 16) as memory:
                memory[:] = os.urandom(16)
                if bytes(memory) != region.view(0, Spec(known("x", "int32"), (4,))).storage.tobytes():
                    wrong.append(made.name)
            region.close()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert soon(lambda: kept.bytes == 0)


# -- forged


@pytest.mark.parametrize(
    "size, offset",
    [(8193, 0), (1, 8192), (8192, 1), (2**64 - 1, 2**64 - 1), (2**64 - 1, 1), (-1, 0), (1, -1)],
)
def test_a_range_that_leaves_the_region_is_refused(kept, size, offset):
    made = make(kept)
    with pytest.raises(
        TensorError, match=rf"^hidden: {size} bytes at offset {offset} leave region 'region-1' of 8192 bytes$"
    ):
        kept.hold(made.name, offset, size, field="hidden")
    assert kept.list()[0].in_use == 0


def test_a_guessed_name_opens_nothing_and_the_list_does_not_give_it_away(kept):
    made = make(kept)
    (row,) = kept.list()
    assert row.name == "region-1" and row.size == 8192 and not row.named
    with pytest.raises(UnknownRegion, match=r"no region 'region-1'$"):
        kept.release(row.name)
    assert kept.list() == (row,)
    for forged in (row.name, f"{row.name}-{secrets.token_hex(16)}", "", made.name + "x", "\0"):
        with pytest.raises(UnknownRegion):
            kept.hold(forged, 0, 1)
        if forged:
            with pytest.raises(Unavailable, match="no region has this name"):
                RemoteRegion.open(moe_pb2.CreateRegionReply(name=forged, size=4096, socket=kept.socket))
    with pytest.raises(UnknownRegion) as raised:
        kept.release("region-9-" + made.name.split("-")[-1])
    assert made.name.split("-")[-1] not in str(raised.value)


def test_a_socket_where_nobody_listens_is_unavailable():
    gone = moe_pb2.CreateRegionReply(name="r", size=4096, socket="@moeserve-nobody")
    with pytest.raises(Unavailable, match=r"region of 4096 bytes could not be fetched from @moeserve-nobody"):
        RemoteRegion.open(gone)


def test_who_connects_and_says_nothing_does_not_hold_up_others(kept):
    silent = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(20)]
    for client in silent:
        client.connect(socket_address(kept.socket))
    RemoteRegion.open(make(kept)).close()
    for client in silent:
        client.close()


# -- limits


def test_bytes_and_count_are_limited_and_come_back():
    kept = Regions(RegionLimits(max_bytes=8192, max_regions=2))
    first, _ = kept.create(4096)
    kept.create(4096)
    with pytest.raises(RegionLimit, match="2 regions exist, as many as allowed"):
        kept.create(1)
    hold = kept.hold(first, 0, 1)
    kept.release(first)
    with pytest.raises(RegionLimit):
        kept.create(1)
    hold.close()
    with pytest.raises(
        RegionLimit,
        match=r"8192 bytes do not fit: 4096 of 8192 bytes are taken by regions \(server\.region_bytes\)",
    ):
        kept.create(8192)
    kept.create(4096)
    kept.close()
    assert kept.bytes == 0


# -- by name


@pytest.fixture
def named():
    made = shared_memory.SharedMemory(create=True, size=4096)
    yield made
    made.close()
    made.unlink()


def test_registering_by_name_is_refused_unless_allowed(kept, named):
    with pytest.raises(NamedRegionRefused, match=r"region 'mine': registering by name is unsafe and off"):
        kept.register("mine", named.name, 0, 4096)


def test_a_registered_object_is_used_in_place_and_never_unlinked(named):
    kept = Regions(RegionLimits(allow_named=True))
    kept.register("mine", "/" + named.name.lstrip("/"), 1024, 2048)
    assert [(row.name, row.size, row.named) for row in kept.list()] == [("mine", 2048, True)]
    with kept.hold("mine", 4, 4) as memory:
        memory[:] = b"abcd"
    assert bytes(named.buf[1028:1032]) == b"abcd"
    with pytest.raises(TensorError, match="'mine' is registered already"):
        kept.register("mine", named.name, 0, 4096)
    kept.release("mine")
    kept.close()
    shared_memory.SharedMemory(named.name).close()


@pytest.mark.parametrize(
    ("key", "offset", "size", "kind", "text"),
    [
        ("../etc/passwd", 0, 1, TensorError, "is not a name that shm_open takes"),
        ("a/b", 0, 1, TensorError, "is not a name that shm_open takes"),
        ("..", 0, 1, TensorError, "is not a name that shm_open takes"),
        ("moeserve-not-there", 0, 1, UnknownRegion, "cannot be opened: No such file"),
        (None, 0, 4097, TensorError, "4097 bytes at offset 0 leave object .* of 4096 bytes"),
        (None, 2**64 - 1, 1, TensorError, "leave object"),
        (None, 0, 0, TensorError, "0 bytes at offset 0 are no range"),
    ],
)
def test_a_forged_key_or_range_is_refused(named, key, offset, size, kind, text):
    kept = Regions(RegionLimits(allow_named=True))
    with pytest.raises(kind, match=text):
        kept.register("mine", key or named.name, offset, size)
    assert kept.list() == () and kept.bytes == 0
    kept.close()


def test_a_process_that_exits_leaves_a_registered_object_alone(named):
    program = (
        "from moeserve.runtime.doors.payloads import Regions, RegionLimits\n"
        f"Regions(RegionLimits(allow_named=True)).register('r', {named.name!r}, 0, 4096)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    shared_memory.SharedMemory(named.name).close()
