"""Processes of a service end by their launcher's word, and with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from processes import gone

from moeserve.runtime.launch.forking import begin


def test_a_forkserver_that_is_killed_meanwhile_is_named() -> None:
    def start() -> None:
        raise EOFError("unexpected EOF")

    with pytest.raises(OSError, match="cannot be forked: the forkserver ended meanwhile"):
        begin(SimpleNamespace(start=start))  # type: ignore[arg-type]


LEAVES_ONE = """
import os, signal, time
from moeserve.runtime.launch.forking import DEAF, hear_no_signals, warm_processes

def run(pipe):
    hear_no_signals()
    os.kill(os.getpid(), signal.SIGTERM)
    pipe.send(os.getpid())
    time.sleep(600)

if __name__ == "__main__":
    context = warm_processes((), heed_sigterm=False)
    mine, theirs = context.Pipe()
    context.Process(target=run, args=(theirs,), name=f"{DEAF}-one", daemon=True).start()
    print(mine.recv())
"""


def test_a_program_that_stops_nothing_ends_and_so_does_what_it_started(tmp_path: Path) -> None:
    program = tmp_path / "leaves_one.py"
    program.write_text(LEAVES_ONE)
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert gone(done.stdout.split(), 60.0)
