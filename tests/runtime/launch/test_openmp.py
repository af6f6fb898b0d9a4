"""What ranks' processes are told of how long OpenMP's threads look for more to do."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from moeserve.runtime.launch import openmp

ASKS = """
import os
from concurrent.futures import ProcessPoolExecutor
from moeserve.runtime.launch.forking import warm_processes

with ProcessPoolExecutor(1, warm_processes(())) as pool:
    print(pool.submit(os.getenv, "GOMP_SPINCOUNT").result(), os.getenv("GOMP_SPINCOUNT"))
"""


def said_by(more: dict[str, str]) -> list[str]:
    """What a process of a service finds, and the one that has started it."""
    bare = {name: value for name, value in os.environ.items() if name not in (openmp.NAME, *openmp.OTHERS)}
    asked = subprocess.run(
        [sys.executable, "-c", ASKS],
        env=bare | more,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return asked.stdout.split()


def test_processes_of_a_service_find_it_and_their_parent_does_not() -> None:
    assert said_by({}) == [openmp.LOOKS, "None"]


@pytest.mark.parametrize("said", [{openmp.NAME: "7"}, {"OMP_WAIT_POLICY": "active"}])
def test_what_the_user_says_stays(said: dict[str, str]) -> None:
    assert said_by(said) == [said.get(openmp.NAME, "None")] * 2
    assert openmp.environment(said) == {}


def test_it_is_said_for_as_long_as_processes_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (openmp.NAME, *openmp.OTHERS):
        monkeypatch.delenv(name, raising=False)
    with openmp.for_ranks():
        assert os.environ[openmp.NAME] == openmp.LOOKS
    assert openmp.NAME not in os.environ
