"""A head that starts again: what members of the head before it hold becomes the group's."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Collection, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_members import SECONDS, TOKEN, FakeMember, form_again, until

from moeserve.dispatch.members import Members
from moeserve.experts.load import PHASES
from moeserve.runtime.control.messages import ANY_GENERATION, epoch_from, held_message, report_message
from moeserve.runtime.epoch import Epoch
from moeserve.runtime.head.coordinator import Coordinator
from moeserve.runtime.head.generations.recovery import Recovery
from moeserve.runtime.mesh import Mesh
from moeserve.runtime.ordering.sequencer import StepPace

FIRST = Epoch.first(Mesh(2, 1, 2), layers=1, experts=4)
SECOND = FIRST.moved(0, np.array([1, 0, 2, 3], dtype=np.int32))
THIRD = SECOND.moved(0, np.array([1, 0, 3, 2], dtype=np.int32))
WAITS = 30.0  # longer than any test


def seat(*, again: bool) -> Any:
    return SimpleNamespace(again=again)


def recovery_of(**held: tuple[int, Epoch | None]) -> Recovery:
    """One in which members `m0`, `m1` have come back and told."""
    made = Recovery(FIRST, 100.0, 5.0)
    for name, (generation, epoch) in held.items():
        number = int(name[1:])
        made.connected(number, seat(again=True))
        made.holds(number, generation, epoch)
    return made


def test_the_highest_epoch_that_any_adopted_is_the_groups() -> None:
    found = recovery_of(m0=(7, SECOND), m1=(6, THIRD)).found(100.0)
    assert found is not None
    assert (found.epoch, found.generation, sorted(found.seats)) == (THIRD, 7, [0, 1])


def test_where_nobody_holds_anything_the_service_starts_as_at_first() -> None:
    found = recovery_of(m0=(1, None), m1=(1, None)).found(100.0)
    assert found is not None and (found.epoch, found.generation) == (FIRST, 1)


def test_members_that_have_yet_to_tell_are_waited_for_until_the_bound() -> None:
    made = recovery_of(m0=(3, SECOND))
    assert made.missing == [1] and made.found(104.9) is None
    made.connected(1, seat(again=True))
    assert made.missing == [1] and made.found(105.0) is None, "it is here, and has not told"
    assert made.due == 225.0 and made.found(224.9) is None
    found = made.found(225.0)
    assert found is not None and (found.epoch, list(found.seats)) == (SECOND, [0])
    assert list(found.silent) == [1], "what it holds may be newer: it is not to serve"


def test_callers_are_told_whom_the_head_waits_for_or_that_all_are_there() -> None:
    again = "the head has started again, and "
    assert recovery_of(m0=(3, SECOND)).reason == again + "waits for ranks [1] to come back"
    made = recovery_of(m0=(3, SECOND), m1=(3, SECOND))
    assert made.reason == again + "all ranks are there: the group forms again", "it waits for nobody"


def test_a_member_that_was_started_meanwhile_is_not_waited_for() -> None:
    made = recovery_of(m0=(3, SECOND))
    made.connected(1, seat(again=False))
    found = made.found(100.0)
    assert found is not None and found.epoch == SECOND


def test_what_a_member_told_stays_true_when_it_is_lost() -> None:
    made = recovery_of(m0=(3, SECOND), m1=(4, THIRD))
    made.lost(1)
    assert made.found(100.0) is None
    found = made.found(105.0)
    assert found is not None and (found.epoch, found.generation, list(found.seats)) == (THIRD, 4, [0])


def test_nothing_is_found_while_nobody_is_there() -> None:
    assert Recovery(FIRST, 100.0, 5.0).found(1e9) is None


def test_members_that_the_epoch_does_without_are_not_waited_for() -> None:
    spare = Epoch.first(Mesh(2, 1, 2), layers=1, experts=4, redundant=4)
    made = Recovery(spare, 100.0, 5.0)
    made.connected(0, seat(again=True))
    made.holds(0, 5, spare.without([1]))
    found = made.found(100.0)
    assert found is not None and found.epoch.members.seats == (0,)


@pytest.mark.parametrize(
    "other",
    [
        Epoch.first(Mesh(2, 1, 2), layers=2, experts=4),
        Epoch.first(Mesh(2, 1, 2), layers=1, experts=8),
        Epoch.first(Mesh(4, 1, 4), layers=1, experts=4),
        Epoch.first(Mesh(2, 1, 2), layers=1, experts=4, redundant=2),
    ],
    ids=["layers", "experts", "ranks", "slots"],
)
def test_an_epoch_of_another_service_is_refused(other: Epoch) -> None:
    made = Recovery(FIRST, 100.0, 5.0)
    made.connected(0, seat(again=True))
    with pytest.raises(ValueError, match="is not of this service"):
        made.holds(0, 3, other)


# -- with streams -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def started_again(
    seconds: float = WAITS, first: Epoch = FIRST, wanted: Collection[int] | None = None
) -> Iterator[Coordinator]:
    layers = tuple(range(first.placement.layers))
    made = Coordinator(first, layers, StepPace(8, 16), "127.0.0.1", TOKEN)
    made.generations.turnover.serve_on = True
    made.recover(seconds, wanted)
    made.start()
    try:
        yield made
    finally:
        made.stop()


def back(head: Coordinator, number: int, generation: int, epoch: Epoch | None) -> FakeMember:
    """A member that comes back and tells what it holds."""
    member = FakeMember(head, number, again=True)
    member.entry("welcome")
    member.stream.send(held_message(generation, epoch))
    return member


def serves(head: Coordinator, members: dict[int, FakeMember], epoch: Epoch) -> int:
    """Has the members prepare and join; returns the generation."""
    for one in members.values():
        assert epoch_from(one.entry("prepare")["epoch"]) == epoch
        one.say("prepared", bytes_read=0, weight_bytes=0, lacks=[])
    for one in members.values():
        one.entry("join")
        one.say("joined")
    head.wait_serving(SECONDS)
    return head.generation


def whom_it_gives_up(head: Coordinator) -> list[int]:
    """The processes, which end at once, as they are given up."""
    found = list[int]()
    head.generations.parted.on_given_up = lambda process: found.append(process.pid)
    head.generations.parted.is_gone = lambda process: True
    return found


def test_members_come_back_and_serve_what_they_held() -> None:
    with started_again() as head:
        assert "has started again, and waits for ranks [0, 1]" in head.progress().reason
        members = {0: back(head, 0, 9, SECOND)}
        until(lambda: "waits for ranks [1]" in head.progress().reason)
        members[1] = back(head, 1, 8, THIRD)
        assert serves(head, members, THIRD) > 9
        assert head.epoch == THIRD
        assert members[0].reset_levels, "levels of loggers ended with the head that had set them"


def test_a_group_forms_of_those_that_are_back_once_the_others_are_started() -> None:
    with started_again(0.2) as head:
        members = {0: back(head, 0, 9, SECOND)}
        until(lambda: "waiting for ranks [1]" in head.progress().reason or 0 in head.seats())
        members[1] = FakeMember(head, 1)
        assert serves(head, members, SECOND) > 9


@pytest.mark.parametrize("late", [False, True])
def test_who_was_drained_is_started_again(late: bool) -> None:
    """The head that wanted it to leave is dead, and this one wants it to stay."""
    with started_again() as head:
        given_up = whom_it_gives_up(head)
        members = {0: back(head, 0, 9, SECOND)}
        drained = FakeMember(head, 1, pid=777, again=True)
        drained.entry("welcome")
        drained.stream.send(held_message(9, SECOND, drained=not late))
        if late:
            until(lambda: head.seats().keys() == {0, 1})
            drained.stream.send(held_message(9, SECOND, drained=True))
        until(lambda: given_up == [777])
        members[1] = FakeMember(head, 1)
        until(lambda: head.seats().keys() == {0, 1})
        for one in members.values():
            while (entry := one.entries.get(timeout=SECONDS))["kind"] != "prepare":
                assert entry["kind"] in ("abort", "load")


@pytest.mark.parametrize("recovered", [False, True])
def test_who_is_drained_only_after_it_has_told_is_started_again(recovered: bool) -> None:
    """The head that wanted it to leave has died while calls were under way there."""
    with started_again() as head:
        given_up = whom_it_gives_up(head)
        drains = FakeMember(head, 1, pid=777, again=True)
        drains.entry("welcome")
        drains.stream.send(held_message(9, SECOND))
        until(lambda: "waits for ranks [0]" in head.progress().reason)
        if recovered:
            serves(head, {0: back(head, 0, 9, SECOND), 1: drains}, SECOND)
        drains.stream.send({"kind": "drained", "generation": 9})
        if not recovered:
            back(head, 0, 9, SECOND)
        until(lambda: given_up == [777])


@pytest.mark.parametrize("told_late", [False, True])
def test_while_the_service_stops_who_was_drained_stays(told_late: bool) -> None:
    """By the head before this one, which died as it stopped: all of its lanes are drained."""
    with started_again() as head:
        given_up = whom_it_gives_up(head)
        head.stopping.reason = "the service is stopping"
        members = {}
        for number in (0, 1):
            members[number] = FakeMember(head, number, again=True)
            members[number].entry("welcome")
            members[number].stream.send(held_message(9, SECOND, drained=not (number and told_late)))
            if number and told_late:
                members[1].stream.send({"kind": "drained", "generation": 9})
        assert serves(head, members, SECOND) > 9
        assert not given_up and head.seats().keys() == {0, 1}


def test_who_comes_late_with_a_higher_epoch_takes_the_group_there() -> None:
    """Everybody else had died with the head before it heard of the change."""
    with started_again(0.2) as head:
        members = {0: back(head, 0, 9, SECOND)}
        until(lambda: head.wanted_seats is not None)
        members[1] = back(head, 1, 9, THIRD)
        until(lambda: head.epoch == THIRD)
        for one in members.values():
            while (entry := one.entries.get(timeout=SECONDS))["kind"] != "abort":
                assert entry["kind"] == "prepare"
        assert serves(head, members, THIRD) > 9


def test_it_does_not_know_in_which_generation_was_whom_it_gives_up_and_does_not_wait_for_its_end() -> None:
    with started_again() as head:
        head.generations.parted.is_gone = lambda process: False
        FakeMember(head, 0, again=True, outlives=True).entry("welcome")
        until(lambda: head.seats().keys() == {0})
        members = {at: FakeMember(head, at, pid=200 + at, again=True, outlives=True) for at in (0, 1)}
        for one in members.values():
            one.entry("welcome")
            one.stream.send(held_message(9, SECOND))
        for one in members.values():
            one.entry("prepare")
            one.say("prepared", bytes_read=0, weight_bytes=0, lacks=[])
        assert [one.entry("join")["parting"] for one in members.values()] == [[ANY_GENERATION]] * 2


def test_a_member_that_connects_twice_has_one_seat() -> None:
    with started_again() as head:
        first = back(head, 0, 9, SECOND)
        until(lambda: head.seats().keys() == {0})  # a thread for each stream: the first one has its seat
        members = {0: back(head, 0, 9, SECOND)}
        first.entry("closed")
        members[1] = back(head, 1, 9, SECOND)
        serves(head, members, SECOND)


@pytest.mark.parametrize("late", ["the members", "what they hold"])
def test_the_group_does_not_go_back_to_its_first_epoch_where_all_are_late(late: str) -> None:
    """Their last steps, or an expert that they read, took longer than the head waits for members."""
    first = Epoch.first(Mesh(3, 1, 3), layers=2, experts=6, redundant=3)
    held = first.with_weights("other").reloaded(0, 2).reloaded(1, 2).without([2])
    with started_again(1.0, first) as head:
        time.sleep(1.5 if late == "the members" else 0.0)
        members = {number: FakeMember(head, number, again=True) for number in (0, 1)}
        for one in members.values():
            one.entry("welcome")
        time.sleep(1.5 if late == "what they hold" else 0.05)
        for one in members.values():
            one.stream.send(held_message(9, held))
        assert serves(head, members, held) > 9


def test_who_comes_late_from_a_newer_generation_does_not_stop_a_group_that_serves() -> None:
    first = Epoch.first(Mesh(3, 1, 3), layers=2, experts=6, redundant=3)
    with started_again(1.5, first) as head:  # for members 0 and 1 to be there both, and then for a third
        members = {number: back(head, number, 5, first) for number in (0, 1)}
        generation = serves(head, members, first.without([2]))
        late = back(head, 2, 9, first)
        late.entry("load")
        members[0].announce(1, 1)
        assert members[0].entry("step")["generation"] == generation
        for one in members.values():
            one.say("done", step=1)
        late.say("loaded", bytes_read=0, weight_bytes=0)
        assert form_again([*members.values(), late]).members == first.members
        assert head.generation > 9, "no member hears a number again"


@pytest.mark.parametrize("then", ["it cannot start", "somebody scales"])
def test_a_rank_that_the_head_before_asked_for_and_nobody_waits_for_may_stay_away(then: str) -> None:
    first = Epoch.first(Mesh(3, 1, 3), layers=1, experts=6, redundant=3, members=Members.of_ranks(3, 4, 4))
    with started_again(WAITS, first, {0, 1, 2, 3}) as head:
        members = {number: back(head, number, 5, first) for number in range(3)}
        form_again(members.values())
        head.wait_serving(SECONDS)
        assert head.progress().reason == "ranks [3] are to join"
        if then == "it cannot start":
            head.no_room(3, "no GPU is free")
        else:
            head.resizing.forget_orphans()
        assert head.wanted_seats == {0, 1, 2}


def test_a_group_does_not_wait_for_a_rank_that_has_never_had_a_process() -> None:
    first = Epoch.first(Mesh(3, 1, 3), layers=1, experts=6, redundant=3, members=Members.of_ranks(3, 4, 4))
    with started_again(WAITS, first, {0, 1, 2, 3}) as head:
        members = {number: back(head, number, 5, first) for number in range(3)}
        form_again(members.values())
        for number in (1, 2):  # the one that is left has no slots: it waits for both
            members.pop(number).stream.close()
        until(lambda: head.progress().state == "forming" and not head.seats().keys() & {1, 2})
        members |= {number: FakeMember(head, number, pid=700 + number) for number in (1, 2)}
        assert form_again(members.values()).members.seats == (0, 1, 2)
        head.wait_serving(SECONDS)


def test_told_to_stop_while_it_recovers_a_head_lets_held_calls_end() -> None:
    with started_again() as head:
        members = {0: back(head, 0, 9, SECOND)}
        stopped: list[bool] = []
        stopping = threading.Thread(target=lambda: stopped.append(head.stopping.drain(SECONDS)), daemon=True)
        stopping.start()
        members[1] = back(head, 1, 9, SECOND)
        for one in members.values():
            one.until("drain")
        form_again(members.values())
        assert not stopped
        for one in members.values():
            one.say("drained")
        stopping.join(SECONDS)
        assert stopped == [True]


def test_members_that_have_come_back_count_as_there_and_are_named_where_they_do_not_tell() -> None:
    """Whoever starts ranks gives up those that do not reach the head."""
    with started_again() as head:
        member = FakeMember(head, 0, again=True)
        member.entry("welcome")
        until(lambda: head.seats().keys() == {0})
        said = "waits for ranks [1] to come back and ranks [0] to say what they hold"
        until(lambda: said in head.progress().reason)


def test_members_that_come_back_hear_what_the_others_were_told() -> None:
    with started_again() as head:
        first = back(head, 0, 9, SECOND)
        head.set_log_levels({"moeserve": "DEBUG"})
        for one in (first, back(head, 1, 9, SECOND)):
            assert one.until("log_levels")["levels"] == {"moeserve": "DEBUG"}


def test_what_members_counted_before_they_came_back_is_not_new_to_the_metrics() -> None:
    """A counter that jumped by all history would be read as load of this moment."""
    with started_again() as head:
        members = {number: back(head, number, 9, SECOND) for number in (0, 1)}
        serves(head, members, SECOND)
        shape = (len(PHASES), SECOND.placement.layers, SECOND.placement.experts)
        for steps, member, tokens in ((1, 0, 100), (2, 1, 100), (3, 0, 107), (4, 1, 104)):
            counts = report_message(members[member].generation, (steps, 0), np.full(shape, tokens))
            members[member].stream.send(counts)
            until(lambda steps=steps, member=member: head.seats()[member].steps == steps)
        assert head.view.load_seen().tokens.tolist() == np.full(shape[1:], len(PHASES) * 11.0).tolist()
        assert head.load().tokens.max() == len(PHASES) * 211.0, "since the ranks started, as in a status"


def test_members_that_wait_are_told_to_stop_when_the_service_ends() -> None:
    with started_again() as head:
        member = back(head, 0, 9, SECOND)
        until(lambda: "waits for ranks [1]" in head.progress().reason)
    member.entry("stop")


def test_what_a_member_says_of_a_dead_heads_generation_does_not_count() -> None:
    with started_again() as head:
        members = {0: back(head, 0, 9, SECOND)}
        members[0].stream.send({"kind": "done", "generation": 9, "step": 4})
        members[0].stream.send(
            {"kind": "announce", "generation": 9, "job": 1, "layer": 0, "rows": 1, "left": None}
        )
        members[1] = back(head, 1, 9, SECOND)
        serves(head, members, SECOND)
        time.sleep(0.05)
        assert head.progress().jobs == 0


@pytest.mark.parametrize(
    "said",
    [
        {"generation": 3},
        {"generation": "three", "epoch": None},
        {"generation": 3, "epoch": {"kind": "epoch"}},
        {"generation": 3, "epoch": [1]},
        {"generation": -1, "epoch": None},
        {"generation": 1 << 62, "epoch": None},
    ],
)
def test_a_malformed_word_ends_the_members_stream_and_nothing_else(said: dict[str, Any]) -> None:
    with started_again() as head:
        wrong = FakeMember(head, 0, again=True)
        wrong.entry("welcome")
        wrong.stream.send({"kind": "held"} | said)
        wrong.entry("closed")
        members = {number: back(head, number, 9, SECOND) for number in (0, 1)}
        serves(head, members, SECOND)
