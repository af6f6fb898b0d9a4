"""Every socket that a running service's processes listen on is one of the table, and guarded as it says."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from keyed import Keyring, Shown

from moeserve.proto.client import MoeClient
from moeserve.runtime.keys.access import LISTENERS, Lets, Role

SECONDS = 60.0
WAIT_SECONDS = 10.0  # for a socket to answer
SILENT_SECONDS = 3.0  # after which one that has said nothing waits for a request; it does so for some seconds
LISTENING = "0A"  # of TCP, in the kernel's tables
ACCEPTS = 0x10000  # a flag of Unix sockets there


@dataclass(frozen=True)
class Found:
    """A socket that a process listens on."""

    opened_by: str
    kind: str
    place: str  # host:port, or a path


@pytest.fixture(scope="module")
def running(
    checkpoint_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, int, Keyring]]:
    """`moeserve serve` with mutual TLS and two ranks: its address, its process, and its keys."""
    folder = tmp_path_factory.mktemp("serve")
    ring = Keyring(folder, "mutual")
    lines = [f'{key.removeprefix("keys__")} = "{value}"' for key, value in ring.settings().items()]
    config = folder / "service.toml"
    config.write_text("\n".join(["[keys]", *lines, ""]))
    command = [sys.executable, "-m", "moeserve", "serve", str(config), "--checkpoint", str(checkpoint_path)]
    command += ["--launcher", "local", "--device", "cpu", "--port", "0", "--metrics-port", "0"]
    command += ["--data-parallel-size", "2", "--enable-expert-parallel"]
    log = folder / "log"
    with (
        log.open("w") as out,
        subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=os.environ.copy()) as process,
    ):
        try:
            until = time.monotonic() + SECONDS
            while not (
                said := [line for line in log.read_text().splitlines() if line.startswith("serving on")]
            ):
                assert time.monotonic() < until and process.poll() is None, log.read_text()
                time.sleep(0.1)
            yield said[0].split()[-1], process.pid, ring
            text = log.read_text()
            assert not [token for token in (*ring.tokens.values(), ring.former) if token in text]
            assert "Handshake failed" not in text  # strangers could fill the log
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(SECONDS)


def found_of(pid: int, opened_by: str) -> list[Found]:
    """The listening sockets of a process, by the inodes of its descriptors."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(descriptor)
        except FileNotFoundError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == LISTENING and words[9] in inodes:
                found.append(Found(opened_by, "tcp", _address(words[1])))
    for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
        words = line.split()
        if int(words[3], 16) & ACCEPTS and words[6] in inodes:
            found.append(Found(opened_by, "unix", words[7] if len(words) > 7 else ""))
    return found


def _address(packed: str) -> str:
    """`host:port` as the kernel packs it: words of four bytes, each little-endian."""
    host, port = packed.split(":")
    data = b"".join(bytes.fromhex(host[at : at + 8])[::-1] for at in range(0, len(host), 8))
    name = socket.inet_ntop(socket.AF_INET if len(data) == 4 else socket.AF_INET6, data)
    return f"{name.removeprefix('::ffff:')}:{int(port, 16)}"


def listeners(address: str, pid: int, ring: Keyring) -> list[Found]:
    """Those of all processes of the service."""
    with MoeClient(
        address, credentials=ring.credentials(ring.shown("right", frozenset({Role.OBSERVE})))
    ) as client:
        ranks = {rank.pid for rank in client.status().ranks}
    assert len(ranks) == 2
    children = psutil.Process(pid).children(recursive=True)
    (head,) = (child.pid for child in children if child.name() == "moeserve-head")
    found = dict.fromkeys(found_of(head, "head"))
    for child in (psutil.Process(pid), *(one for one in children if one.pid != head)):
        prober = any("probe_process" in word for word in child.cmdline())
        role = "rank" if child.pid in ranks else "prober" if prober else "launcher"
        places = {
            one.place for one in found
        }  # others hold sockets that the head serves: the prober, the launcher
        found |= dict.fromkeys(one for one in found_of(child.pid, role) if one.place not in places)
    return list(found)


def lets_in(place: str, ring: Keyring) -> Lets:
    """Whom a TCP socket lets in, by what it answers to who shows nothing."""
    host, port = place.rsplit(":", 1)
    host = "127.0.0.1" if host == "0.0.0.0" else host.strip("[]")
    context = ring.context(Shown())
    assert context is not None
    try:
        with (
            socket.create_connection((host, int(port)), WAIT_SECONDS) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as made,
        ):
            made.settimeout(SILENT_SECONDS)
            try:
                return Lets.KEYED if made.recv(1) == b"" else pytest.fail(f"{place} begins to talk")
            except TimeoutError:
                made.settimeout(WAIT_SECONDS)
                made.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
                return {b"401": Lets.KEYED, b"404": Lets.PROBES}[made.recv(100).split()[1]]
    except ssl.SSLError as refused:
        demands = "CERTIFICATE_REQUIRED" in str(refused).upper().replace(" ", "_")
        return Lets.KEYED if demands else Lets.LIBRARY
    except OSError:
        return Lets.LIBRARY  # it speaks no TLS


@dataclass(frozen=True)
class Service:
    """What a running service listens on."""

    sockets: list[Found]
    lets_in: dict[Found, Lets]


@pytest.fixture(scope="module")
def service(running: tuple[str, int, Keyring]) -> Service:
    sockets, ring = listeners(*running), running[2]
    with ThreadPoolExecutor(len(sockets)) as threads:
        found = threads.map(
            lambda one: Lets.KEYED if one.kind == "unix" else lets_in(one.place, ring), sockets
        )
        return Service(sockets, dict(zip(sockets, found, strict=True)))


def test_each_listener_is_in_the_table(service: Service) -> None:
    found = Counter((one.opened_by, one.kind, service.lets_in[one]) for one in service.sockets)
    processes = {"head": 1, "rank": 2, "prober": 1, "launcher": 1}
    table: Counter[tuple[str, str, Lets]] = Counter()
    for row in LISTENERS:
        table[row.opened_by, row.kind, row.lets_in] += row.most * processes[row.opened_by]
    assert found == table, sorted(map(str, service.sockets))


def test_each_unix_socket_is_in_a_folder_of_this_user_alone(service: Service) -> None:
    for one in service.sockets:
        if one.kind == "unix":
            folder = Path(one.place).parent
            assert folder.stat().st_mode & 0o777 == 0o700 and folder.stat().st_uid == os.geteuid(), one


def test_nothing_of_ours_listens_beyond_loopback(service: Service) -> None:
    beyond = [one for one in service.sockets if one.kind == "tcp" and not one.place.startswith("127.")]
    assert [one for one in beyond if service.lets_in[one] is not Lets.LIBRARY] == []


def test_a_listener_that_the_table_lacks_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.socket(socket.AF_UNIX) as two:
        two.bind(f"\0{os.urandom(8).hex()}")
        two.listen()
        places = [found.place for found in found_of(os.getpid(), "head")]
        assert f"127.0.0.1:{one.getsockname()[1]}" in places
        assert "@" + two.getsockname()[1:].decode() in places
