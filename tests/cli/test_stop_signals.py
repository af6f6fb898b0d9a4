"""A signal to stop is heard wherever it meets the main thread."""

from __future__ import annotations

import subprocess
import sys

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
