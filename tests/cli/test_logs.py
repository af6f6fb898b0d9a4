"""The log of a whole service as an operator starts it: who says what, and levels that change meanwhile."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from ports import free_ports

from moeserve.cli import main
from moeserve.proto.client import MoeClient

SECONDS = 60.0
FIELDS = {"time", "level", "rank", "generation", "epoch", "logger", "message"}


class Service:
    """A `moeserve serve` of two ranks that logs JSON."""

    def __init__(self, checkpoint: Path) -> None:
        flags = ["--launcher", "local", "--port", "0", "--metrics-port", "0", "--device", "cpu"]
        flags += ["--data-parallel-size", "2", "--enable-expert-parallel", "--log-format", "json"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "moeserve", "serve", str(checkpoint), *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.lines: list[dict[str, Any]] = []
        self.odd: list[str] = []  # what is no object on stderr
        threading.Thread(target=self._read, daemon=True).start()
        late = threading.Timer(SECONDS, self.process.kill)
        late.start()
        self.address = ""
        for line in self.process.stdout or ():
            if line.startswith("serving on "):
                self.address = line.split()[-1]
                break
        late.cancel()
        assert self.address, self.lines

    def _read(self) -> None:
        for line in self.process.stderr or ():
            try:
                self.lines.append(json.loads(line))
            except ValueError:
                self.odd.append(line)

    def said(self, **wanted: Any) -> dict[str, Any]:
        """The first line with those fields, of whose message the given one is a part; waits for it."""
        part = wanted.pop("message", "")

        def found() -> list[dict[str, Any]]:
            return [line for line in self.lines if wanted.items() <= line.items() and part in line["message"]]

        until(lambda: bool(found()), lambda: f"{wanted} {part!r} in {self.lines}")
        return found()[0]

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


def until(true: Callable[[], bool], what: Callable[[], str]) -> None:
    end = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < end, what()
        time.sleep(0.05)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    path = tmp_path_factory.mktemp("qwen3")
    make_checkpoint("qwen3_moe", path)
    made = Service(path)
    try:
        yield made
    finally:
        made.stop()


def test_the_head_logs_as_ranks_do(service: Service) -> None:
    head = service.said(rank="head", level="info", message="generation 1 serves epoch 1 with 2 members")
    assert head.keys() == FIELDS and (head["generation"], head["epoch"]) == (1, 1)
    for rank in (0, 1):
        one = service.said(rank=rank, message="joined generation 1")
        assert one.keys() == FIELDS and (one["generation"], one["epoch"]) == (1, 1)
    assert not service.odd


def test_what_the_front_door_refuses_is_a_line_of_its_own(
    service: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rebalance", service.address, "--policy", "wish"]) == 2
    service.said(rank="door", message="a call ends with INVALID_ARGUMENT (bad_request): policy: ")
    capsys.readouterr()


def test_levels_change_in_every_process_and_in_those_that_start_later(
    service: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["log-level", service.address]) == 0
    assert capsys.readouterr().out.split() == ["logger", "level", "moeserve", "info"]
    assert main(["log-level", service.address, "debug", "--logger", "moeserve.runtime.rank", "--json"]) == 0
    levels = json.loads(capsys.readouterr().out)["levels"]
    assert {each["logger"]: each["level"] for each in levels} == {
        "moeserve": "info",
        "moeserve.runtime.rank": "debug",
    }
    text = "logger moeserve.runtime.rank logs from level debug on"
    for whose in ("head", 0, 1):
        service.said(rank=whose, message=text)
    assert main(["log-level", service.address, "loud"]) == 2
    assert "level: 'loud'; known: debug, info, warning, error" in capsys.readouterr().err

    with MoeClient(service.address) as client:
        (pid,) = [one.pid for one in client.status().ranks if one.rank == 1]
        os.kill(pid, signal.SIGKILL)
        service.said(rank="head", level="warning", message=f"rank 1 (pid {pid}) is lost")
        service.said(
            rank="launcher", level="warning", message=f"rank 1 (pid {pid}) ended with -9; it is started again"
        )
        service.said(rank=0, level="info", message="is aborted: rank 1")
        before = service.said(rank=1, generation=1, message="joined generation 1")
        joined = {"rank": 1, "logger": before["logger"], "level": before["level"]}
        until(
            lambda: any(
                joined.items() <= line.items() and line["generation"] > 1 and "joined" in line["message"]
                for line in service.lines
            ),
            lambda: f"rank 1 joins again in {service.lines}",
        )
    again = [line for line in service.lines if line["rank"] == 1 and text in line["message"]]
    assert len(again) == 2, "the rank that started later has the level too"


def test_a_rank_that_cannot_start_says_so_in_the_log_alone(tmp_path: Path) -> None:
    """multiprocessing writes what ends a process to stderr by itself: past format and limits of the log."""
    make_checkpoint("qwen3_moe", tmp_path)
    (tmp_path / "service.toml").write_text("[cluster]\nstart_timeout_seconds = 6.0\n")
    first = free_ports(2)
    with socket.create_server(("127.0.0.1", first + 1)):  # of rank 0's exporter
        flags = ["--launcher", "local", "--port", "0", "--metrics-port", str(first), "--device", "cpu"]
        flags += ["--log-format", "json"]
        given = [str(tmp_path), str(tmp_path / "service.toml"), *flags]
        done = subprocess.run(
            [sys.executable, "-m", "moeserve", "serve", *given],
            capture_output=True, text=True, timeout=SECONDS, check=False,
        )  # fmt: skip
    *lines, last = done.stderr.splitlines()
    odd = [line for line in lines if not line.startswith("{")]
    assert not odd, odd[:5]
    said = [line for line in map(json.loads, lines) if "traceback" in line]
    assert said and all("Address already in use" in line["message"] for line in said)
    assert done.returncode == 1 and "Address already in use" in last
