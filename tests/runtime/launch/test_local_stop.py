"""The local launcher ends every process that it has started, also one that it is just starting."""

from __future__ import annotations

import os
import threading
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
    cluster = local_cluster.LocalCluster(house_config(tmp_path))
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
