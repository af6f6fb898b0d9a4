"""Words in shared memory that are waited for asleep."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
import time

import pytest

from moeserve.proto.passes.futex import SUPPORTED, Words

LONG = 20.0
OTHER = """
import mmap, sys, time
from moeserve.proto.passes.futex import Words
memory = memoryview(mmap.mmap(int(sys.argv[1]), 4096)).cast("Q")
print("there", flush=True)
sys.stdin.readline()
Words(memory).write(3, 7)
sys.stdin.readline()
"""

pytestmark = pytest.mark.skipif(not SUPPORTED, reason="futexes are of Linux on x86-64 and aarch64")


def shared() -> tuple[int, memoryview]:
    descriptor = os.memfd_create("words")
    os.ftruncate(descriptor, 4096)
    return descriptor, memoryview(mmap.mmap(descriptor, 4096)).cast("Q")


def test_another_process_wakes_who_sleeps() -> None:
    descriptor, memory = shared()
    words = Words(memory)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", OTHER, str(descriptor)]
    with subprocess.Popen(command, pass_fds=[descriptor], **pipes) as other:  # type: ignore[call-overload]
        assert other.stdout.readline() == "there\n"
        began = time.monotonic()
        threading.Timer(0.2, lambda: (other.stdin.write("\n"), other.stdin.flush())).start()
        while memory[3] != 7 and time.monotonic() - began < LONG:
            words.sleep(3, 0, LONG)
        lasted = time.monotonic() - began
        other.stdin.write("\n")
        other.stdin.flush()
    os.close(descriptor)
    assert memory[3] == 7
    assert 0.1 < lasted < LONG / 2


def test_a_word_that_has_changed_is_not_waited_for() -> None:
    descriptor, memory = shared()
    memory[5] = 2
    began = time.monotonic()
    assert Words(memory).sleep(5, 1, LONG)
    assert time.monotonic() - began < LONG / 2
    os.close(descriptor)


def test_a_sleep_ends_unless_somebody_wakes() -> None:
    descriptor, memory = shared()
    began = time.monotonic()
    assert not Words(memory).sleep(0, 0, 0.05)
    assert 0.04 < time.monotonic() - began < LONG
    os.close(descriptor)


def test_a_word_that_was_changed_by_who_wakes_nobody_is_found_when_the_sleep_is_over() -> None:
    descriptor, memory = shared()
    threading.Timer(0.05, lambda: memory.__setitem__(2, 9)).start()
    began = time.monotonic()
    assert not Words(memory).sleep(2, 0, 0.2)
    assert time.monotonic() - began > 0.19 and memory[2] == 9
    os.close(descriptor)


@pytest.mark.parametrize("value", [5 << 32 | 1, 4 << 32 | 2])
def test_either_half_of_a_word_wakes(value: int) -> None:
    descriptor, memory = shared()
    memory[1] = seen = 4 << 32 | 1
    words = Words(memory)
    threading.Timer(0.1, lambda: words.write(1, value)).start()
    began = time.monotonic()
    while memory[1] == seen and time.monotonic() - began < LONG:
        words.sleep(1, seen, LONG, value)
    assert time.monotonic() - began < LONG / 2
    assert words.sleep(1, seen, LONG, value), "it has changed before"
    os.close(descriptor)
