"""Memory of a burst goes back to the system, though malloc is told to keep what is freed."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

BURST = """
import sys, threading, time
from moeserve.proto.heap import Trimming, keep_freed_memory, resident_bytes

assert keep_freed_memory()
before = resident_bytes()
if sys.argv[1] == "trims":
    assert Trimming(0.2).start()
time.sleep(0.3)

def burst():
    kept = []
    for at in range(400):
        block = bytearray(200_000 + at)
        if at % 40 == 0:
            kept.append(bytes(1000))  # so that an arena's top is not free
    del block
    blocks = [bytearray(200_000) for _ in range(200)]
    small.extend(kept)
    full.wait(30)
    time.sleep(0.5)  # and is given back after the first look at a process that grows no more

small, full = [], threading.Barrier(8)  # however long each takes, all give back at about the same time
threads = [threading.Thread(target=burst) for _ in range(8)]
[each.start() for each in threads]
[each.join() for each in threads]
most = resident_bytes()
until = time.monotonic() + 3
while time.monotonic() < until and resident_bytes() > 1.1 * before:
    time.sleep(0.05)
print(before, most, resident_bytes())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc_trim is glibc's")
@pytest.mark.parametrize("how", ["trims", "keeps"])
def test_what_a_burst_leaves_is_given_back(how: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BURST, how], capture_output=True, text=True, timeout=60, check=True
    )
    before, most, after = map(int, done.stdout.split())
    assert most > 3 * before
    assert (after <= 1.1 * before) == (how == "trims"), "without the thread it stays"
