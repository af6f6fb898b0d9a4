"""One member's part in ordered runs: what it launches, whom it tells, and what is recorded; no device."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moeserve.device.streams import MAIN
from moeserve.dispatch.mail.kernels import ABORT, MISFIT
from moeserve.dispatch.mail.layout import MailLayout
from moeserve.dispatch.members import Member, Members
from moeserve.runtime.control.reached import Progress
from moeserve.runtime.control.run_messages import (
    AskedRun,
    OrderedRun,
    asked_from,
    ordered_from,
    refused_message,
    run_message,
)
from moeserve.runtime.control.stream import Message
from moeserve.runtime.rank.all2all import RankDispatchers
from moeserve.runtime.rank.runs import group_runs
from moeserve.runtime.rank.runs.group_runs import GroupRuns, OwnRun
from moeserve.runtime.rank.runs.run_graphs import RunGraphs, RunLanes
from moeserve.runtime.rank.runs.runs import FEW_STEPS, OwnerLane, PassRuns, Run, Told, _key
from moeserve.runtime.rank.transfers.engines import Passed
from moeserve.runtime.step import LaneInput

MEMBERS = Members((Member(0, lane=0, owner=0), Member(1, lane=1, owner=1), Member(5, lane=3)), 4, 2)
EPOCH, GENERATION = 9, 4
LAYOUT = MailLayout(8, 2, 64, 8, 2, torch.bfloat16)


class Rank:
    """A member whose steps only note what they are."""

    index, device = 0, "cpu"

    def __init__(self) -> None:
        self.versions = {0: 1, 1: 1}
        self.epoch = SimpleNamespace(number=EPOCH, members=MEMBERS, version=self.versions.__getitem__)
        self.member = MEMBERS.at(0)
        checkpoint = SimpleNamespace(hidden=8, top_k=2)
        self.served = SimpleNamespace(layers=(3, 5), checkpoint=checkpoint, dtype=torch.float32)
        self.progress = Progress()
        self.blank: list[tuple[int, int, tuple[int, ...], int]] = []  # number, layer, rows of lanes, own rows
        self.fails: Exception | None = None
        self.is_late: Exception | None = None

    def record(self, layer: int, rows: Any, lane_rows: tuple[int, ...], then: Any, number: int) -> None:
        if self.fails is not None:
            raise self.fails
        assert not rows.valid.any()
        self.blank.append((number, layer, lane_rows, len(rows.hidden)))

    def numbers(self, steps: list[tuple[int, int]], number: int) -> tuple[int, ...]:
        return tuple(number + at for at in range(len(steps)))

    def late(self, layer: int) -> tuple[int, ...]:
        if self.is_late is not None:
            raise self.is_late
        return ()


class House:
    """The member, the head's words to it, and whose runs they are."""

    def __init__(self) -> None:
        self.rank = Rank()
        self.after: list[Callable[[], None]] = []
        self.told: list[Message] = []
        self.failed: list[str] = []
        self.steps: list[tuple[int, ...]] = []
        self.heard: list[tuple[object, ...]] = []
        self.launched: list[tuple[Run, tuple[int, int], int]] = []
        self.others = 0  # runs of other members
        self.ends = Told(0, (2,), 2)
        made = self.runs = GroupRuns(self.rank, self.after.append)  # type: ignore[arg-type]
        made.tell, made.observe = self.told.append, self.steps.append
        made.failed = lambda entry, error: self.failed.append(f"{entry['kind']}: {error}")
        made.launch = self.launch  # type: ignore[assignment]
        made.others = self.another
        made.serving(GENERATION)

    def launch(self, run: Run, stamp: tuple[int, int], number: int) -> Any:
        self.launched.append((run, stamp, number))
        return SimpleNamespace(event=Passed(), read=lambda: self.ends)

    def another(self) -> None:
        self.others += 1

    def ran(self, told: Told, version: int) -> None:
        self.heard.append(("ran", told.answered, version))

    def lost(self, why: str) -> None:
        self.heard.append(("lost", why))

    def other_weights(self, version: int) -> None:
        self.heard.append(("other", version))

    def ask(self, version: int = 0, abort: int = 0) -> None:
        lane: Any = SimpleNamespace(abort=[abort])
        self.runs.ask(OwnRun(Run(lane, ((3, 0), (5, 0)), 4, 0), self, version))

    def order(self, seat: int = 0, run: int = 1, number: int = 100, epoch: int = EPOCH) -> None:
        """What the head has ordered is launched, and ends."""
        ordered = OrderedRun(AskedRun(seat, run, (3, 5), 4), number, epoch)
        self.runs.execute(run_message(ordered, GENERATION))
        while self.after:
            self.after.pop(0)()


@pytest.fixture
def house() -> House:
    return House()


DONE = {"kind": "done", "generation": GENERATION, "step": 100}


def test_runs_are_recorded_in_the_graphs_that_are_given_though_these_are_empty() -> None:
    given = RunGraphs(most_steps=2)
    assert GroupRuns(Rank(), lambda act: None, given).graphs is given  # type: ignore[arg-type]


def test_a_run_of_this_member_takes_its_rows(house: House) -> None:
    house.ask()
    house.order()
    ((run, stamp, number),) = house.launched
    assert (run.steps, stamp, number) == (((3, 0), (5, 0)), (EPOCH, 1), 100) and not house.rank.blank
    assert house.heard == [("ran", 2, 1)] and house.steps == [(3, 5)] and house.told[-1] == DONE
    assert not house.others


def test_what_was_not_answered_does_not_count(house: House) -> None:
    house.ends = Told(MISFIT, (1,), 1)
    house.ask()
    house.order()
    assert house.heard == [("ran", 1, 1)] and house.steps == [(3,)] and house.told[-1] == DONE


def test_runs_of_others_are_computed_without_rows(house: House) -> None:
    house.ask()
    house.order(seat=5)
    lanes = (4, 4, 0, 4)  # of both owners and of the lane that brings rows; the reserved one is absent
    assert house.rank.blank == [(100, 3, lanes, 4), (101, 5, lanes, 4)]
    assert not house.launched and not house.heard and house.told[-1] == DONE and house.steps == [(3, 5)]
    assert house.others == 1


def test_a_member_without_a_lane_brings_no_row_at_all(house: House) -> None:
    house.rank.member = Member(7, owner=1)
    house.order(seat=5)
    assert [own for _, _, _, own in house.rank.blank] == [0, 0]


@pytest.mark.parametrize(
    ("asked", "heard"),
    [({"abort": ABORT}, ("lost", "its pass was over before its turn came")), ({"version": 2}, ("other", 1))],
)
def test_a_run_that_is_wanted_no_more_is_computed_all_the_same(
    house: House, asked: dict[str, int], heard: tuple[object, ...]
) -> None:
    house.ask(**asked)
    house.order()
    assert house.heard == [heard] and not house.launched
    assert [number for number, *_ in house.rank.blank] == [100, 101] and house.told[-1] == DONE


def test_all_members_stop_alike_where_weights_change(house: House) -> None:
    house.rank.versions[1] = 2  # of layer 5
    house.order(seat=1)
    assert [layer for _, layer, _, _ in house.rank.blank] == [3]
    house.ask()
    house.order(number=200)
    assert house.launched[0][0].steps == ((3, 0),)


def test_an_order_that_cannot_be_launched_is_a_failure_of_the_entry(house: House) -> None:
    with pytest.raises(RuntimeError, match="run 100 is of epoch 8; this rank holds 9"):
        house.order(seat=1, epoch=8)
    house.ask()
    with pytest.raises(RuntimeError, match="of epoch 8"):
        house.order(epoch=8)
    assert "it cannot be launched: RuntimeError: run 100 is of epoch 8" in str(house.heard)
    house.rank.fails = ValueError("numbers rise")
    with pytest.raises(ValueError, match="numbers rise"):
        house.order(seat=1)
    assert not any(message["kind"] == "done" for message in house.told)


def test_a_run_without_a_members_sums_is_lost_and_fails_the_generation(house: House) -> None:
    house.rank.is_late = RuntimeError("layer 3: no rows of ranks [1] within 10 s")
    house.ask()
    house.order()
    assert len(house.heard) == 1 and "no rows of ranks [1]" in str(house.heard)
    assert house.failed == ["run: layer 3: no rows of ranks [1] within 10 s"]
    house.order(seat=1)
    assert len(house.failed) == 2 and not any(message["kind"] == "done" for message in house.told)


def test_what_was_asked_for_in_a_generation_ends_with_it(house: House) -> None:
    house.ask()
    house.ask()
    house.runs.end()
    assert house.heard == 2 * [("lost", "the group forms anew")]
    house.ask()
    assert len(house.heard) == 3 and len(house.told) == 2
    house.runs.serving(GENERATION + 1)
    house.ask()
    assert house.told[-1]["generation"] == GENERATION + 1 and house.told[-1]["run"] == 3


def test_a_refused_run_is_told_with_its_reason(house: House) -> None:
    house.ask()
    house.runs.execute(refused_message(AskedRun(0, 1, (3, 5), 4), GENERATION, "layer 5 is being restored"))
    assert house.heard == [("lost", "layer 5 is being restored")] and not house.after


def test_messages_hold_what_they_tell() -> None:
    ordered = OrderedRun(AskedRun(3, 7, (0, 1, 0), 16), 99, 5)
    message = run_message(ordered, 2)
    assert ordered_from(message) == ordered and message["generation"] == 2
    assert asked_from(3, message, 16, (0, 1, 2)) == ordered.asked
    with pytest.raises(ValueError, match="run 7 of seat 3 has 16 rows; a lane takes 1 to 8"):
        asked_from(3, message, 8, (0, 1))
    with pytest.raises(ValueError, match=r"run 7 of seat 3 has layers \[1\], which are not served"):
        asked_from(3, message, 16, (0, 2))


def test_no_more_runs_wait_for_their_order_than_may(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_runs, "MOST_ASKED", 2)
    for _ in range(3):
        house.ask()
    assert house.heard == [("lost", "2 runs of this rank wait for their turn")] and len(house.told) == 2


def test_rows_of_lanes_are_those_of_a_steps_graph() -> None:
    assert RunLanes.of(MEMBERS, 3, 8) == RunLanes((8, 8, 8, 8), (8, 8, 0, 8), (2,))
    assert RunLanes.of(MEMBERS, 0, 8) == RunLanes((8, 8, 8, 8), (8, 8, 0, 0), (2, 3))
    assert RunLanes.of(Members.of_ranks(2), 1, 2) == RunLanes((2, 2), (2, 2), ())


def test_graphs_are_recorded_once_and_dropped_by_their_steps() -> None:
    recorded: list[str] = []

    def capture(work: Callable[[], None]) -> Callable[[], None]:
        work()
        return lambda: None

    def bad() -> None:
        raise RuntimeError("not in a graph")

    graphs = RunGraphs(5, capture)
    assert graphs.replay_of("one", 1, lambda: recorded.append("one")) is None, "it may come once only"
    assert graphs.seen("one") and not graphs.seen("three")
    for _ in range(2):
        assert graphs.replay_of("one", 1, lambda: recorded.append("one")) is not None
        assert graphs.replay_of("three", 3, lambda: recorded.append("three")) is not None
        assert graphs.replay_of("bad", 2, bad) is None
    assert recorded == ["one", "three"]
    assert graphs.replay_of("two", 2, lambda: None) is not None
    assert len(graphs) == 2 and graphs.seen("three") and graphs.seen("two"), "the oldest is dropped"
    assert graphs.steps == 5 and graphs.replay_of("long", 6, lambda: None) is None and graphs.steps == 5
    graphs.forget(lambda key: key == "two")
    assert len(graphs) == 1
    graphs.drop()
    assert len(graphs) == 0 and not graphs.seen("one")


class Answer:
    """Memory that a post reads."""


class Own:
    """A member whose own runs only note what they queue: what takes and posts, and steps between."""

    def __init__(self, members: Members) -> None:
        self.queued: list[tuple[object, ...]] = []
        self.early: list[int] = []  # of each take
        self.took: list[int] = []  # of each post
        self.last: list[bool] = []  # likewise
        self.others: list[bool] = []  # of the room of each step
        self.answers: list[weakref.ref[Answer]] = []  # of each step
        self.kept: list[bool] = []  # of each step, whether the answer before it was there as it was queued
        self.expected: list[tuple[object, ...]] = []
        self.epoch, self.member = SimpleNamespace(members=members), members.at(0)
        made = self.runs = PassRuns.__new__(PassRuns)  # whose first act is to load kernels
        made._rank, made._graphs = self, RunGraphs(capture=self.capture)  # type: ignore[assignment]
        kernels = SimpleNamespace(take=self.take, post=self.post)
        self.track = SimpleNamespace(
            number=MAIN,
            kernels_of=lambda layout: kernels,
            room=self.room,
        )

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        self.queued.append(("recorded",))
        work()
        return lambda: self.queued.append(("replayed",))

    def take(self, stage: int, layer: int, room: object, valid: object, *, early: int, lone: bool) -> None:
        assert not lone
        self.queued.append(("take", layer, stage))
        self.early.append(early)

    def room(self, layout: object, rows: int, kind: int, *, other: bool) -> tuple[LaneInput, None]:
        self.others.append(other)
        return LaneInput(*4 * (torch.zeros(rows),)), None

    def post(
        self,
        stage: int,
        answer: object,
        tally: object,
        living: object,
        *,
        took: int,
        early: bool,
        last: bool,
    ) -> None:
        assert early, "kernels of the step lie between"
        self.queued.append(("post", stage, living, tally))
        self.took.append(took)
        self.last.append(last)

    def living(self, layer: int, rows: int) -> str:
        return f"of layer {layer}"

    def record(self, layer: int, rows: Any, lanes: tuple[int, ...], then: Any, number: int) -> None:
        self.queued.append(("step", layer, lanes, number))
        self.kept += [found() is not None for found in self.answers[-1:]]
        answer = Answer()
        self.answers.append(weakref.ref(answer))
        then(answer, f"rows of layer {layer}")

    def numbers(self, steps: list[tuple[int, int]], number: int) -> tuple[int, ...]:
        return tuple(number + at for at in range(len(steps)))

    def expect(self, steps: object, number: int, absent: tuple[int, ...]) -> None:
        self.expected.append((steps, number, absent))

    def work(self, *steps: tuple[int, int], number: int) -> list[tuple[object, ...]]:
        self.queued = []
        key = _key(Run(OwnerLane(LAYOUT, (0, 0), torch.zeros(1), 1.0, torch.zeros(1)), steps, 4, 0))
        self.runs._work(self.track, key, number)  # type: ignore[arg-type]
        return self.queued


def test_own_steps_are_launched_first_and_replayed_later_with_the_heads_numbers() -> None:
    own = Own(MEMBERS)
    lanes = (4, 4, 0, 0)  # of both owners; lane 3 has no owner, and brings nothing to this run
    post = ("post", 1, "of layer 3", "rows of layer 3")
    launched = [("take", 3, 1), ("step", 3, lanes, 100), post]
    assert own.work((3, 1), number=100) == launched and not own.expected
    recorded = [("recorded",), ("take", 3, 1), ("step", 3, (4, 4, 4, 4), 0), post]
    assert own.work((3, 1), number=110) == [*recorded, ("replayed",)]
    assert own.work((3, 1), number=120) == [("replayed",)]
    assert own.expected == [([(3, 4)], 110, (2, 3)), ([(3, 4)], 120, (2, 3))]
    assert own.work((3, 0), (5, 0), number=130)[0] == ("recorded",)
    assert own.expected[-1] == ([(3, 4), (5, 4)], 130, (2, 3))


def test_rows_are_taken_beside_the_answer_of_another_stage_and_behind_that_of_their_own() -> None:
    own = Own(MEMBERS)
    own.work((3, 0), (3, 1), (5, 1), (5, 0), number=100)
    assert own.early == [0, 1, 0, 3], "steps before those of another stage"
    assert own.took == [1, 2, 3, 4]
    assert own.others == [False, True, False, True], "not where the step before has its rows"
    assert own.kept == [True] * 3, "a post may read while the next step is computed"
    assert [found() for found in own.answers] == [None] * 4
    assert own.last == [False, False, False, True], "one brings the words of the run back"


def test_the_steps_alone_of_a_longer_run_that_are_launched_bring_its_words_back() -> None:
    own = Own(Members((Member(0, lane=0, owner=0),), 1, 1))
    own.runs._graphs = RunGraphs(0)
    own.work((3, 0), (5, 0), (3, 0), (5, 0), number=0)
    assert own.last == [False, True] and len(own.last) == FEW_STEPS


class Carries:
    """A dispatcher that notes what it is to expect."""

    def __init__(self) -> None:
        self.expected: list[tuple[int, tuple[int, ...]]] = []

    def expect(self, number: int, absent: tuple[int, ...]) -> None:
        self.expected.append((number, absent))


def test_launched_steps_have_the_numbers_that_a_graph_of_them_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """One member may replay a run that another one could not record."""
    one, other = Carries(), Carries()
    parts: Any = object.__new__(RankDispatchers)
    monkeypatch.setattr(parts, "_carrier", lambda layer, rows: other if layer == 1 else one, raising=False)
    steps = [(0, 4), (1, 4), (0, 4), (2, 4), (1, 4)]
    assert parts.numbers(steps, 100) == (100, 101, 101, 102, 102)
    parts.expect_steps(steps, 100, (2,))
    assert (one.expected, other.expected) == ([(100, (2,))], [(101, (2,))]), "and they count on"


def test_all_steps_of_an_ordered_run_are_launched_where_none_can_be_recorded() -> None:
    own = Own(MEMBERS)

    def bad(work: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("not in a graph")

    own.runs._graphs = RunGraphs(capture=bad)
    steps = tuple((layer, 0) for layer in (3, 5, 3, 5))
    queued = own.work(*steps, number=100)
    assert [one[3] for one in queued if one[0] == "step"] == [100, 101, 102, 103]
    alone = own.work(*steps, number=0)
    assert [one[2:] for one in alone if one[0] == "step"] == FEW_STEPS * [((4, 0, 0, 0), 0)]
