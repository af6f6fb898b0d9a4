"""Unix sockets: their folder is for this user alone, and so is what goes over them."""

from __future__ import annotations

import logging
import multiprocessing
import os
import socket
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from moeserve.proto import host as host_room
from moeserve.proto import moe_pb2
from moeserve.proto.errors import Unavailable
from moeserve.proto.host import host_id
from moeserve.proto.transports.shared_memory import RemoteRegion
from moeserve.runtime.doors.payloads import Regions
from moeserve.runtime.doors.payloads import handover as handover_room
from moeserve.runtime.keys import sockets as room
from moeserve.runtime.keys.sockets import (
    LONGEST_NAME,
    LONGEST_PATH,
    check_room,
    listen_privately,
    peer_of,
    private_folder,
    remove,
)
from moeserve.runtime.launch.forking import warm_processes

NOBODY = 65534


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder for temporary files, to this test."""
    monkeypatch.setattr(room, "sockets_parent", lambda: str(tmp_path))
    yield tmp_path


def test_the_folder_is_for_this_user_alone(parent: Path) -> None:
    folder = private_folder()
    assert folder == parent / f"moeserve-{os.geteuid()}"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert private_folder() == folder
    listener, path = listen_privately("test", socket.SOCK_STREAM)
    with listener:
        assert Path(path).parent == folder and Path(path).stat().st_mode & 0o777 == 0o600
        with socket.socket(socket.AF_UNIX) as asking:
            asking.connect(path)
            accepted, _ = listener.accept()
            with accepted:
                assert peer_of(accepted) == (os.getpid(), os.geteuid())
    remove(path)
    assert not Path(path).exists()


@pytest.mark.parametrize("taken", ["open", "link", "file"])
def test_a_name_that_is_taken_is_not_trusted(
    parent: Path, taken: str, caplog: pytest.LogCaptureFixture
) -> None:
    name = parent / f"moeserve-{os.geteuid()}"
    if taken == "open":
        name.mkdir(mode=0o777)
        name.chmod(0o777)
    elif taken == "link":
        (parent / "elsewhere").mkdir(mode=0o700)
        name.symlink_to(parent / "elsewhere")
    else:
        name.write_text("")
    folder = private_folder()
    assert folder != name and folder.stat().st_mode & 0o777 == 0o700 and not folder.is_symlink()
    assert "a fresh one is made" in caplog.text


def test_what_a_killed_process_left_is_removed_and_nothing_else(parent: Path) -> None:
    dead = multiprocessing.get_context("fork").Process(target=lambda: None)
    dead.start()
    dead.join()
    folder = private_folder()
    left, mine = folder / f"regions-{dead.pid}-0abc", folder / f"regions-{os.getpid()}-0abc"
    for path in (left, mine):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as made:
            made.bind(str(path))
    elsewhere = folder / f"weights-{dead.pid}-0abc"  # of a process that has this number in a container
    with socket.socket(socket.AF_UNIX) as living:
        living.bind(str(elsewhere))
        living.listen()
        listener, path = listen_privately("test", socket.SOCK_STREAM)
        listener.close()
        assert {one.name for one in folder.iterdir()} == {mine.name, elsewhere.name, Path(path).name}


def test_another_user_is_refused_a_region(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    regions = Regions()
    try:
        name, _ = regions.create(4096)
        monkeypatch.setattr(handover_room, "peer_of", lambda client: (4711, os.geteuid() + 1))
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
            asking.settimeout(10)
            asking.connect(regions.socket)
            try:
                asking.send(name.encode())
                answer, descriptors, _, _ = socket.recv_fds(asking, 256, 1)
            except OSError:
                answer, descriptors = b"", []
        assert (answer, descriptors) == (b"", [])
        assert "process 4711" in caplog.text
        assert name not in caplog.text
    finally:
        regions.close()


def test_root_is_another_user_too(monkeypatch: pytest.MonkeyPatch) -> None:
    regions = Regions()
    try:
        monkeypatch.setattr(handover_room, "peer_of", lambda client: (1, 0))
        monkeypatch.setattr("moeserve.runtime.doors.payloads.handover.os.geteuid", lambda: 1000)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
            asking.settimeout(10)
            asking.connect(regions.socket)
            assert asking.recv(1) == b""
    finally:
        monkeypatch.undo()
        regions.close()


def as_nobody(path: str, name: str, said: Connection) -> None:
    """Tries to fetch a region as another user of the machine."""
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
        try:
            asking.connect(path)
            asking.send(name.encode())
            said.send(asking.recv(256))
        except OSError as failed:
            said.send(failed.errno)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_of_the_machine_cannot_even_connect() -> None:
    regions = Regions()
    try:
        name, _ = regions.create(4096)
        near, far = multiprocessing.Pipe()
        process = multiprocessing.get_context("fork").Process(
            target=as_nobody, args=(regions.socket, name, far)
        )
        process.start()
        assert near.poll(20) and near.recv() == 13  # EACCES
        process.join(20)
    finally:
        regions.close()


def test_a_client_tells_a_region_s_name_to_its_own_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "stranger"))
        listener.listen()
        monkeypatch.setattr(os, "geteuid", lambda: 4711)
        made = moe_pb2.CreateRegionReply(name="region-1-secret", size=4096, socket=str(tmp_path / "stranger"))
        with pytest.raises(Unavailable, match="a process of user"):
            RemoteRegion.open(made)
        monkeypatch.undo()
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.recv(256) == b""


def test_the_socket_is_gone_with_its_regions() -> None:
    regions = Regions()
    path = Path(regions.socket)
    assert path.is_socket()
    regions.close()
    assert not path.exists()


def test_processes_with_other_folders_share_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    host_id.cache_clear()
    here = host_id()
    monkeypatch.setattr(host_room, "sockets_parent", lambda: str(tmp_path))
    host_id.cache_clear()
    assert here and host_id() and host_id() != here
    monkeypatch.undo()
    host_id.cache_clear()
    assert host_id() == here


def test_a_folder_with_too_long_a_path_for_sockets_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("t" * 70)
    long.mkdir()
    monkeypatch.setattr(room, "sockets_parent", lambda: str(long))
    for use in (check_room, lambda: listen_privately("test", socket.SOCK_STREAM)):
        with pytest.raises(OSError, match=f"{long}, is a path of .*; set TMPDIR to a shorter one"):
            use()
    most = LONGEST_PATH - len(f"/moeserve-{os.geteuid()}/{LONGEST_NAME}")
    monkeypatch.setattr(room, "sockets_parent", lambda: "t" * most)
    check_room()
    monkeypatch.setattr(room, "sockets_parent", lambda: "t" * (most + 1))
    with pytest.raises(OSError, match=f"need one of {most} at most"):
        warm_processes([])
