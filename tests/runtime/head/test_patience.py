"""What the head bears: deaths never end the service, who cannot start backs off and is reported."""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Iterator

import pytest
from fake_members import SECONDS, TOKEN, FakeMember, head_of, serving, until

from moeserve.dispatch.members import Members
from moeserve.runtime.control.reached import Phase, Reached
from moeserve.runtime.control.stream import StreamClosed, connect
from moeserve.runtime.epoch import Epoch
from moeserve.runtime.head.coordinator import Coordinator
from moeserve.runtime.head.generations import blame, parted, rendezvous
from moeserve.runtime.head.generations.patience import (
    LEAST_SECONDS,
    MOST_SECONDS,
    Backoff,
    Formation,
    Patience,
)
from moeserve.runtime.head.placing.changes import rebalance
from moeserve.runtime.head.placing.pending_change import Outcome
from moeserve.runtime.head.reception import RankProcess
from moeserve.runtime.mesh import Mesh
from moeserve.runtime.ordering.sequencer import StepPace

MEMBERS = Members.of_ranks(2)
ANSWERED_SECONDS = 0.5  # in which a member that runs has said so, or it would be named as well


@pytest.fixture
def coordinator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Coordinator]:
    monkeypatch.setattr(rendezvous, "SETTLE_SECONDS", 0.01)
    monkeypatch.setattr(blame, "BLAME_SECONDS", 0.01)
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
    if not served:
        for one in members.values():
            one.entry("prepare")
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
    monkeypatch.setattr(Backoff, "next", _counted)
    monkeypatch.setattr(blame, "BLAME_SECONDS", ANSWERED_SECONDS)
    told, why = list[str](), "rank 0: prepare failed: no memory"
    coordinator.on_change = lambda progress: told.append(progress.reason)
    members = serving(coordinator, MEMBERS)
    members[0].say("failed", reason="rank 0: a step failed")
    for one in members.values():
        one.entry("abort")
    for _ in range(6):
        for one in members.values():
            one.entry("prepare")
        told.clear()
        members[0].say("failed", reason=why)
        for one in members.values():
            assert one.entry("abort")["reason"] == why
        until(lambda: why in told)
    assert coordinator.generations._rendezvous._retries.failures == 6
    for one in members.values():
        one.entry("prepare")
        one.say("prepared", bytes_read=0, weight_bytes=0, lacks=[])
    for one in members.values():
        one.entry("join")
        one.say("joined")
    coordinator.wait_serving(SECONDS)
    assert coordinator.generations._rendezvous._retries.failures == 0


def _counted(backoff: Backoff) -> float:
    """A pause that no test has to wait for."""
    backoff.failures += 1
    return 0.0


def test_members_that_cannot_prepare_at_the_first_start_are_tried_again_and_reported(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Backoff, "next", _counted)
    members = [FakeMember(coordinator, seat) for seat in (0, 1)]
    for _ in range(6):
        for one in members:
            one.entry("prepare")
        members[0].say("failed", reason="rank 0: prepare failed: no such tensor")
        for one in members:
            one.entry("abort")
    assert coordinator.generations._rendezvous._retries.failures == 6
    assert coordinator.progress().aborted == "rank 0: prepare failed: no such tensor"
    with pytest.raises(TimeoutError, match=r"did not serve within .*no such tensor"):
        coordinator.wait_serving(0.1)
    for one in members:
        one.entry("prepare")
        one.say("prepared", bytes_read=0, weight_bytes=0, lacks=[])
    for one in members:
        one.entry("join")
        one.say("joined")
    coordinator.wait_serving(SECONDS)


def test_a_rank_that_cannot_start_at_first_is_waited_for_until_the_operators_limit(
    coordinator: Coordinator,
) -> None:
    why = "rank 1 cannot start: OSError: the GPU is in use"
    for _ in range(5):
        assert FakeMember(coordinator, 1, refused=why).entry("closed")
    assert (coordinator.progress().state, coordinator.progress().reason) == ("forming", why)
    with pytest.raises(TimeoutError, match=r"did not serve within .*the GPU is in use"):
        coordinator.wait_serving(0.1)
    serving(coordinator, MEMBERS)


def test_a_rank_whose_configuration_is_wrong_ends_only_a_service_that_never_served(
    coordinator: Coordinator,
) -> None:
    why = "rank 1 cannot start: ConfigError: no such folder"
    members = serving(coordinator, MEMBERS)
    members.pop(1).stream.close()
    until(lambda: 1 not in coordinator.seats())
    assert FakeMember(coordinator, 1, refused=why, for_good=True).entry("closed")
    assert (coordinator.progress().state, coordinator.progress().reason) == ("forming", why)
    with head_of() as another:
        assert FakeMember(another, 1, refused=why, for_good=True).entry("closed")
        with pytest.raises(RuntimeError, match="no such folder"):
            another.wait_serving(SECONDS)


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
    coordinator.generations.patience = Patience(give_up=1.5)
    members = serving(coordinator, MEMBERS)
    members[1].stream.close()
    with pytest.raises(RuntimeError) as ended:
        until(lambda: coordinator.progress().state != "serving")
        coordinator.wait_serving(SECONDS)
    assert (
        "not served for cluster.give_up_seconds = 1.5: ranks [1] are missing; rank 1 (pid 101) is lost"
        in str(ended.value)
    )


def test_who_does_not_answer_is_named_before_who_waited_for_it(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blame, "BLAME_SECONDS", 2 * ANSWERED_SECONDS)
    members = serving(coordinator, MEMBERS)
    members[1].runs = False
    members[0].say("failed", reason="rank 0: step failed: timed out")
    told = members[0].entry("abort")["reason"]
    assert told == "no answer from rank 1 (pid 101); rank 0: step failed: timed out"
    members[1].entry("abort")
    for one in members.values():
        one.entry("prepare")
        one.say("prepared", bytes_read=0, weight_bytes=0, lacks=[])
    for one in members.values():
        one.entry("join")
        one.say("joined")
    coordinator.wait_serving(SECONDS)
    members[1].runs = True
    members[0].say("failed", reason="rank 0: step failed: a bug")
    assert members[0].entry("abort")["reason"] == "rank 0: step failed: a bug", "who answers is not named"


def formation() -> Formation:
    return Formation((0, 1), Patience(answer=10.0, prepare=100.0, join=50.0), now=5.0)


def test_who_does_not_answer_is_found_and_who_answers_has_longer() -> None:
    forming = formation()
    assert forming.due() == 15.0
    forming.heard(0, 6.0)
    assert (forming.due(), forming.silent(14.9)) == (15.0, {})
    assert forming.silent(15.0) == {1: "it did not answer within cluster.answer_seconds = 10"}
    forming.heard(1, 14.0)
    assert forming.due() == 106.0
    forming.heard(0, 90.0)  # one more layer
    forming.has_prepared(1, 91.0)
    assert (forming.due(), forming.silent(189.0)) == (190.0, {})
    assert forming.silent(190.0) == {0: "it read no layer for cluster.prepare_seconds = 100"}


def test_who_does_not_leave_its_step_is_found_before_it_has_read_anything() -> None:
    forming = Formation((0, 1), Patience(leave=20.0), now=5.0)
    for seat in (0, 1):
        forming.heard(seat, 6.0, stepping=True)
    forming.heard(0, 24.0)  # it was the one that waited, and its collective has ended
    assert (forming.due(), forming.silent(24.9)) == (25.0, {})
    why = "it has not left its step for 20 s, step.timeout_seconds and 5 s"
    assert forming.silent(25.0) == {1: why}


def test_joining_begins_when_all_have_prepared_and_is_no_bound_of_preparing() -> None:
    forming = formation()
    for seat in (0, 1):
        forming.has_prepared(seat, 20.0 + seat)
    assert (forming.due(), forming.silent(1e9), forming.began) == (math.inf, {}, 21.0)
    assert not forming.joined
    for seat in (0, 1):
        forming.has_joined(seat)
    assert forming.joined


def test_a_silent_member_is_named_told_to_stop_and_seen_dead_before_the_next_generation(
    coordinator: Coordinator, caplog: pytest.LogCaptureFixture
) -> None:
    coordinator.generations.patience = Patience(answer=1.5)
    killed, dead = queue.SimpleQueue[tuple[int, int]](), threading.Event()
    coordinator.generations.parted.on_given_up = lambda process: killed.put(process[:2])
    coordinator.generations.parted.is_gone = lambda process: dead.is_set() and process.pid == 101
    members = [FakeMember(coordinator, seat) for seat in (0, 1)]
    for one in members:
        one.entry("prepare")
    members[0].answer()
    assert killed.get(timeout=SECONDS) == (1, 101)
    assert members[1].entry("stop") and members[1].entry("closed")
    why = "rank 1 (pid 101): it did not answer within cluster.answer_seconds = 1.5"
    assert members[0].entry("abort")["reason"] == why
    assert coordinator.progress().reason == why and "rank 1 (pid 101) is given up" in caplog.text
    FakeMember(coordinator, 1, pid=201)
    with pytest.raises(queue.Empty):
        members[0].entries.get(timeout=0.3)  # the one before it may still write to buffers
    dead.set()
    members[0].entry("prepare")


def test_a_generation_forms_as_soon_as_the_launcher_has_said_that_a_process_has_ended(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "GONE_LOOK_SECONDS", 10 * SECONDS)  # nobody looks by himself
    ended = threading.Event()
    coordinator.generations.parted.is_gone = lambda process: ended.is_set() or process.pid != 101
    members = serving(coordinator, MEMBERS)
    members[1].stream.close()
    FakeMember(coordinator, 1, pid=201)
    members[0].entry("abort")
    coordinator.processes_told()  # of others: this one has not ended
    with pytest.raises(queue.Empty):
        members[0].entries.get(timeout=1.0)
    ended.set()
    coordinator.processes_told()
    members[0].entry("prepare")


def test_a_killed_process_that_does_not_end_is_reported_and_waited_for(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parted, "GONE_REPORT_SECONDS", 0.1)
    coordinator.generations.parted.is_gone = lambda process: process.pid != 101
    members = serving(coordinator, MEMBERS)
    members[1].stream.close()
    until(lambda: 1 not in coordinator.seats())
    FakeMember(coordinator, 1, pid=201)
    why = "no generation forms before processes [101], given up, have ended"
    until(lambda: coordinator.progress().reason == why)
    assert coordinator.progress().state == "forming"
    members[0].entry("abort")
    coordinator.generations.parted.is_gone = lambda process: True
    members[0].entry("prepare")


def test_a_process_of_the_same_id_on_another_host_is_another_process(coordinator: Coordinator) -> None:
    """Pods count their processes each for itself: most ranks of a cluster may have the same id."""
    ran = set[RankProcess]()
    coordinator.generations.parted.is_gone = lambda process: process not in ran
    hosts = {0: "host a", 1: "host b"}
    members = [FakeMember(coordinator, seat, pid=7, host_id=host) for seat, host in hosts.items()]
    ran |= {RankProcess(seat, 7, host) for seat, host in hosts.items()}
    for one in members:
        one.entry("prepare")
    members[1].stream.close()
    members[0].entry("abort")
    ran -= {RankProcess(1, 7, "host b")}
    FakeMember(coordinator, 1, pid=8, host_id="host b").entry("prepare")
    members[0].entry("prepare")


def test_an_heir_of_the_same_id_on_another_host_does_not_spare_who_was_before_it(
    coordinator: Coordinator,
) -> None:
    killed = queue.SimpleQueue[RankProcess]()
    coordinator.generations.parted.on_given_up = killed.put
    coordinator.generations.parted.is_gone = lambda process: process.host_id == "here"
    members = serving(coordinator, MEMBERS)
    heir = FakeMember(coordinator, 1, pid=101, host_id="another host")
    assert members[1].entry("stop")
    assert killed.get(timeout=SECONDS) == RankProcess(1, 101, "here")
    heir.entry("prepare")
    FakeMember(coordinator, 1, pid=101, host_id="another host").entry("prepare")
    assert killed.empty(), "it has only connected again"


def test_a_joining_that_hangs_ends_and_who_is_behind_is_given_up(coordinator: Coordinator) -> None:
    coordinator.generations.patience = Patience(join=0.2)
    killed: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    coordinator.generations.parted.on_given_up = lambda process: killed.put(process[:2])
    members = [FakeMember(coordinator, seat) for seat in (0, 1)]
    for one in members:
        one.entry("prepare")
        one.say("prepared", bytes_read=0, weight_bytes=0, lacks=[])
    for one, phase in zip(members, (Phase.DISPATCHERS, Phase.JOINED), strict=True):
        one.entry("join")
        one.reached = Reached(0, phase)
    members[1].say("joined")
    assert members[0].entry("stop") and members[0].entry("closed")
    assert killed.get(timeout=SECONDS) == (0, 100)
    assert members[1].entry("abort")["reason"] == (
        "rank 0 is late: joining generation 1 does not go on within cluster.join_seconds = 0.2, and it is "
        "behind; it builds the dispatchers"
    )
    FakeMember(coordinator, 0, pid=200).entry("prepare")
    members[1].entry("prepare")


def test_a_change_that_a_member_does_not_adopt_ends_the_generation() -> None:
    made = Coordinator(
        Epoch.first(Mesh(2, 1, 2), layers=1, experts=4), (0,), StepPace(8, 16), "127.0.0.1", TOKEN
    )
    made.generations.patience = Patience(adopt=1.5)
    made.start()
    try:
        members = serving(made, MEMBERS)
        slots = made.epoch.placement.slots.copy()
        slots[0, [0, 2]] = slots[0, [2, 0]]
        (change,) = rebalance(made.epoch, made.epoch.placement.with_slots(slots), staging_slots=2)
        ended: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        threading.Thread(target=lambda: ended.put(made.change(change, SECONDS)), daemon=True).start()
        for one in members.values():
            order = one.entry("stage")
            staged = [[copy[0], copy[1], "sum", "stream", 8, 0.1, 0] for copy in order["copies"]]
            one.say("voted", change=order["change"], staged=staged, refused="")
        commits = [one.entry("commit") for one in members.values()]
        members[0].say("adopted", change=commits[0]["change"])
        assert members[1].entry("stop") and members[1].entry("closed"), "who holds up the others is given up"
        reason = members[0].entry("abort")["reason"]
        assert reason == "ranks [1] did not adopt epoch 2 within cluster.adopt_seconds = 1.5"
        assert ended.get(timeout=SECONDS).abandoned == "", "what was decided stands"
        assert made.epoch.number == 2
    finally:
        made.stop()


def test_a_member_that_reads_nothing_is_lost_and_holds_nobody() -> None:
    made = Coordinator(
        Epoch.first(Mesh(2, 1, 2), layers=1, experts=4), (0,), StepPace(8, 16), "127.0.0.1", TOKEN
    )
    made.generations.patience = Patience(send=0.3)
    made.start()
    deaf = connect(made.address, SECONDS)
    try:
        hello = {"kind": "hello", "rank": 1, "token": TOKEN, "pid": 9, "address": "", "host_id": "here"}
        deaf.send(hello)
        until(lambda: 1 in made.seats())
        seat = made.seats()[1]
        with made._lock:
            until(
                lambda: (
                    made._group.send(seat, {"kind": "x", "text": "x" * (1 << 20)}) or seat.unreachable != ""
                )
            )
        until(lambda: not made.seats())
        assert (
            "rank 1 (pid 9) is lost: it takes nothing of what is sent to it for 0.3 s"
            in made.progress().reason
        )
    finally:
        deaf.close()
        made.stop()


def test_the_configured_bound_of_a_hello_holds(caplog: pytest.LogCaptureFixture) -> None:
    made = Coordinator(
        Epoch.first(Mesh(2, 1, 2), layers=1, experts=4), (0,), StepPace(8, 16), "127.0.0.1", TOKEN
    )
    made.generations.patience = Patience(hello=0.2)
    made.start()
    try:
        silent = connect(made.address, SECONDS)
        with pytest.raises(StreamClosed, match="the other end closed the stream"):
            silent.receive()
        until(lambda: "ended before its hello: " in caplog.text)
    finally:
        made.stop()


def test_a_superseded_member_is_told_to_stop_and_killed(coordinator: Coordinator) -> None:
    killed: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    coordinator.generations.parted.on_given_up = lambda process: killed.put(process[:2])
    members = serving(coordinator, MEMBERS)
    again = FakeMember(coordinator, 1, pid=201)
    assert members[1].entry("stop") and members[1].entry("closed")
    assert killed.get(timeout=SECONDS) == (1, 101)
    again.entry("prepare")
    same = FakeMember(coordinator, 1, pid=201)  # the same process: only its older stream ends
    assert again.entry("stop") and again.entry("closed")
    same.entry("prepare")
    assert killed.empty()
