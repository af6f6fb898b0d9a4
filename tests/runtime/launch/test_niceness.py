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


@pytest.mark.parametrize(
    ("given", "own", "may", "told"),
    [
        ("", 0, True, {}),
        ("", 0, False, {niceness.KEY: "0"}),
        ("", 10, True, {niceness.KEY: "0"}),
        ("", -5, False, {niceness.KEY: "0"}),
        ("5", 0, True, {niceness.KEY: "5"}),
    ],
)
def test_workers_are_told_where_they_may_not_end_it_and_what_somebody_has_said(
    given: str, own: int, may: bool, told: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(niceness.KEY, given)
    if not given:
        monkeypatch.delenv(niceness.KEY)
    now = [own]

    def change(which: int, who: int, priority: int) -> None:
        if priority < now[0] and not may:
            raise PermissionError(13, "Permission denied")
        now[0] = priority

    monkeypatch.setattr(os, "getpriority", lambda which, who: own)
    monkeypatch.setattr(os, "setpriority", change)
    assert niceness.workers_environment() == told
