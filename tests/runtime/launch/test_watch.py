"""What the kernel tells of processes: which run, which do not and for how long, which have ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moeserve.runtime.launch.watch import ProcessWatch, Stat, stat_of

PID = 7


class Kernel:
    """A process on a clock of the test's."""

    def __init__(self) -> None:
        self.now, self.stat = 100.0, Stat("S", 1000)
        self.watch = ProcessWatch(lambda pid: self.stat, lambda: self.now)

    def after(self, seconds: float, state: str) -> tuple[float, str] | None:
        self.now += seconds
        self.stat = Stat(state, 1000)
        return self.watch.look([PID])[PID]


def test_a_stopped_process_is_told_with_how_long() -> None:
    kernel = Kernel()
    assert kernel.after(0.0, "S") == (0.0, "")
    assert kernel.after(9.0, "T") == (0.0, "it is stopped (state T)"), "it may have run until now"
    assert kernel.after(1.0, "T") == (1.0, "it is stopped (state T)")
    assert kernel.after(1.0, "T") == (2.0, "it is stopped (state T)")
    assert kernel.after(1.0, "S") == (0.0, "")
    assert kernel.after(1.0, "t") == (0.0, "it is stopped (state t)")
    assert kernel.after(1.0, "t") == (1.0, "it is stopped (state t)")


@pytest.mark.parametrize("state", ["S", "D", "I", "R"])
def test_one_that_waits_for_whatever_also_a_processor_runs(state: str) -> None:
    kernel = Kernel()
    assert [kernel.after(600.0, state) for _ in range(3)] == [(0.0, "")] * 3


def test_another_process_of_the_same_id_is_not_the_one_and_not_killed() -> None:
    kernel = Kernel()
    kernel.after(0.0, "S")
    kernel.stat = Stat("S", 2000)
    assert kernel.watch.look([PID]) == {PID: None}
    assert kernel.watch.look([PID]) == {PID: None}, "and stays so"
    assert kernel.watch.kill(PID)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_real_process_is_seen_stopped_and_killed(sleeper: subprocess.Popen[bytes]) -> None:
    watch, pid = ProcessWatch(), sleeper.pid
    assert watch.look([pid]) == {pid: (0.0, "")}
    os.kill(pid, signal.SIGSTOP)
    until = time.monotonic() + 5.0
    while (seen := watch.look([pid])[pid]) is not None and seen[0] < 0.3:
        assert time.monotonic() < until
        time.sleep(0.02)
    assert seen is not None and seen[1] == "it is stopped (state T)"
    assert not watch.kill(pid), "not before it has ended"
    while not watch.kill(pid):
        assert time.monotonic() < until
    assert watch.look([pid]) == {pid: None}
    assert stat_of(pid) is None, "nobody has collected it yet, and nothing of it runs"


def test_a_held_interpreter_runs(sleeper: subprocess.Popen[bytes]) -> None:
    """A long call that holds the interpreter's lock: nothing of Python runs, and the process does."""
    text = "import ctypes; print(1, flush=True); ctypes.PyDLL(None).usleep(1_200_000)"
    with subprocess.Popen([sys.executable, "-S", "-c", text], stdout=subprocess.PIPE) as held:
        assert held.stdout is not None and held.stdout.readline()
        watch, longest = ProcessWatch(), 0.0
        while held.poll() is None:
            seen = watch.look([held.pid])[held.pid]
            longest = max(longest, 0.0 if seen is None else seen[0])
            time.sleep(0.02)
        assert longest < 0.5


def test_a_name_with_brackets_and_blanks_is_read(tmp_path: Path) -> None:
    fields = ["T", *("0" for _ in range(10)), "3", "4", *("0" for _ in range(6)), "99", "0"]
    (tmp_path / "5").mkdir()
    (tmp_path / "5" / "stat").write_text(f"5 (a ) S (b) {' '.join(fields)}")
    assert stat_of(5, tmp_path) == Stat("T", 99)
    assert stat_of(6, tmp_path) is None


def said_by(text: str, path: Path) -> str:
    """What a script says, in a process of its own: others of this one come from the same forkserver."""
    path.write_text(text)
    found = subprocess.run(
        [sys.executable, str(path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout


ORPHANED = """
import multiprocessing, os, signal, time
from multiprocessing import forkserver
from moeserve.runtime.launch.watch import UNKNOWN, Child

if __name__ == "__main__":
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=time.sleep, args=(60,))
    process.start()
    child = Child(process)
    assert child.runs and child.sentinel is not None
    os.kill(forkserver._forkserver._forkserver_pid, signal.SIGKILL)
    process.join(10)
    assert not process.is_alive() and process.exitcode == UNKNOWN, "multiprocessing says that it has ended"
    assert child.runs and child.sentinel is None
    child.join(0.1)
    assert child.runs
    child.kill()
    child.join(10)
    assert not child.runs
    print("ended")
"""


def test_a_process_outlives_its_forkserver(tmp_path: Path) -> None:
    assert said_by(ORPHANED, tmp_path / "orphaned.py") == "ended\n"


ASKED_BY_MANY = """
import multiprocessing, os, signal, sys, threading, time
from moeserve.runtime.launch.watch import Child

if __name__ == "__main__":
    sys.setswitchinterval(1e-5)
    context = multiprocessing.get_context("forkserver")
    for _ in range(40):
        process = context.Process(target=time.sleep, args=(60,))
        process.start()
        child, told = Child(process), []

        def ask():
            while child.runs:
                pass
            told.append(child.exitcode)

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        os.kill(child.pid, signal.SIGKILL)
        child.join(10)
        for thread in threads:
            thread.join(10)
        assert told == [-9] * 4, told
    print("told")
"""


def test_all_who_ask_at_once_are_told_how_a_process_has_ended(tmp_path: Path) -> None:
    assert said_by(ASKED_BY_MANY, tmp_path / "asked.py") == "told\n"
