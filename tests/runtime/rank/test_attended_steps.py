"""Jobs of several callers are answered by the thread that launches steps, between two of these."""

from __future__ import annotations

import math
import queue
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from running_steps import GENERATION, FakeRank, H, K, Running
from slow_engines import SECONDS

from moeserve.runtime.control.messages import header_message
from moeserve.runtime.rank.answers import MOST_RUNS, MOST_UNFINISHED
from moeserve.runtime.rank.lanes.lane import Lane
from moeserve.runtime.rank.lanes.together import Part, Together
from moeserve.runtime.rank.member import steps as steps_module
from moeserve.runtime.rank.member.member import Member
from moeserve.runtime.rank.member.member_group import ProcessGroupSettings
from moeserve.runtime.step import Header


class Joint:
    """Jobs of two callers of a lane."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self.told: list[tuple[int, bool, int]] = []  # number of the job, whether it was answered, by whom
        self.homes: dict[int, list[torch.Tensor]] = {}

    def submit(self, number: int, callers: int = 2) -> None:
        """A job of so many callers with a row each."""
        parts, self.homes[number] = [], []
        for _ in range(callers):
            home = torch.zeros(1, H)
            self.homes[number].append(home)

            def tell(told: Any) -> None:
                self.told.append((number, not isinstance(told, Exception), threading.get_ident()))

            parts.append(Part(torch.full((1, H), float(number)), home, tell, lambda: None, lambda: None))
        choice = np.zeros((callers, K), np.int32), torch.ones(callers, K)
        together = Together(parts, choice, self._lane.forget, lambda: None)
        self._lane.submit_together(together, (0, 0), math.inf, (True, True))


class Attending(Running):
    """A member's steps whose thread attends."""

    def __init__(self) -> None:
        super().__init__()
        self.steps.attends = True
        self.joint = Joint(self.lane)

    def job(self, number: int, callers: int = 2) -> None:
        """A job of several callers, and the step that takes it."""
        self.joint.submit(number, callers)
        jobs = ((self.announced[-1], callers),)
        self.steps.run(Header(number, 1, 0, (callers,), jobs), GENERATION, self.epoch)

    def ends(self, at: int) -> None:
        """The step that was launched as the `at`th has ended on the device."""
        self.engines.moments[at].passed.set()


@pytest.fixture
def attending() -> Any:
    made = Attending()
    yield made
    made.end()


def test_jobs_of_several_callers_are_answered_by_the_thread_of_the_steps(attending: Attending) -> None:
    assert not attending.steps.attended
    attending.job(1)
    attending.job(2)
    assert attending.rank.launched == [1, 2] and attending.steps.attended
    attending.ends(1)
    assert not attending.steps.finish_ended(), "a later answer waits for the earlier ones"
    attending.ends(0)
    assert attending.steps.finish_ended() and attending.steps.finish_ended()
    assert not attending.steps.finish_ended()
    me = threading.get_ident()
    assert attending.joint.told == [(number, True, me) for number in (1, 1, 2, 2)]
    assert all(torch.equal(home, torch.full((1, H), 4.0)) for home in attending.joint.homes[2])
    assert [attending.said.get(timeout=SECONDS)["step"] for _ in range(2)] == [1, 2]
    assert [record.jobs for record in attending.records] == [2, 2] and attending.steps.steps == 2


def test_it_ends_a_while_after_the_last_such_job(
    attending: Attending, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps_module, "ATTENDED_SECONDS", 0.05)
    attending.engines.passed = True
    attending.job(1)
    assert attending.steps.finish_ended() and attending.steps.attended
    time.sleep(0.06)
    assert not attending.steps.attended
    attending.engines.passed = False
    attending.job(2, callers=1)
    attending.ends(-1)
    attending.steps.drain()
    assert attending.joint.told[-1][2] != threading.get_ident(), "one caller's job alone begins nothing"


def test_a_step_that_takes_long_is_left_to_the_thread_of_answers(attending: Attending) -> None:
    attending.job(1)
    attending.steps.hand_over()
    assert not attending.steps.finish_ended()
    attending.ends(0)
    attending.steps.drain()
    assert [one for one, _, _ in attending.joint.told] == [1, 1]
    assert attending.joint.told[0][2] != threading.get_ident()


def test_what_goes_wrong_while_a_step_is_finished_ends_no_thread(
    attending: Attending, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(record: object) -> None:
        raise ValueError("not observed")

    attending.steps._observe = fail
    attending.engines.passed = True
    attending.job(1)
    assert attending.steps.finish_ended() and "ValueError: not observed" in caplog.text
    assert [answered for _, answered, _ in attending.joint.told] == [True, True]


@pytest.mark.parametrize("what", ["a call", "an act", "many", "drain"])
def test_what_was_kept_is_finished_before_what_comes_behind_it(attending: Attending, what: str) -> None:
    attending.job(1)
    acted = list[list[tuple[int, bool, int]]]()
    drained: threading.Thread | None = None
    if what == "a call":
        call = attending.call(2)
    elif what == "an act":
        attending.steps.after(lambda: acted.append(list(attending.joint.told)))
    elif what == "many":
        for number in range(2, MOST_UNFINISHED + 1):
            attending.job(number)
        there = list(attending.engines.moments)
        threading.Timer(0.05, lambda: [moment.passed.set() for moment in there]).start()
        attending.job(MOST_UNFINISHED + 1)  # which waits for the others
    else:
        drained = threading.Thread(target=attending.steps.drain)
        drained.start()
    assert not attending.steps.finish_ended(), "another thread finishes it"
    for moment in attending.engines.moments:
        moment.passed.set()
    attending.steps.drain()
    if drained is not None:
        drained.join(SECONDS)
        assert not drained.is_alive()
    if what == "a call":
        assert call.wait(SECONDS)
    if acted:
        assert [number for number, _, _ in acted[0]] == [1, 1]
    order = [number for number, answered, _ in attending.joint.told if answered]
    assert order == sorted(order) and len(order) == (2 * (MOST_UNFINISHED + 1) if what == "many" else 2)
    assert threading.get_ident() not in {ident for _, _, ident in attending.joint.told}


def test_a_kept_step_that_goes_wrong_on_the_device_ends_the_generation(
    attending: Attending, monkeypatch: pytest.MonkeyPatch
) -> None:
    attending.job(1)
    (moment,) = attending.engines.moments

    def broken() -> bool:
        raise RuntimeError("an illegal address")

    monkeypatch.setattr(moment, "query", broken)
    monkeypatch.setattr(moment, "synchronize", broken)
    assert attending.steps.finish_ended()
    assert [str(error) for error in attending.failures] == ["an illegal address"]
    assert not attending.joint.told and not attending.steps.finish_ended()
    attending.lane.close("the group forms again")
    assert [answered for _, answered, _ in attending.joint.told] == [False, False]


def test_a_rank_that_computes_on_a_cpu_has_lanes_looked_at_meanwhile() -> None:
    """Its thread of the steps is in each step itself, for as long as this takes."""
    attending = Attending()
    attending.rank.device = "cpu"
    attending.engines.passed = True
    try:
        attending.job(1)
        attending.steps.drain()
        assert not attending.steps.attended and [one for one, _, _ in attending.joint.told] == [1, 1]
    finally:
        attending.steps.close()


@pytest.mark.parametrize("attends", [False, True])
def test_steps_of_callers_gpus_have_lanes_looked_at_for_a_while(
    attending: Attending, attends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps_module, "ATTENDED_SECONDS", 0.1)
    attending.steps.attends = attends
    attending.steps.attend()
    assert attending.steps.attended is attends
    time.sleep(0.12)
    assert not attending.steps.attended


class Wire:
    """What a member's stream is: entries come, and what it says is kept."""

    def __init__(self) -> None:
        self.came: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.said: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.receive, self.send = self.came.get, self.said.put


def test_a_member_looks_at_lanes_and_answers_while_such_jobs_flow_and_then_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(steps_module, "ATTENDED_SECONDS", 0.1)
    rank: Any = FakeRank()
    rank.interrupt, rank.leave, rank.free = lambda: None, lambda keep: None, lambda: None
    running, wire = Running(), Wire()
    anything: Any = wire
    member = Member(rank, running.lane, anything, ProcessGroupSettings("gloo", SECONDS), lambda record: None)
    running.lane.announce = lambda job: running.announced.append(job.job)
    member._held.epoch, joint = running.epoch, Joint(running.lane)
    member._generation.announced(GENERATION)
    looks, back = list[int](), threading.Event()

    def look() -> None:
        looks.append(threading.get_ident())
        if len(looks) == 3:
            running.engines.moments[-1].passed.set()  # the step ends meanwhile

    member.attend(look, back.set)
    thread = threading.Thread(target=member.run, daemon=True)
    thread.start()
    for number in (1, 2):
        looks.clear()
        back.clear()
        joint.submit(number)
        header = Header(number, 1, 0, (2,), ((running.announced[-1], 2),))
        wire.came.put(header_message(header, GENERATION))
        assert back.wait(SECONDS), "lanes are looked at by others again"
        assert len(looks) >= 3 and set(looks) == {thread.ident}
        assert joint.told[-2:] == [(number, True, thread.ident)] * 2
        seen = len(looks)
        time.sleep(0.05)
        assert len(looks) == seen
    wire.came.put({"kind": "stop"})
    thread.join(SECONDS)
    assert not thread.is_alive()
    running.steps.close()


def test_what_ends_short_runs_waits_for_no_step_and_is_waited_for(attending: Attending) -> None:
    attending.job(1)
    done, behind, go = threading.Event(), threading.Event(), threading.Event()
    attending.steps.after(done.set)

    def wait() -> None:
        go.wait(SECONDS)
        behind.set()

    attending.steps.after(wait, short=True)
    ended = threading.Event()
    attending.steps.after(ended.set, short=True)
    assert attending.steps.room(short=True)
    go.set()
    assert behind.wait(SECONDS) and ended.wait(SECONDS) and not done.is_set()
    go.clear()
    attending.steps.after(wait, short=True)
    drained = threading.Thread(target=attending.steps.drain)
    drained.start()
    attending.engines.moments[0].passed.set()
    assert done.wait(SECONDS)
    drained.join(0.05)
    assert drained.is_alive(), "a short run is under way"
    go.set()
    drained.join(SECONDS)
    assert not drained.is_alive()


def test_a_member_says_before_each_entry_that_it_is_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    rank: Any = FakeRank()
    rank.interrupt, rank.leave, rank.free = lambda: None, lambda keep: None, lambda: None
    running, wire, said = Running(), Wire(), list[str]()
    anything: Any = wire
    member = Member(rank, running.lane, anything, ProcessGroupSettings("gloo", SECONDS), lambda record: None)
    member.before_entry = lambda: said.append("entry")
    member.between_steps(lambda: said.append("run"))
    member.between_steps(lambda: said.append("run"))
    wire.came.put({"kind": "abort", "generation": 0, "reason": "over", "back": False})
    wire.came.put({"kind": "stop"})
    member.run()
    assert sorted(said) == ["entry", "run", "run"]
    running.steps.close()


@pytest.mark.parametrize("what", ["a step", "an act"])
def test_a_thread_that_has_to_wait_for_a_step_says_so_before(attending: Attending, what: str) -> None:
    """Others look at lanes meanwhile."""
    away = list[int]()
    attending.steps.away = lambda: away.append(len(attending.rank.launched))
    for number in range(1, MOST_UNFINISHED + 1):
        attending.job(number)
    acts = MOST_RUNS - MOST_UNFINISHED if what == "an act" else 0  # what they leave lies with their callers
    for _ in range(acts):
        assert attending.steps.room()
        attending.steps.after(lambda: None)
    assert not away and attending.steps.room() is (what == "a step")
    there = list(attending.engines.moments)
    threading.Timer(0.05, lambda: [moment.passed.set() for moment in there]).start()
    if what == "a step":
        attending.call(MOST_UNFINISHED + 1)
    else:
        attending.steps.after(lambda: None)
    assert len(away) == 1
