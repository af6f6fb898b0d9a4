"""A signal to stop is heard wherever it meets the main thread."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from processes import descendants_of, gone

from moeserve.proto.client import MoeClient
from moeserve.runtime.launch.watch import stat_of

MET_AT_EVERY_LINE = """
import os, signal, sys
from moeserve.cli.serve import _Signals

def met(line):
    '''Whether the main thread had such a line; it is told to stop there, and has to hear it.'''
    signals, count = _Signals(), 0

    def trace(frame, event, argument):
        nonlocal count
        count += event == "line"
        if event == "line" and count == line:
            os.kill(os.getpid(), signal.SIGTERM)
        return trace

    sys.settrace(trace)
    heard = signals.wait(0.001)
    sys.settrace(None)
    assert count < line or heard or signals.wait(0.0), line
    return count >= line

lines = 0
while met(lines + 1):
    lines += 1
print(lines)
"""


def test_a_signal_is_heard_at_every_line_of_the_wait() -> None:
    found = subprocess.run(
        [sys.executable, "-c", MET_AT_EVERY_LINE], capture_output=True, text=True, timeout=60, check=False
    )
    assert found.returncode == 0, found.stderr
    assert int(found.stdout) > 0


HEARING = [
    sys.executable,
    "-c",
    "import os, signal, sys\n"
    "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
    "os.execvp(sys.argv[1], sys.argv[1:])",
]
"""Runs a command that does not ignore SIGHUP, though whoever runs the tests does (`nohup make test`)."""


@pytest.mark.parametrize("ignored", [False, True], ids=["heard", "nohup"])
def test_the_end_of_its_terminal_stops_a_service_as_sigterm_does(tmp_path: Path, ignored: bool) -> None:
    """It reaches every process. Under `nohup` the service goes on."""
    make_checkpoint("qwen3_moe", tmp_path)
    command = [sys.executable, "-m", "moeserve", "serve", "--checkpoint", str(tmp_path), "--device", "cpu"]
    command += ["--launcher", "local", "--port", "0", "--metrics-port", "-1", "--data-parallel-size", "2"]
    process = subprocess.Popen(
        [*(["nohup"] if ignored else HEARING), *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    started: list[str] = []
    try:
        assert process.stdout is not None
        (serving,) = itertools.islice((one for one in process.stdout if one.startswith("serving on")), 1)
        started = descendants_of(process.pid)
        os.killpg(process.pid, signal.SIGHUP)
        if ignored:
            with MoeClient(serving.split()[-1]) as client:
                before = client.status()
                assert before.state == "serving" and before.generation == 1
            process.send_signal(signal.SIGTERM)
        printed, _ = process.communicate(timeout=60)
        assert (process.returncode, printed) == (0, "stopping\n")
        assert started and gone(started, 30)
    finally:
        process.kill()
        process.communicate()
        for pid in started if not gone(started, 0) else []:
            if stat_of(int(pid)) is not None:
                os.kill(int(pid), signal.SIGKILL)
