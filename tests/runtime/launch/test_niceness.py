"""Niceness of ranks under Ray: it ends with all threads, and who may not end it is told."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest

from moeserve.runtime.launch.on_ray import niceness

RANK = """
import os, threading
os.environ.pop("RAY_worker_niceness", None)
from moeserve.runtime.launch.on_ray import niceness
os.nice(15)
ended = threading.Event()
thread = threading.Thread(target=ended.wait)
thread.start()
niceness.end_it()
print([os.getpriority(os.PRIO_PROCESS, task) for task in (0, thread.native_id)])
ended.set()
"""


def may_end_it() -> bool:
    return (
        subprocess.run(
            [sys.executable, "-c", "import os; os.nice(1); os.setpriority(os.PRIO_PROCESS, 0, 0)"],
            capture_output=True,
            check=False,
        ).returncode
        == 0
    )


def test_a_rank_that_may_has_none_with_all_its_threads() -> None:
    if not may_end_it():
        pytest.skip("this process may not lower its niceness")
    found = subprocess.run(
        [sys.executable, "-c", RANK], capture_output=True, text=True, timeout=60, check=True
    )
    assert found.stdout.strip() == "[0, 0]"


def test_what_the_environment_has_said_to_ray_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    given = list[int]()
    monkeypatch.setenv(niceness.KEY, "5")
    monkeypatch.setattr(os, "getpriority", lambda which, who: 5)
    monkeypatch.setattr(os, "setpriority", lambda which, who, priority: given.append(priority))
    niceness.end_it()
    assert given == []


def refuse(which: int, who: int, priority: int) -> None:
    if priority == 0:
        raise PermissionError(13, "Permission denied")


def test_a_rank_that_may_not_says_who_can(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(niceness.KEY, raising=False)
    monkeypatch.setattr(os, "getpriority", lambda which, who: 15)
    monkeypatch.setattr(os, "setpriority", refuse)
    with caplog.at_level(logging.WARNING):
        niceness.end_it()
    assert "niceness 15" in caplog.text and "RAY_worker_niceness=0" in caplog.text


@pytest.mark.parametrize(("given", "may", "asked"), [("", False, "0"), ("", True, None), ("5", False, "5")])
def test_ray_is_asked_where_ranks_may_not_end_it_and_nobody_says_otherwise(
    given: str, may: bool, asked: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(niceness.KEY, raising=False)
    if given:
        monkeypatch.setenv(niceness.KEY, given)
    monkeypatch.setattr(os, "setpriority", (lambda which, who, priority: None) if may else refuse)
    niceness.ask_ray()
    assert os.environ.get(niceness.KEY) == asked
