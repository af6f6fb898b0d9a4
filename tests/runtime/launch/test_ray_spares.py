"""Spares for ranks under Ray: which are made, taken and ended."""

from __future__ import annotations

from typing import Any

import pytest
from ray.exceptions import RayActorError

from moeserve.runtime.launch.on_ray import ray_spares
from moeserve.runtime.launch.on_ray.ray_rank import NO_GPU, Placed

REST_SECONDS = 20.0


class Call:
    """A method of a fake actor; its calls are answered once the actor is ready."""

    def __init__(self, actor: Actor, answer: Any) -> None:
        self.actor, self.answer = actor, answer

    def remote(self) -> Call:
        return self


class Actor:
    """A fake handle."""

    def __init__(self, bundle: int, pid: int) -> None:
        self.bundle, self.ready, self.failed = bundle, False, False
        self.at = Placed(pid, f"node {bundle}", "a host", NO_GPU)
        self.place, self.warm = Call(self, self.at), Call(self, None)


class Made:
    """Spares over two bundles, and what was asked of Ray."""

    def __init__(self, wanted: int) -> None:
        self.actors = list[Actor]()
        self.killed = list[tuple[Actor, Placed | None]]()
        self.spares = ray_spares.Spares(
            ray_spares.SpareTerms(wanted, 2, 30.0, REST_SECONDS),
            self.create,
            lambda handle, place: self.killed.append((handle, place)),
        )

    def create(self, bundle: int) -> Actor:
        self.actors.append(Actor(bundle, 100 + len(self.actors)))
        return self.actors[-1]

    def warm(self, count: int) -> None:
        """Has so many become warm, one after another."""
        for _ in range(count):
            self.spares.keep(whole=True)
            self.actors[-1].ready = True
        self.spares.keep(whole=True)


@pytest.fixture(autouse=True)
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    clock = {"now": 0.0}

    def wait(calls: list[Call], num_returns: int, timeout: float) -> tuple[list[Call], list[Call]]:
        return [call for call in calls if call.actor.ready], []

    def get(call: Call) -> Any:
        if call.actor.failed:
            raise RayActorError
        return call.answer

    monkeypatch.setattr(ray_spares.ray, "wait", wait)
    monkeypatch.setattr(ray_spares.ray, "get", get)
    monkeypatch.setattr(ray_spares.time, "monotonic", lambda: clock["now"])
    return clock


def test_none_is_made_where_none_is_wanted() -> None:
    made = Made(0)
    made.spares.keep(whole=True)
    assert made.actors == [] and made.spares.pids() == []


def test_they_are_made_one_after_another_over_the_bundles() -> None:
    made = Made(3)
    made.spares.keep(whole=True)
    made.spares.keep(whole=True)
    assert [one.bundle for one in made.actors] == [0], "the first one is not warm yet"
    assert made.spares.pids() == []
    made.warm(3)
    assert [one.bundle for one in made.actors] == [0, 1, 0]
    assert made.spares.pids() == [100, 101, 102] and made.spares.pids("node 0") == [100, 102]


def test_one_of_the_node_is_taken_once_and_another_is_made() -> None:
    made = Made(2)
    made.warm(2)
    taken = made.spares.take("node 1")
    assert taken is not None and taken.place is not None and taken.place.pid == 101
    assert made.spares.take("node 1") is None, "it is taken, and the other one is elsewhere"
    made.warm(1)
    assert made.spares.pids() == [100, 102] and made.killed == []


def test_another_is_made_when_all_serve_again_or_that_takes_long(fake_ray: dict[str, float]) -> None:
    made = Made(1)
    made.spares.keep(whole=False)
    assert len(made.actors) == 1, "none was taken yet"
    made.actors[0].ready = True
    made.spares.keep(whole=True)
    fake_ray["now"] = 5.0
    assert made.spares.take("node 0") is not None
    made.spares.keep(whole=False)
    fake_ray["now"] = 5.0 + REST_SECONDS - 0.1
    made.spares.keep(whole=False)
    assert len(made.actors) == 1
    made.spares.keep(whole=True)
    assert len(made.actors) == 2
    made.actors[1].ready = True
    made.spares.keep(whole=False)
    assert made.spares.take("node 1") is not None
    fake_ray["now"] += REST_SECONDS
    made.spares.keep(whole=False)
    assert len(made.actors) == 3


def test_one_that_is_not_warm_is_not_taken() -> None:
    made = Made(1)
    made.spares.keep(whole=True)
    assert made.spares.take("node 0") is None


@pytest.mark.parametrize("how", ["late", "failed"])
def test_one_that_does_not_become_warm_is_ended(fake_ray: dict[str, float], how: str) -> None:
    made = Made(1)
    made.spares.keep(whole=True)
    if how == "late":
        fake_ray["now"] = 30.1
    else:
        made.actors[0].ready = made.actors[0].failed = True
    made.spares.keep(whole=True)
    assert made.killed == [(made.actors[0], None)] and len(made.actors) == 2


@pytest.mark.parametrize(
    ("look", "goes"),
    [(None, True), ((1.5, "it is stopped"), True), ((1.4, "it is stopped"), False), ((0.0, ""), False)],
)
def test_one_that_has_ended_or_is_stopped_goes(look: tuple[float, str] | None, goes: bool) -> None:
    made = Made(1)
    made.warm(1)
    made.spares.seen({100: look, 7: None}, 1.5)
    assert (made.spares.pids() == []) == goes
    assert made.killed == ([(made.actors[0], made.actors[0].at)] if goes else [])


def test_all_of_them_end_with_the_service_and_none_of_a_dead_node_is_asked_for() -> None:
    made = Made(2)
    made.warm(2)
    made.spares.lose_node("node 0")
    made.spares.stop()
    assert made.killed == [(made.actors[1], made.actors[1].at)] and made.spares.pids() == []
