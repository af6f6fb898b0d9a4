"""When a member launches runs: acts by hand in place of its threads, and no device."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moeserve.device.machine import machine_named
from moeserve.dispatch.mail.layout import MailLayout
from moeserve.runtime.rank.memory import RunsHeld
from moeserve.runtime.rank.runs import member_runs
from moeserve.runtime.rank.runs.group_runs import GroupRuns
from moeserve.runtime.rank.runs.mail import Mail
from moeserve.runtime.rank.runs.member_runs import CannotRun, MemberRuns, why_not
from moeserve.runtime.rank.runs.runs import OwnerLane, Run, Told

LAYOUT = MailLayout(8, 1, 64, 8, 2, torch.bfloat16)
LANE = OwnerLane(LAYOUT, (0, 0), torch.zeros(1, dtype=torch.int32), 1.0, torch.zeros(32, dtype=torch.int64))
RUN = Run(LANE, ((3, 0), (5, 0)), 8, 0, begins=1)


class Device:
    """In place of PassRuns: what was launched, and how it ends."""

    held = RunsHeld(("pool",), rooms=100)

    def __init__(self, rank: object = None, graphs: object = None, short_rows: int = 0) -> None:
        self.graphs, self.short_rows = graphs, short_rows
        self.launched: list[tuple[Run, tuple[int, int]]] = []
        self.ends: Exception | None = None
        self.fails: Exception | None = None
        self.dropped = 0
        self.known = self.joins = True
        self.forgotten: list[OwnerLane] = []

    def launch(self, run: Run, stamp: tuple[int, int]) -> Any:
        if self.fails is not None:
            raise self.fails
        self.launched.append((run, stamp))

        def synchronize() -> None:
            if self.ends is not None:
                raise self.ends

        told = Told(0, (len(run.steps),), len(run.steps))
        return SimpleNamespace(event=SimpleNamespace(synchronize=synchronize), read=lambda: told)

    def recorded(self, run: Run) -> bool:
        return self.known

    def join(self) -> bool:
        return self.joins

    def drop(self) -> None:
        self.dropped += 1

    def forget(self, lane: OwnerLane) -> None:
        self.forgotten.append(lane)


class Caller:
    """Whose runs they are."""

    def __init__(self) -> None:
        self.heard: list[tuple[object, ...]] = []

    def ran(self, told: Told, version: int) -> None:
        self.heard.append(("ran", told.steps, version))

    def lost(self, why: str) -> None:
        self.heard.append(("lost", why))

    def other_weights(self, version: int) -> None:
        self.heard.append(("other", version))


class Memory:
    """A lane's memory, which may not go twice."""

    freed = 0
    mine = torch.zeros(30, dtype=torch.uint8)

    def close(self) -> None:
        self.freed += 1


class House:
    """A member whose threads do what they are given when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(member_runs, "PassRuns", Device)
        self.versions = {0: 1, 1: 1}
        span = SimpleNamespace(dispatcher=SimpleNamespace(name="local", living=False), up_to=16)
        plan = SimpleNamespace(dispatchers=[span], problem=SimpleNamespace(lane_rows=16))
        self.span = span
        self.epoch = SimpleNamespace(number=9, members=[1], versions=(), version=self.versions.__getitem__)
        rank = SimpleNamespace(
            loaded=True,
            epoch=self.epoch,
            plans={3: plan, 5: plan},
            served=SimpleNamespace(layers=(3, 5), patience=10.0),
            late=lambda layer: (),
            member=SimpleNamespace(lane=0),
            device="cpu",
            index=0,
        )
        self.rank = rank
        self.between: list[Callable[[], None]] = []
        self.after: list[Callable[[], None]] = []
        self.serves, self.full = True, False
        self.counted: list[list[int]] = []
        self.group = GroupRuns(rank, self.finish)  # type: ignore[arg-type]
        made = MemberRuns(rank, self.between.append, self.finish, lambda: self.serves, self.group)  # type: ignore[arg-type]
        made.observe = self.counted.append
        self.runs, self.device, self.caller = made, made._runs, Caller()

    def finish(self, act: Callable[[], None]) -> None:
        if self.full:
            raise TimeoutError("4 launched steps have not ended")
        self.after.append(act)

    def step(self) -> None:
        """What is to be done between two steps is done."""
        while self.between:
            self.between.pop(0)()

    def end(self) -> None:
        """What was launched ends."""
        while self.after:
            self.after.pop(0)()

    def asked(self, version: int = 0) -> list[tuple[object, ...]]:
        """A run is begun, launched, and ends; what its caller hears."""
        self.caller.heard = []
        self.runs.begin(RUN, self.caller, version)
        self.step()
        self.end()
        return self.caller.heard


@pytest.fixture
def house(monkeypatch: pytest.MonkeyPatch) -> House:
    return House(monkeypatch)


def test_a_run_is_launched_between_two_steps_and_told_of_when_it_ends(house: House) -> None:
    house.runs.begin(RUN, house.caller, 0)
    assert not house.device.launched
    house.step()
    assert house.device.launched == [(RUN, (9, 1))] and not house.caller.heard
    house.end()
    assert house.caller.heard == [("ran", (2,), 1)] and house.counted == [[3, 5]]


def test_of_layers_with_other_weights_only_the_first_are_launched(house: House) -> None:
    house.versions[1], house.epoch.versions = 2, (1, 2)
    assert house.asked() == [("ran", (1,), 1)]
    assert house.device.launched[0][0].steps == ((3, 0),)
    assert house.asked(version=1) == [("ran", (1,), 1)]
    assert house.asked(version=2) == [("other", 1)]


def test_what_cannot_be_launched_is_told_by_name(house: House) -> None:
    house.serves = False
    assert house.asked() == [("lost", "the group forms anew")]
    house.serves = True
    house.runs.closed = lambda: {5}
    assert house.asked() == [("lost", "layer 5 is being restored")]
    house.runs.closed = lambda: ()
    house.runs.begin(RUN, house.caller, 0)
    house.epoch.members, house.caller.heard = [1, 2], []
    house.step()
    assert house.caller.heard == [("lost", "the group forms anew")], "it has grown since"
    house.epoch.members = [1]
    house.device.fails = ValueError("layer 3 reads a count on the host")
    assert "it cannot be launched: ValueError: layer 3 reads" in str(house.asked())
    house.device.fails = None
    assert house.asked() == [("ran", (2,), 1)]


def test_what_the_thread_that_launches_begins_is_launched_at_once(house: House) -> None:
    house.runs.looked_here, house.runs.room = True, lambda short: True
    house.runs.begin(RUN, house.caller, 0)
    assert len(house.device.launched) == 1 and not house.between
    house.end()
    assert house.caller.heard == [("ran", (2,), 1)]


@pytest.mark.parametrize("why", ["another looks", "no room", "not recorded", "one waits before it"])
def test_what_might_keep_a_look_for_long_is_launched_after_it(house: House, why: str) -> None:
    house.runs.begin(RUN, house.caller, 0) if why == "one waits before it" else None
    before = len(house.between)
    house.runs.looked_here, house.runs.room = why != "another looks", lambda short: why != "no room"
    house.device.known = why != "not recorded"
    house.runs.begin(RUN, house.caller, 0)
    assert not house.device.launched and len(house.between) == before + 1
    house.step()
    house.end()
    assert house.caller.heard == [("ran", (2,), 1)] * (before + 1)
    assert not len(house.runs._begun)


def test_while_steps_of_several_gpus_flow_the_thread_that_launches_looks_after_lanes(house: House) -> None:
    attended = list[int]()
    house.runs.attend = lambda: attended.append(1)
    step = RUN._replace(steps=((3, 0),))
    for run in (RUN, step, RUN._replace(flows=True)):
        house.runs.begin(run, house.caller, 0)
        house.step()
    assert not attended, "nobody else is there, or whole forward passes are launched"
    house.runs.begin(step._replace(flows=True), house.caller, 0)
    house.step()
    assert attended == [1], "its next step is to be launched soon"


def test_who_keeps_lanes_waiting_by_what_is_no_run_is_told_of(house: House) -> None:
    kept = list[int]()
    house.runs.keeps = lambda: kept.append(1)
    house.device.joins = False
    house.runs.join()
    assert not kept, "runs of one track follow each other anyway"
    house.device.joins = True
    house.runs.join()
    assert kept == [1]


def test_what_waits_of_others_is_in_the_way_of_a_run_that_is_to_be_recorded(house: House) -> None:
    runs, other = house.runs, Caller()
    house.device.known = False
    runs.begin(RUN, house.caller, 0)
    assert runs.waits_for(other) and not runs.waits_for(house.caller), "to record waits for the device"
    house.step()
    assert not runs.waits_for(other)
    house.device.known = True
    runs.begin(RUN, house.caller, 0)
    assert not runs.waits_for(other)
    runs.detach(Mail(LANE, Memory()))  # type: ignore[arg-type]
    assert runs.waits_for(other) and runs.waits_for(house.caller), "a lane's memory is to be freed"
    house.step()
    house.end()


def test_who_looks_for_rows_waits_until_what_was_begun_is_launched(house: House) -> None:
    def waited() -> bool:
        """Whether all of the time was over."""
        began = time.monotonic()
        house.runs.await_launches(0.05)
        return time.monotonic() - began >= 0.05

    assert not waited()
    house.runs.begin(RUN, house.caller, 0)
    house.runs.begin(RUN, house.caller, 0)
    house.between.pop(0)()
    assert waited()
    house.device.fails = ValueError("layer 3 reads a count on the host")
    house.step()
    assert not waited()
    house.runs.begin(RUN, house.caller, 0)
    later = threading.Timer(0.1, house.step)
    later.start()
    began = time.monotonic()
    house.runs.await_launches(20.0)
    assert time.monotonic() - began < 10.0
    later.join()


def test_who_looks_for_rows_does_not_wait_for_a_launch_that_waits_for_another_to_end(house: House) -> None:
    may_end = threading.Event()

    def finish(act: Callable[[], None]) -> None:
        assert may_end.wait(20.0)

    house.runs._finish = finish
    house.runs.begin(RUN, house.caller, 0)
    house.runs.begin(RUN, house.caller, 0)
    launching = threading.Thread(target=house.between.pop(0), daemon=True)
    launching.start()
    began = time.monotonic()
    house.runs.await_launches(20.0)
    assert time.monotonic() - began < 10.0, "another was begun, and is not launched yet"
    may_end.set()
    launching.join()
    began = time.monotonic()
    house.runs.await_launches(0.05)
    assert time.monotonic() - began >= 0.05


def test_whoever_began_a_run_hears_of_it_once_however_it_ends(house: House) -> None:
    house.device.ends = RuntimeError("an illegal memory access")
    assert len(heard := house.asked()) == 1 and "an illegal memory access" in str(heard)
    house.device.ends, house.full = None, True
    assert len(heard := house.asked()) == 1 and "launched steps have not ended" in str(heard)
    house.full = False
    assert house.asked() == [("ran", (2,), 1)]
    assert house.runs._flying == 0


def test_memory_is_freed_when_nothing_runs_that_could_touch_it(house: House) -> None:
    mail = Mail(LANE, Memory())  # type: ignore[arg-type]
    house.runs.begin(RUN, house.caller, 0)
    house.step()
    house.runs.detach(mail)
    house.step()
    assert mail.memory.freed == 0 and house.runs.retired == 1
    assert house.runs.held == RunsHeld(("pool",), 100, 30)
    house.end()
    house.step()
    assert house.runs.held == RunsHeld(("pool",), 100, 0)
    assert mail.memory.freed == 1 and house.runs.retired == 0 and house.device.forgotten == [LANE]


def test_what_was_recorded_goes_when_weights_are_reloaded(house: House) -> None:
    house.runs.adopted()
    assert house.device.dropped == 0, "experts moved"
    house.epoch.versions = (2, 1)
    house.runs.adopted()
    assert house.device.dropped == 1


def test_an_interrupted_run_waits_no_more(house: House) -> None:
    house.runs._attached.add(Mail(LANE, Memory()))  # type: ignore[arg-type]
    house.runs.interrupt()
    assert int(LANE.abort[0]) == 1


def test_in_a_group_of_several_the_head_is_asked(house: House) -> None:
    house.epoch.members = [1, 2]
    told: list[dict[str, object]] = []
    house.group.tell = told.append
    assert house.asked() == [("lost", "the group forms anew")], "it does not serve yet"
    house.group.serving(4)
    assert house.asked() == [] and not house.device.launched
    assert told == [{"kind": "run", "generation": 4, "run": 1, "layers": (3, 5), "rows": 8}]
    house.runs.closed = lambda: {5}
    assert house.asked() == [("lost", "layer 5 is being restored")] and len(told) == 1
    house.caller.heard = []
    house.runs.interrupt()
    assert house.caller.heard == [("lost", "the group forms anew")], "nobody orders it any more"


def test_a_member_that_has_lost_all_others_asks_the_head_as_before(house: House) -> None:
    """Its steps have numbers that the head gives, by which others will join."""
    told: list[dict[str, object]] = []
    house.group.tell = told.append
    house.group.serving(4)
    house.span.dispatcher.name, house.span.dispatcher.living = "nvlink_ll", True
    house.runs.check(8, 5.0)
    house.runs.begin(RUN, house.caller, 0)
    assert [message["kind"] for message in told] == ["run"] and house.caller.heard == []


def test_where_a_group_of_several_takes_no_rows_of_gpus_is_said_by_name(house: House) -> None:
    house.epoch.members = [1, 2]
    with pytest.raises(CannotRun, match="layer 3: local carries steps of up to 16 rows, and its kernels do"):
        house.runs.check(8, 2.0)
    house.span.dispatcher.living = True
    house.runs.check(8, 5.0)
    with pytest.raises(CannotRun, match=r"passes\.patience_seconds = 6 is more than half of the 10 s"):
        house.runs.check(8, 6.0)
    large = SimpleNamespace(dispatcher=SimpleNamespace(name="all2allv", living=False), up_to=4096)
    plan = house.rank.plans[5]
    plan.dispatchers, plan.problem.lane_rows = [house.span, large], 4096
    house.runs.check(16, 2.0)
    with pytest.raises(CannotRun, match="all2allv carries steps of up to 4096 rows"):
        house.runs.check(17, 2.0)
    house.rank.member.lane = None
    with pytest.raises(CannotRun, match="this rank has no lane"):
        house.runs.check(8, 2.0)


@pytest.mark.parametrize(
    ("machine", "modules", "why"),
    [
        ("cpu", (), "this rank computes on the CPU"),
        ("mi300x", ("triton",), "this rank's GPU is of gfx942"),
        ("h100", ("triton",), "cuda.bindings is not installed at this rank"),
        ("h100", ("triton", "cuda.bindings"), ""),
    ],
)
def test_where_no_run_is_launched(machine: str, modules: tuple[str, ...], why: str) -> None:
    found = why_not(machine_named(machine, modules))
    assert found == why or (why and why in found)
