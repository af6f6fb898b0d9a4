"""A member's steps over a rank that is none and engines that are slow: `Running`."""

from __future__ import annotations

import queue
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from slow_engines import SlowEngines

from moeserve.runtime.control.reached import Progress
from moeserve.runtime.rank.lanes.lane import Lane
from moeserve.runtime.rank.lanes.lane_call import LaneBatch, LaneCall
from moeserve.runtime.rank.member.steps import MemberSteps
from moeserve.runtime.rank.transfers.step_room import StepRoom
from moeserve.runtime.rank.transfers.transfers import Transfers
from moeserve.runtime.step import CallerMemory, Header, Lent, Phases, StepRecord

H, K, GENERATION = 8, 2, 3


class FakeRank:
    """Doubles rows; its device is slow, and what its steps went without is what a test says."""

    def __init__(self, device: str = "fake") -> None:
        self.index, self.device, self.meter, self.progress = 0, device, None, Progress()
        self.served = SimpleNamespace(
            layers=(0,), dtype=torch.float32, checkpoint=SimpleNamespace(hidden=H), lane_rows=16
        )
        self.plans = {0: SimpleNamespace(problem=SimpleNamespace(top_k=K))}
        self.launched: list[int] = []
        self.bad: dict[int, Exception] = {}  # by how many steps were looked at
        self.looked = self.counted = 0

    def room(self, layer: int, lane_rows: tuple[int, ...]) -> StepRoom:
        return StepRoom.of(torch.zeros(lane_rows[0], H), K)

    def step(self, layer: int, rows: Any, lane_rows: tuple[int, ...], number: int, *, lent: bool) -> Any:
        self.launched.append(number)
        return rows.hidden * 2, Phases(0.0, 0.0, 0.0, 1, 0, 0, "local")

    def count(self) -> None:
        self.counted += 1

    def rows_computed(self) -> None:
        return None

    def late(self, layer: int) -> tuple[int, ...]:
        self.looked += 1
        if self.looked in self.bad:
            raise self.bad[self.looked]
        return ()


class Running:
    """A member's steps over slow engines."""

    def __init__(self) -> None:
        self.engines, self.rank = SlowEngines(), FakeRank()
        self.lane = Lane(0, 16, 16)
        self.lane.transfers = Transfers(self.engines, 1 << 20)
        self.announced: list[int] = []
        self.lane.announce = lambda job: self.announced.append(job.job)
        self.lane.open()
        self.said: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.records: list[StepRecord] = []
        rank: Any = self.rank
        self.on_done: Callable[[], None] = lambda: None
        self.steps = MemberSteps(rank, self.lane, self._done, self.records.append)
        self.failures: list[Exception] = []
        self.steps.failed = lambda entry, error: self.failures.append(error)
        self.epoch: Any = SimpleNamespace(number=1, version=lambda at: 1)
        self.given_back: list[int] = []

    def call(self, number: int, rows: int = 2) -> LaneCall:
        """One caller's rows, and the step that takes them."""
        call = self.submit(number, rows)
        self.step(number, [call])
        return call

    def step(self, number: int, calls: list[LaneCall]) -> None:
        """The step that takes these callers' rows."""
        jobs = tuple((call.jobs[0].number, call.jobs[0].hidden.shape[0]) for call in calls)
        header = Header(number, 1, 0, (sum(rows for _, rows in jobs),), jobs)
        self.steps.run(header, GENERATION, self.epoch)

    def _done(self, message: dict[str, Any]) -> None:
        self.on_done()
        self.said.put(message)

    def submit(self, number: int, rows: int = 2, *, in_place: bool = True) -> LaneCall:
        """One caller's rows."""
        hidden = torch.full((rows, H), float(number))
        memory = CallerMemory(lambda: self.given_back.append(number))
        lent = Lent(memory, True, torch.zeros(rows, H) if in_place else None)
        ids, weights = torch.zeros(rows, K, dtype=torch.int32), torch.ones(rows, K)
        return self.lane.submit(LaneBatch(0, hidden, ids, weights, lent=lent), lambda call: memory.done())

    def end(self) -> None:
        """All that was launched ends, and with it the thread that answers."""
        for moment in self.engines.moments:
            moment.passed.set()
        self.steps.close()
