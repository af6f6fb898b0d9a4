"""Callers that note how they fail, ranks that stand still, and waiting for a group to serve again."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
from houses import Alone, request_of

from moeserve.proto import moe_pb2_grpc
from moeserve.proto.client import MoeClient

PIDFD_GETFD = 438  # the system call
HEARD_SECONDS = 2.0
BACK_SECONDS = 60.0


def serve_again(address: str, seconds: float = BACK_SECONDS) -> int:
    """Waits until the group serves and returns its generation."""
    until = time.monotonic() + seconds
    with MoeClient(address) as client:
        while time.monotonic() < until:
            status = client.status()
            if status.state == "serving":
                return int(status.generation)
            time.sleep(0.05)
    raise AssertionError(f"the group did not serve again within {seconds} s: {status}")


def stand_still(pid: int) -> None:
    """Stops a process, and returns once all of its threads have: on busy cores they run on for a while."""
    os.kill(pid, signal.SIGSTOP)
    while any(_state(thread) != "T" for thread in Path(f"/proc/{pid}/task").iterdir()):
        time.sleep(0.001)


@contextmanager
def standing_still(pid: int) -> Iterator[None]:
    """A process that is stopped meanwhile."""
    stand_still(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def _state(thread: Path) -> str:
    try:
        return (thread / "stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:  # it has ended meanwhile
        return "T"


def break_connections(pid: int, address: str) -> None:
    """Shuts a process's connections to `host:port` down at both ends; the process knows nothing of it."""
    port = int(address.rsplit(":", 1)[1])
    inodes = {
        fields[9]
        for fields in map(str.split, Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:])
        if int(fields[2].rsplit(":", 1)[1], 16) == port
    }
    process, broken = os.pidfd_open(pid), 0
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            if str(link.readlink()).removeprefix("socket:[").removesuffix("]") in inodes:
                copy = ctypes.CDLL(None, use_errno=True).syscall(PIDFD_GETFD, process, int(link.name), 0)
                if copy < 0:
                    raise OSError(ctypes.get_errno(), "pidfd_getfd")
                with socket.socket(fileno=copy) as connection:
                    connection.shutdown(socket.SHUT_RDWR)
                broken += 1
    finally:
        os.close(process)
    assert broken, f"process {pid} has no connection to port {port}"


class Callers:
    """Threads that call one lane each until one call fails, and note how."""

    def __init__(self, address: str, alone: Alone) -> None:
        with MoeClient(address) as client:
            lanes = client.topology().lanes
        self.failures: dict[int, tuple[float, str, str]] = {}
        self._threads = [
            threading.Thread(target=self._call, args=(lane.rank, lane.address, alone)) for lane in lanes
        ]
        for thread in self._threads:
            thread.start()

    def _call(self, rank: int, address: str, alone: Alone) -> None:
        batch = alone.batch(4, seed=rank)
        with grpc.insecure_channel(address) as channel:
            stub = moe_pb2_grpc.LaneServiceStub(channel)
            try:
                for _ in range(20000):
                    stub.Forward(request_of(0, batch), timeout=30)
            except grpc.RpcError as failed:
                self.failures[rank] = (time.monotonic(), failed.code().name, failed.details())

    def join(self) -> None:
        for thread in self._threads:
            thread.join(60)
