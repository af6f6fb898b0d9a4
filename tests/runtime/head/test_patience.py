"""What the head bears: deaths never end the service, who cannot start backs off and is reported."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_members import SECONDS, TOKEN, FakeMember, serving, until

from moeserve.dispatch.members import Members
from moeserve.runtime.epoch import Epoch
from moeserve.runtime.head import coordinator as coordinators
from moeserve.runtime.head.coordinator import Coordinator
from moeserve.runtime.head.patience import LEAST_SECONDS, MOST_SECONDS, Backoff, Patience
from moeserve.runtime.head.sequencer import StepPace
from moeserve.runtime.mesh import Mesh

MEMBERS = Members.of_ranks(2)


@pytest.fixture
def coordinator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Coordinator]:
    monkeypatch.setattr(coordinators, "SETTLE_SECONDS", 0.01)
    monkeypatch.setattr(coordinators, "BLAME_SECONDS", 0.01)
    made = Coordinator(
        Epoch.first(Mesh(2, 1, 2), layers=1, experts=4), (0,), StepPace(8, 16), "127.0.0.1", TOKEN
    )
    made.start()
    try:
        yield made
    finally:
        made.stop()


def test_pauses_double_up_to_a_bound_and_begin_anew() -> None:
    longest, shortest = Backoff(draw=lambda: 1.0), Backoff(draw=lambda: 0.0)
    assert [longest.next() for _ in range(9)] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]
    assert [shortest.next() for _ in range(4)] == [0.1, 0.1, 0.2, 0.4]
    for _ in range(2000):
        assert LEAST_SECONDS <= shortest.next() <= MOST_SECONDS
    longest.reset()
    assert (longest.failures, longest.next()) == (0, LEAST_SECONDS)


@pytest.mark.parametrize("served", [True, False])
def test_deaths_while_the_group_forms_never_end_the_service(coordinator: Coordinator, served: bool) -> None:
    members = (
        serving(coordinator, MEMBERS) if served else {seat: FakeMember(coordinator, seat) for seat in (0, 1)}
    )
    for _ in range(8):
        members[1].stream.close()
        until(lambda: 1 not in coordinator.seats())
        members[1] = FakeMember(coordinator, 1)
        members[1].entry("prepare")
    assert coordinator.progress().state == "preparing"
    for one in members.values():
        one.stream.close()
    until(lambda: not coordinator.seats())
    serving(coordinator, MEMBERS)


def test_a_generation_that_cannot_form_is_tried_again_without_an_end(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinators.Backoff, "next", _counted)
    members = serving(coordinator, MEMBERS)
    members[0].say("failed", reason="rank 0: a step failed")
    for one in members.values():
        one.entry("abort")
    for _ in range(6):
        for one in members.values():
            one.entry("prepare")
        members[0].say("failed", reason="rank 0: prepare failed: no memory")
        for one in members.values():
            one.entry("abort")
        assert coordinator.progress().reason == "rank 0: prepare failed: no memory"
    assert coordinator._retries.failures == 6
    for one in members.values():
        one.entry("prepare")
        one.say("prepared", bytes_read=0, weight_bytes=0)
    for one in members.values():
        one.entry("join")
        one.say("joined")
    coordinator.wait_serving(SECONDS)
    assert coordinator._retries.failures == 0


def _counted(backoff: Backoff) -> float:
    """A pause that no test has to wait for."""
    backoff.failures += 1
    return 0.0


def test_a_first_start_that_members_say_is_impossible_ends(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinators.Backoff, "next", _counted)
    members = [FakeMember(coordinator, seat) for seat in (0, 1)]
    for _ in range(coordinators.FIRST_ATTEMPTS):
        for one in members:
            one.entry("prepare")
        members[0].say("failed", reason="rank 0: prepare failed: no such tensor")
        for one in members:
            one.entry("abort")
    with pytest.raises(RuntimeError, match="no such tensor"):
        coordinator.wait_serving(SECONDS)


def test_a_rank_that_cannot_start_again_is_reported_and_the_service_goes_on(
    coordinator: Coordinator, caplog: pytest.LogCaptureFixture
) -> None:
    members = serving(coordinator, MEMBERS)
    members.pop(1).stream.close()
    until(lambda: 1 not in coordinator.seats())
    why = "rank 1 cannot start: RuntimeError: the GPU is lost"
    for _ in range(20):
        assert FakeMember(coordinator, 1, refused=why).entry("closed")
    progress = coordinator.progress()
    assert (progress.state, progress.reason) == ("forming", why)
    assert why in caplog.text
    members[0].stream.close()
    until(lambda: not coordinator.seats())
    serving(coordinator, MEMBERS)


def test_the_operators_limit_without_serving_ends_the_service(coordinator: Coordinator) -> None:
    coordinator.patience = Patience(give_up=0.2)
    members = serving(coordinator, MEMBERS)
    members[1].stream.close()
    with pytest.raises(RuntimeError) as ended:
        until(lambda: coordinator.progress().state != "serving")
        coordinator.wait_serving(SECONDS)
    assert (
        "not served for cluster.give_up_seconds = 0.2: ranks [1] are missing; rank 1 (pid 101) is lost"
        in str(ended.value)
    )
