"""`moeserve serve` in a process of its own, its processes by what they are, and clients that only wait."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import torch
from houses import Alone
from processes import descendants_of, gone

from moeserve.proto.client import MoeClient
from moeserve.proto.errors import Unavailable
from moeserve.runtime.launch.watch import stat_of

START_SECONDS = 120.0
STOP_SECONDS = 40.0
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@dataclass
class Service:
    """A running `moeserve serve`."""

    pid: int
    address: str
    log: Path
    process: subprocess.Popen[bytes]

    def named(self, name: str) -> int:
        """The one process of the service of that name, as /proc/PID/comm has it."""
        found = [pid for pid in descendants_of(self.pid) if comm_of(pid) == name and stat_of(int(pid))]
        assert len(found) == 1, (name, found, self.log.read_text()[-2000:])
        return int(found[0])

    def printed(self) -> list[str]:
        """Lines of the service's output and log so far."""
        return self.log.read_text().splitlines()

    @property
    def head(self) -> int:
        """The head's process."""
        return self.named("moeserve-head")

    def serves(self, after: int = 0) -> int:
        """Waits until a generation after that one serves, also while nobody answers; returns it."""
        until, status = time.monotonic() + START_SECONDS, None
        with MoeClient(self.address) as client:
            while time.monotonic() < until:
                with suppress(Unavailable):
                    status = client.status()
                    if status.state == "serving" and status.generation > after:
                        return int(status.generation)
                time.sleep(0.02)
        raise AssertionError(f"{status}\n{self.log.read_text()[-3000:]}")

    def read(self) -> dict[int, int]:
        """Bytes that ranks have read since they started, by process."""
        with MoeClient(self.address) as client:
            return {rank.pid: rank.bytes_read for rank in client.status().ranks}


def comm_of(pid: str) -> str:
    """The name of a process; empty for one that has ended."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


@contextmanager
def served(
    folder: Path, checkpoint: Path, *flags: str, environment: Mapping[str, str] = MappingProxyType({})
) -> Iterator[Service]:
    """A service on the CPU with free ports; all of its processes have ended afterwards."""
    log = folder / "log"
    command = [sys.executable, "-m", "moeserve", "serve", "--checkpoint", str(checkpoint), "--device", "cpu"]
    command += ["--port", "0", "--metrics-port", "0", *flags]
    with log.open("w") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        )
    started: list[str] = []
    try:
        until = time.monotonic() + START_SECONDS
        while not (said := [one for one in log.read_text().splitlines() if one.startswith("serving on")]):
            assert time.monotonic() < until and process.poll() is None, log.read_text()
            time.sleep(0.05)
        yield Service(process.pid, said[0].split()[-1], log, process)
        started = descendants_of(process.pid)
    finally:
        started = started or descendants_of(process.pid)
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_SECONDS)
        finally:
            process.kill()
            process.wait()
            left = not gone(started, STOP_SECONDS)
            for pid in started if left else []:
                if stat_of(int(pid)) is not None:
                    os.kill(int(pid), signal.SIGKILL)
    assert not left, f"processes are left after the service: {log.read_text()[-3000:]}"


@dataclass
class Waiting:
    """Clients with the default patience that call one after another, each answer compared."""

    address: str
    alone: Alone
    clients: int = 4
    times: list[tuple[float, float]] = field(default_factory=list)  # of right answers: asked, answered
    failed: list[str] = field(default_factory=list)
    wrong: int = 0

    def __enter__(self) -> Waiting:
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._call, args=(n,)) for n in range(self.clients)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *ended: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(90.0)
        assert not any(thread.is_alive() for thread in self._threads)

    def after(self, when: float, seconds: float) -> float:
        """Seconds from `when` until the first call that began later was answered."""
        limit = when + seconds
        while time.monotonic() < limit:
            if late := [ended for began, ended in list(self.times) if began > when]:
                return min(late) - when
            time.sleep(0.01)
        raise AssertionError(f"no answer within {seconds:g} s; failed: {self.failed}")

    def _call(self, number: int) -> None:
        batch = self.alone.batch(4 + number, seed=number)
        expected = [self.alone.forward(layer, *batch) for layer in (0, 1)]
        with MoeClient(self.address) as client:
            turn = 0
            while not self._over.is_set():
                layer, turn, began = turn % 2, turn + 1, time.monotonic()
                try:
                    answer = client.forward(layer, *batch)
                except Exception as error:
                    self.failed.append(f"{type(error).__name__}: {error}")
                    continue
                if torch.allclose(answer, expected[layer], **CLOSE):
                    self.times.append((began, time.monotonic()))
                else:
                    self.wrong += 1
