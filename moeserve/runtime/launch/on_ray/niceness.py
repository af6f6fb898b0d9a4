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
"""By which Ray is told, in the environment of a worker or of what starts Ray on a node."""

TASKS = Path("/proc/self/task")


def workers_environment() -> dict[str, str]:
    """What workers are told of their niceness: what this process was; else nothing, where they may end it
    themselves; else to have none beside this process's own.
    """
    if KEY in os.environ:
        return {KEY: os.environ[KEY]}
    with ThreadPoolExecutor(1) as thread:  # which ends with the niceness that it gave itself
        own, may = thread.submit(_own_and_may_end_it).result()
    return {} if own <= 0 and may else {KEY: "0"}


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
        text = "niceness %d has this process yield the cores to all else of its host: %s; start Ray with %s=0"
        log.warning(text, given, error, KEY)


def _own_and_may_end_it() -> tuple[int, bool]:
    me = threading.get_native_id()
    own = os.getpriority(os.PRIO_PROCESS, 0)
    try:
        os.setpriority(os.PRIO_PROCESS, me, max(own, 0) + 1)
        os.setpriority(os.PRIO_PROCESS, me, 0)
    except OSError:  # it has no right to, or the system no niceness of threads
        return own, False
    return own, True
