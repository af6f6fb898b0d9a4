"""A group whose head orders runs among steps: real members; a lane brings rows without a GPU's kernels."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from houses import Alone
from member_ranks import LAYER, SECONDS, SHAPES, Process, head_for, served_and_planned

from moeserve.dispatch.mail.kernels import ABORT
from moeserve.runtime.head.coordinator import Coordinator
from moeserve.runtime.rank.lanes.lane_call import LaneBatch
from moeserve.runtime.rank.runs.group_runs import GroupRuns, OwnRun
from moeserve.runtime.rank.runs.run_graphs import RunLanes
from moeserve.runtime.rank.runs.runs import Run, Told
from moeserve.runtime.rank.transfers.engines import Passed
from moeserve.runtime.step import LaneInput

ROWS, TURNS = 4, 12
STEPS = ((LAYER, 0), (0, 0), (LAYER, 1))


class Following(Process):
    """A member that takes part in runs."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given, "nvlink_ll")
        self.runs = GroupRuns(self.rank, self.member.steps.after)
        self.member.take_runs(self.runs)
        self.member.on_serving = lambda generation, epoch: self.runs.serving(generation)
        self.member.on_end = self.runs.end


class Caller:
    """Passes of a lane: what becomes of each run, and the answers that it got."""

    def __init__(self, one: Following, alone: Alone) -> None:
        self._one, self._alone = one, alone
        self.heard: list[tuple[object, ...]] = []
        self._ended = threading.Event()
        self.answers: list[torch.Tensor] = []
        one.runs.launch = self.launch  # type: ignore[assignment]

    def launch(self, run: Run, stamp: tuple[int, int], number: int) -> Any:
        """In place of a GPU's runs."""
        rank = self._one.rank
        assert rank.member.lane is not None
        lanes = RunLanes.of(rank.epoch.members, rank.member.lane, run.rows)
        for at, (layer, _) in enumerate(run.steps):
            rows = LaneInput(*self._alone.batch(ROWS, seed=at), torch.ones(ROWS, dtype=torch.bool))
            self.answers.append(rank.record(layer, rows, lanes.launched, number=number + at))
        told = Told(0, (len(run.steps),), len(run.steps))
        return SimpleNamespace(event=Passed(), read=lambda: told)

    def ask(self, version: int = 0, abort: int = 0) -> tuple[object, ...]:
        """A run is asked for and ends; how."""
        self._ended.clear()
        lane: Any = SimpleNamespace(abort=[abort])
        self._one.runs.ask(OwnRun(Run(lane, STEPS, ROWS, 0), self, version))
        assert self._ended.wait(SECONDS)
        return self.heard[-1]

    def ran(self, told: Told, version: int) -> None:
        self._hear("ran", told.answered)

    def lost(self, why: str) -> None:
        self._hear("lost", why)

    def other_weights(self, version: int) -> None:
        self._hear("other weights", version)

    def _hear(self, *what: object) -> None:
        self.heard.append(what)
        self._ended.set()


def ordered(rank: int, world: int, path: Path) -> tuple[int, int]:
    """A lane, a rank and an owner that serve; the lane's caller asks for runs while calls go on. Returns the
    steps that this member counted, and those of the head, 0 where it is elsewhere.
    """
    members = SHAPES["a lane, a rank, an owner"]
    served, _ = served_and_planned(path, members, "nvlink_ll")
    head, address = head_for(rank, served, members)
    one = Following(members.seats[rank], members, path, address)
    if head is None:
        one.run()
        return one.member.steps.steps, 0
    _led(head, one, Alone(path))
    return one.member.steps.steps, head.progress().steps


def _led(head: Coordinator, one: Following, alone: Alone) -> None:
    thread = threading.Thread(target=one.run)
    thread.start()
    try:
        head.wait_serving(SECONDS)
        caller, stop = Caller(one, alone), threading.Event()
        answered: list[int] = []
        calls = threading.Thread(target=_calling, args=(one, alone, stop, answered))
        calls.start()
        for turn in range(TURNS):
            caller.answers = []
            assert caller.ask() == ("ran", len(STEPS))
            for at, (layer, _) in enumerate(STEPS):
                batch = alone.batch(ROWS, seed=at)
                torch.testing.assert_close(
                    caller.answers[at], alone.forward(layer, *batch), rtol=1e-4, atol=1e-4
                )
            if turn == TURNS // 2:
                caller.answers = []
                assert caller.ask(abort=ABORT) == ("lost", "its pass was over before its turn came")
                assert caller.ask(version=77)[0] == "other weights"
                assert not caller.answers, "others compute its steps, and it brings no rows"
        stop.set()
        calls.join(SECONDS)
        assert not calls.is_alive() and answered == list(range(1, len(answered) + 1)) and len(answered) > 2
    finally:
        head.stop()
        thread.join(SECONDS)
    assert not thread.is_alive()
    assert caller.ask() == ("lost", "the group forms anew")


def _calling(one: Following, alone: Alone, stop: threading.Event, answered: list[int]) -> None:
    """Calls of the same member's door; each one that has the right answer is noted."""
    assert one.lane is not None
    while not stop.is_set():
        seed = len(answered) + 1
        batch = alone.batch(5, seed)
        call = one.lane.submit(LaneBatch(LAYER, *batch))
        assert call.wait(SECONDS)
        torch.testing.assert_close(call.result()[0], alone.forward(LAYER, *batch), rtol=1e-4, atol=1e-4)
        answered.append(seed)
