"""`end`: ends a process that was started here."""

from __future__ import annotations

import subprocess
from typing import Any


def end(process: subprocess.Popen[Any], seconds: float) -> None:
    """Tells it to end, waits so long, and kills it then; it has ended when this returns."""
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
