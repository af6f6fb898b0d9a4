"""Ranks as Ray actors: which processes the head is told have ended, and the end of all."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from moeserve.runtime.head.reception import RankProcess
from moeserve.runtime.launch.on_ray import node_watches, ray_ranks
from moeserve.runtime.sections import ClusterConfig

SECONDS = 10.0


@pytest.fixture
def actors() -> Any:
    """Actors of a group without a rank; a test puts its own in their place."""
    told = list[dict[int, RankProcess]]()
    head: Any = SimpleNamespace(on_given_up=None, seats=dict, told=told, living=told.append, wanted=set)
    cluster = ClusterConfig(begin_seconds=SECONDS, stop_seconds=7.0, watch_seconds=0.2)
    config: Any = SimpleNamespace(parallel=SimpleNamespace(mesh=SimpleNamespace(ranks=0)), cluster=cluster)
    nobody: Any = None
    return ray_ranks.RankActors(config, head, nobody, {})


def placed(pid: int, host_id: str) -> ray_ranks._Actor:
    return ray_ranks._Actor(None, None, 0.0, None, pid, f"node of {host_id}", host_id)


def test_the_head_knows_the_process_of_each_rank_whatever_ids_others_have(actors: Any) -> None:
    actors._actors = {0: placed(7, "host a"), 1: None}
    actors._tell_living()
    first = {0: RankProcess(0, 7, "host a")}
    assert actors._head.told == [first], "rank 1's has ended, though one of the same id runs"
    actors._actors[1] = placed(7, "host c")
    actors._tell_living()
    actors._tell_living()
    both = {0: RankProcess(0, 7, "host a"), 1: RankProcess(1, 7, "host c")}
    assert actors._head.told[1:] == [both], "said once"
    actors._actors[1] = placed(0, "")
    actors._tell_living()
    assert actors._head.told[2:] == [first], "its heir has no process yet"


def test_an_heir_of_the_same_id_is_not_killed_in_place_of_who_was_before_it(actors: Any) -> None:
    killed = list[ray_ranks._Actor]()
    actors._kill = killed.append
    actors._actors = {0: placed(7, "host a"), 1: placed(7, "host c")}
    actors._head.on_given_up(RankProcess(1, 7, "host b"))
    actors._kill_given_up()
    assert killed == []
    actors._head.on_given_up(RankProcess(1, 7, "host c"))
    actors._kill_given_up()
    assert killed == [actors._actors[1]]


def test_what_the_watching_thread_starts_while_it_is_told_to_stop_is_ended(
    actors: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, go_on, killed = threading.Event(), threading.Event(), list[str]()

    def look() -> None:
        looks.set()
        assert go_on.wait(SECONDS)
        actors._watches._watches["a node"] = node_watches.NodeWatch("its watch", 0.0, 0.0)

    monkeypatch.setattr(actors, "_look", look)
    monkeypatch.setattr(ray_ranks.ray, "kill", killed.append)
    actors.start()
    stopping = threading.Thread(target=actors.stop)
    try:
        assert looks.wait(SECONDS)
        stopping.start()
        assert actors._ended.wait(SECONDS)
        stopping.join(0.2)
    finally:
        go_on.set()
    stopping.join(SECONDS)
    assert not stopping.is_alive() and killed == ["its watch"]


def test_the_thread_looks_at_once_when_the_head_gives_a_process_up_and_often_until_it_has_ended(
    actors: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_ranks, "LOOK_SECONDS", 10 * SECONDS)
    asked, looked = list[bool](), threading.Semaphore(0)
    actors._head.state = lambda: ("forming", "")
    actors._kill = lambda actor: None

    def look(*, again: bool) -> None:
        asked.append(again)
        if len(asked) == 4:
            actors._actors[0].gone = True
        looked.release()

    monkeypatch.setattr(actors._watches, "look", look)
    monkeypatch.setattr(actors._restarts, "due", lambda rank, now: False)
    actors._head.wanted = lambda: {0}
    actors._actors = {0: placed(7, "host a")}
    actors._actors[0].ended = "not yet"
    monkeypatch.setattr(ray_ranks, "is_ready", lambda ref: False)
    actors._watching.start()
    try:
        assert looked.acquire(timeout=SECONDS) and not looked.acquire(timeout=0.3)
        actors._head.on_given_up(RankProcess(0, 7, "host a"))
        for _ in range(3):
            assert looked.acquire(timeout=SECONDS)
        assert not looked.acquire(timeout=0.3), "it has ended"
        assert asked == [False, True, True, True]
        assert actors._head.told == [{0: RankProcess(0, 7, "host a")}, {}]
    finally:
        actors._ended.set()
        actors._news.set()
        actors._watching.join(SECONDS)


def test_ranks_that_are_told_to_stop_have_so_long_to_end(
    actors: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited, killed = list[float](), list[ray_ranks._Actor]()
    monkeypatch.setattr(ray_ranks.ray, "wait", lambda ends, num_returns, timeout: waited.append(timeout))
    monkeypatch.setattr(actors, "_kill", killed.append)
    actors._actors = {0: placed(7, "host a")}
    actors._actors[0].ended = "its end"
    actors.stop()
    assert waited == [7.0] and killed == [actors._actors[0]]


def test_a_node_whose_watch_does_not_answer_is_asked_for(
    actors: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[str]()

    def lives(node: str) -> bool:
        asked.append(node)
        return True

    monkeypatch.setattr(node_watches, "is_ready", lambda answer: False)
    monkeypatch.setattr(node_watches, "_lives", lives)
    now = time.monotonic()
    watch = node_watches.NodeWatch("its watch", now, now + SECONDS, answer="not yet")
    actors._watches._watches["a node"] = watch
    actors._watches.look()
    assert not asked
    watch.late_at = now - 0.3  # more than cluster.watch_seconds
    actors._watches.look()
    assert asked == ["a node"]
