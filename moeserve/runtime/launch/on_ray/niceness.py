"""Niceness of ranks under Ray, which gives its workers 15: they would yield the cores to all else of a host,
Ray's own processes among it, for each step.
"""

from __future__ import annotations

import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)

KEY = "RAY_worker_niceness"
"""By which Ray is told, in the environment of what starts it on a node."""

TASKS = Path("/proc/self/task")


def ask_ray() -> None:
    """A Ray that this process starts gives its workers none, where they may not end it themselves and the
    environment does not say otherwise.
    """
    with ThreadPoolExecutor(1) as thread:  # which ends with the niceness that it gave itself
        if not thread.submit(_may_end_it).result():
            os.environ.setdefault(KEY, "0")


def end_it() -> None:
    """All threads of this process have niceness 0, where they may; else a warning says who can see to it.
    What the environment has said to Ray stays.
    """
    if KEY in os.environ:
        return
    try:
        for task in TASKS.iterdir():
            with suppress(ProcessLookupError):
                if os.getpriority(os.PRIO_PROCESS, int(task.name)) > 0:
                    os.setpriority(os.PRIO_PROCESS, int(task.name), 0)
    except OSError as error:
        given = os.getpriority(os.PRIO_PROCESS, 0)
        text = "this rank has niceness %d and yields the cores to all else of a host: %s; start Ray with %s=0"
        log.warning(text, given, error, KEY)


def _may_end_it() -> bool:
    me = threading.get_native_id()
    try:
        os.setpriority(os.PRIO_PROCESS, me, os.getpriority(os.PRIO_PROCESS, me) + 1)
        os.setpriority(os.PRIO_PROCESS, me, 0)
    except OSError:  # it has no right to, or the system no niceness of threads
        return False
    return True
