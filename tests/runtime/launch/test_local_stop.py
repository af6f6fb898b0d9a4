"""The local launcher ends every process that it has started, also one that it is just starting."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from checkpoints import make_checkpoint
from houses import house_config

from moeserve.runtime.launch import local_cluster

SECONDS = 10.0


def test_a_rank_that_is_just_being_started_again_is_ended_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint("qwen3_moe", tmp_path)
    config = house_config(tmp_path, cluster__stop_seconds=1.0)  # to end by itself, which it does not
    cluster = local_cluster.LocalCluster(config)
    begun, go_on, made = threading.Event(), threading.Event(), list["Process"]()

    class Process:
        """A rank's process: the first one ends at once, and the next one takes long to start."""

        exitcode = 1

        def __init__(self, **named: object) -> None:
            self.pid, self.alive = os.getpid(), False
            self.sentinel, self.open = os.pipe()
            made.append(self)

        def start(self) -> None:
            if len(made) > 1:
                begun.set()
                assert go_on.wait(SECONDS)
                self.alive = True

        def is_alive(self) -> bool:
            return self.alive

        def join(self, seconds: float) -> None: ...

        def kill(self) -> None:
            self.alive = False

    monkeypatch.setattr(cluster.ranks._context, "Process", Process)
    monkeypatch.setattr(cluster.head.coordinator, "wait_serving", lambda seconds: None)
    stopping = threading.Thread(target=cluster.stop)
    cluster.start()
    try:
        assert begun.wait(SECONDS)
        stopping.start()
        assert cluster.ranks._watched.wait(SECONDS)
        stopping.join(0.2)
    finally:
        go_on.set()
    stopping.join(SECONDS)
    cluster.ranks._watching.join(SECONDS)
    assert not stopping.is_alive() and not cluster.ranks._watching.is_alive()
    assert [one.alive for one in made] == [False, False]


def test_a_rank_that_has_left_is_no_matter_where_the_head_has_yet_to_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint("qwen3_moe", tmp_path)
    ranks = local_cluster.LocalCluster(house_config(tmp_path)).ranks
    monkeypatch.setattr(ranks._head, "seats", lambda: {7: SimpleNamespace(pid=os.getpid(), generation=3)})
    ranks._note_joined()


def test_a_rank_whose_process_cannot_be_started_now_is_started_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host may have no processes left, or no memory: the others serve on."""
    make_checkpoint("qwen3_moe", tmp_path)
    cluster = local_cluster.LocalCluster(house_config(tmp_path))
    ranks, made = cluster.ranks, list["Process"]()

    class Process:
        """The first one ends at once; the next two cannot be started."""

        exitcode, sentinel = 1, os.pipe()[0]

        def __init__(self, **named: object) -> None:
            self.pid, self.alive = os.getpid(), False

        def start(self) -> None:
            made.append(self)
            if len(made) in (2, 3):
                raise BlockingIOError("Resource temporarily unavailable")
            self.alive = len(made) > 1

        def is_alive(self) -> bool:
            return self.alive

        def join(self, seconds: float) -> None: ...

        def kill(self) -> None:
            self.alive = False

    monkeypatch.setattr(ranks._context, "Process", Process)
    monkeypatch.setattr(cluster.head.coordinator, "wait_serving", lambda seconds: None)
    with cluster:
        limit = time.monotonic() + SECONDS
        while len(made) < 4 and time.monotonic() < limit:
            time.sleep(0.01)
        assert len(made) == 4 and ranks._watching.is_alive()
        assert cluster.state()[0] == "forming"
