"""A step of one caller writes its answer where the caller wants it, on a CPU; others are copied."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from moeserve.runtime.doors.payloads import RegionLimits, Regions
from moeserve.runtime.rank.lanes.lane import Lane
from moeserve.runtime.rank.lanes.lane_call import LaneBatch, LaneCall
from moeserve.runtime.rank.member import finishing
from moeserve.runtime.rank.member.steps import MemberSteps
from moeserve.runtime.step import CallerMemory, Header, Lent, Phases

H, K = 8, 2
SECONDS = 5.0


class FakeRank:
    """Doubles rows into the place that it is given."""

    device, index, meter, host_threads = "cpu", 0, None, None

    def __init__(self) -> None:
        self.served = SimpleNamespace(
            layers=(0,), dtype=torch.float32, checkpoint=SimpleNamespace(hidden=H), lane_rows=16
        )
        self.plans = {0: SimpleNamespace(problem=SimpleNamespace(top_k=K))}
        self.progress = SimpleNamespace(end=lambda number: None)
        self.places: list[Tensor | None] = []
        self.users: list[int] = []  # of the caller's memory while the step runs
        self.memory: list[CallerMemory] = []
        self.error: Exception | None = None

    def step(
        self, layer: int, rows: Any, lane_rows: tuple[int, ...], number: int, *, place: Tensor | None
    ) -> tuple[Tensor, Phases]:
        self.places.append(place)
        self.users += [memory._users for memory in self.memory]
        if self.error is not None:
            raise self.error
        answer = rows.hidden * 2
        return answer if place is None else place.copy_(answer), Phases(0.0, 0.0, 0.0, 1, 0, 0, "local")

    def rows_computed(self) -> None:
        return None

    def late(self, layer: int) -> tuple[int, ...]:
        return ()


class Running:
    """A CPU rank's steps."""

    def __init__(self) -> None:
        self.rank, self.lane = FakeRank(), Lane(0, 16, 16)
        self.lane.announce = lambda job: None
        self.lane.open()
        self.said: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        rank: Any = self.rank
        self.on_done: Callable[[], None] = lambda: None
        self.steps = MemberSteps(rank, self.lane, self._done, lambda record: None)
        self.closed = 0

    def submit(self, rows: int, home: Tensor | None) -> LaneCall:
        """One caller's rows, which are 1."""
        memory = CallerMemory(self._close)
        self.rank.memory.append(memory)
        ids, weights = torch.zeros(rows, K, dtype=torch.int32), torch.ones(rows, K)
        lent = Lent(memory, True, home)
        batch = LaneBatch(0, torch.ones(rows, H), ids, weights, lent=lent)
        return self.lane.submit(batch, lambda call: memory.done())

    def _close(self) -> None:
        self.closed += 1

    def _done(self, message: dict[str, Any]) -> None:
        self.on_done()
        self.said.put(message)

    def step(self, *calls: LaneCall) -> None:
        """One step for all jobs of these calls."""
        jobs = tuple((job.number, job.hidden.shape[0]) for call in calls for job in call.jobs)
        header = Header(1, 1, 0, (sum(rows for _, rows in jobs),), jobs)
        epoch: Any = SimpleNamespace(number=1, version=lambda at: 1)
        self.steps.run(header, 1, epoch)


@pytest.fixture
def running() -> Iterator[Running]:
    made = Running()
    yield made
    made.steps.close()


def test_a_step_of_one_caller_writes_its_answer_in_its_place(running: Running) -> None:
    home = torch.zeros(3, H)
    call = running.submit(3, home)
    running.step(call)
    assert call.wait(SECONDS) and call.result()[0] is home
    assert running.rank.places[0] is home and torch.equal(home, torch.full((3, H), 2.0))
    assert call.in_place
    assert running.rank.users == [2], "the step holds the caller's memory beside the call"
    assert running.closed == 1


def test_rows_of_other_lanes_are_noted(running: Running) -> None:
    noted: list[int] = []
    running.steps.on_others = lambda: noted.append(1)
    running.step(running.submit(2, None))
    assert not noted
    epoch: Any = SimpleNamespace(number=1, version=lambda at: 1)
    running.steps.run(Header(2, 1, 0, (0, 5), ()), 1, epoch)
    assert noted == [1]


def test_callers_who_share_a_step_have_their_answers_copied(running: Running) -> None:
    homes = [torch.zeros(3, H), torch.zeros(2, H)]
    calls = [running.submit(home.shape[0], home) for home in homes]
    running.step(*calls)
    for call, home in zip(calls, homes, strict=True):
        assert call.wait(SECONDS) and torch.equal(call.result()[0], torch.full_like(home, 2.0))
        assert not home.any() and not call.in_place, "whoever replies copies it"
    assert running.rank.places == [None]


def test_an_answer_of_another_dtype_is_converted_by_who_replies(running: Running) -> None:
    call = running.submit(3, torch.zeros(3, H, dtype=torch.bfloat16))
    running.step(call)
    assert call.wait(SECONDS) and call.result()[0].dtype == torch.float32 and not call.in_place
    assert running.rank.places == [None]


def test_a_caller_without_a_place_gets_an_answer_of_its_own(running: Running) -> None:
    call = running.submit(3, None)
    running.step(call)
    assert call.wait(SECONDS) and not call.in_place and running.rank.places == [None]


def test_memory_that_was_given_back_is_not_written(running: Running) -> None:
    home = torch.zeros(3, H)
    call = running.submit(3, home)
    running.rank.memory[0].done()  # as when the call has ended otherwise
    running.step(call)
    assert running.rank.places == [None] and not home.any()


def test_a_step_that_fails_gives_the_memory_back(running: Running) -> None:
    call = running.submit(3, torch.zeros(3, H))
    running.rank.error = RuntimeError("a member is gone")
    with pytest.raises(RuntimeError, match="a member is gone"):
        running.step(call)
    running.rank.memory[0].done()  # the call ends
    assert running.closed == 1
    assert not call.in_place, "it has no answer"


def test_parts_of_a_large_call_lie_in_one_place(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    home = torch.zeros(40, H)
    call = running.submit(40, home)
    assert len(call.jobs) == 3
    order = list[str]()
    monkeypatch.setattr(finishing, "LARGE_BYTES", 8 * H * 4)
    running.on_done = lambda: order.append("told" if not call.ended else "answered")
    for job in call.jobs:
        running.step(SimpleNamespace(jobs=[job]))  # type: ignore[arg-type]
    assert call.wait(SECONDS) and call.in_place
    assert call.result()[0] is home and torch.equal(home, torch.full((40, H), 2.0))
    assert order == ["told"] * 3, "the last part does not know whether the others are to be copied"


@pytest.mark.parametrize("on_device", [False, True])
def test_a_rank_on_the_host_writes_to_what_nobody_can_make_smaller(on_device: bool) -> None:
    regions = Regions(RegionLimits(allow_named=True), on_device=on_device)
    name, size = regions.create(4096)
    hold = regions.hold(name, 0, size)
    assert hold.reached == on_device == regions.reached(name)
    assert not regions.reached("another")
    hold.close()
    regions.close()
