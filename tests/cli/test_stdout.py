"""A reader of stdout that goes away: `serve` ends what it started, and no command shows a traceback."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from checkpoints import make_checkpoint
from processes import descendants_of, gone, is_forkserver

from moeserve.cli import STDOUT_CLOSED, main, stdout_is_closed
from moeserve.cli.serve import _say
from moeserve.cli.shown.lines import say

START_SECONDS = 90

FAKE_SERVE = """
import sys
from moeserve.cli import main, serve

def tell(word):
    sys.stderr.write(word + "\\n")

class Cluster:
    address = "127.0.0.1:1"
    def start(self):
        tell("started")
        sys.stdin.readline()
    def state(self): return ("failed", "no rank is left") if "fails" in sys.argv else ("serving", "")
    def metrics_targets(self): return ["127.0.0.1:2"]
    def probes_address(self):
        tell("serving")
        return "127.0.0.1:3"
    def stop(self): tell("stopped")

serve._cluster = lambda config: Cluster()
serve._check_served = lambda config: None
sys.exit(main(["serve", "weights"]))
"""
"""A service without ranks: it tells on stderr what becomes of it, and has started when stdin has a line. It
tells a line by one write: by `print` its end is another one under `-u`, and a line of the log comes between.
"""


def test_serve_ends_what_it_started() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", FAKE_SERVE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdin and process.stdout and process.stderr
        assert process.stderr.readline() == "started\n"
        assert process.stdout.readline() == "[model]\n"
        process.stdout.close()
        print(file=process.stdin, flush=True)
        assert process.wait(60) == STDOUT_CLOSED
        assert process.stderr.read() == "stopped\n"
    finally:
        ended(process)


@pytest.mark.parametrize(
    "word, code, last",
    [("goes on", 0, ""), ("fails", 1, "moeserve serve: the group failed: no rank is left\n")],
)
def test_serve_stops_though_nobody_reads_its_stdout(word: str, code: int, last: str) -> None:
    """`serve | less`, and nobody turns the page."""
    reader, writer = os.pipe()
    fill(writer)
    process = subprocess.Popen(
        [sys.executable, "-c", FAKE_SERVE, word],
        stdin=subprocess.PIPE,
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdin and process.stderr
        assert process.stderr.readline() == "started\n"
        print(file=process.stdin, flush=True)
        assert process.stderr.readline() == "serving\n"
        if not code:
            process.send_signal(signal.SIGTERM)
        assert process.wait(60) == code
        assert process.stderr.read() == f"stopped\n{last}"
    finally:
        ended(process)
        os.close(reader)
        os.close(writer)


@pytest.mark.parametrize("full", ["stdout", "stderr"])
def test_serve_goes_on_and_stops_though_a_disk_is_full(full: str) -> None:
    """Its output goes to a file, which cannot grow."""
    with open("/dev/full", "w") as disk:
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, full: disk}
        code = FAKE_SERVE.replace("sys.stderr", f"sys.{'stderr' if full == 'stdout' else 'stdout'}")
        process = subprocess.Popen(
            [sys.executable, "-u", "-c", code], stdin=subprocess.PIPE, text=True, **streams
        )
    told = process.stderr if full == "stdout" else process.stdout
    try:
        assert process.stdin and told
        said = iter(told.readline, "")
        assert "started\n" in said
        print(file=process.stdin, flush=True)
        assert "serving\n" in said
        process.send_signal(signal.SIGTERM)
        assert "stopped\n" in said
        assert process.wait(60) == 0
    finally:
        ended(process)


def fill(writer: int) -> None:
    """Fills a pipe, so that whoever writes to it waits for a reader."""
    beside = os.open(f"/proc/self/fd/{writer}", os.O_WRONLY | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(beside, bytes(4096))
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(beside, bytes(1))
    os.close(beside)


def test_a_long_line_goes_in_pieces_that_a_pipe_takes() -> None:
    reader, writer = os.pipe()
    text, read = "\u20ac" * 100_000, list[bytes]()
    with os.fdopen(writer, "w", encoding="utf-8") as stdout, os.fdopen(reader, "rb") as stdin:
        reading = threading.Thread(target=lambda: read.append(stdin.readline()))
        reading.start()
        say(stdout, text)
        reading.join(60)
    assert read == [f"{text}\n".encode()]


def ended(process: subprocess.Popen[str]) -> None:
    """Ends a process that a failed test left, and closes its pipes."""
    process.kill()
    process.wait(30)
    for stream in filter(None, (process.stdin, process.stdout, process.stderr)):
        stream.close()


def test_serve_ends_its_ranks(tmp_path: Path) -> None:
    make_checkpoint("qwen3_moe", tmp_path)
    words = "--launcher local --device cpu --port 0 --metrics-port -1 --data-parallel-size 2"
    process = subprocess.Popen(
        [sys.executable, "-m", "moeserve", "serve", str(tmp_path), *words.split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout and process.stderr
        started, deadline = set[str](), time.monotonic() + START_SECONDS
        while not any(map(is_forkserver, started)) and time.monotonic() < deadline:
            time.sleep(0.05)
            started |= set(descendants_of(process.pid))
        process.stdout.close()  # it prints again when its ranks are up
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
            started |= set(descendants_of(process.pid))
        assert process.poll() == STDOUT_CLOSED
        said = process.stderr.read()
    finally:
        ended(process)
    assert "Traceback" not in said and "BrokenPipeError" not in said
    assert len(started) >= 2 and gone(started, 30)


@pytest.mark.parametrize("buffered", [True, False], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize(
    "words",
    [["--help"], ["version"], ["plan", "--help"], ["plan", "--table", "vllm-switches"]],
    ids=" ".join,
)
def test_other_commands_end_without_a_word(words: list[str], buffered: bool) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "moeserve", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "" if buffered else "1"},
    )
    try:
        assert process.stdout and process.stderr
        process.stdout.close()
        assert process.stderr.read() == ""
        code = process.wait(60)
    finally:
        ended(process)
    # argparse leaves a help text that nobody reads, and calls it printed
    assert code == STDOUT_CLOSED or ("--help" in words and not buffered and code == 0)


def test_no_stdout_at_all_is_no_error() -> None:
    done = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m moeserve version >&-"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_another_pipe_that_breaks_is_an_error_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_: object) -> int:
        raise BrokenPipeError("a rank's stream was closed")

    monkeypatch.setattr("moeserve.cli.version.run", broken)
    assert main(["version"]) == 1
    assert capsys.readouterr().err == "moeserve version: a rank's stream was closed\n"


def test_a_pipe_is_closed_when_its_reader_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert not stdout_is_closed()
        os.close(reader)
        assert stdout_is_closed()
        monkeypatch.undo()


def test_a_line_of_serve_is_written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who reads stdout and the log from one file finds no line of the log inside `serving on ...`."""
    written: list[str] = []
    unbuffered = SimpleNamespace(write=written.append, flush=lambda: None)
    monkeypatch.setattr(sys, "stdout", unbuffered)
    _say("serving on 127.0.0.1:8000")
    assert written == ["serving on 127.0.0.1:8000\n"]
