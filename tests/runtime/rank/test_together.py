"""Rows of several callers that are one job: where they go to the device and home, and who may leave."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor

from moeserve.runtime.rank.lanes.together import Part, Together
from moeserve.runtime.rank.transfers.engines import Engines, HostEngines
from moeserve.runtime.rank.transfers.step_room import StepRoom
from moeserve.runtime.rank.transfers.transfers import ENGINES_AHEAD_BYTES, Transfers
from moeserve.runtime.step import Job, LaneInput, Stamp, empty_input, joined_rows

H, K = 64, 2
MANY = ENGINES_AHEAD_BYTES // (H * 4)
LEFT = RuntimeError("it left")


@dataclass
class Callers:
    """Callers of so many rows each."""

    rows: Sequence[int]
    told: list[tuple[int, object]] = field(default_factory=list)
    back: list[int] = field(default_factory=list)
    done: list[int] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    over: list[Job] = field(default_factory=list)

    def __post_init__(self) -> None:
        total = sum(self.rows)
        random = torch.Generator().manual_seed(0)
        self.parts = [self.part(at, count, random) for at, count in enumerate(self.rows)]
        ids = torch.randint(0, 8, (total, K), generator=random, dtype=torch.int32).numpy()
        choice = ids, torch.rand(total, K, generator=random)
        self.together = Together(self.parts, choice, self.over.append, lambda: self.order.append("over"))
        self.job = self.together.job(7, (3, 2), math.inf, (True, True))

    def part(self, at: int, count: int, random: torch.Generator) -> Part:
        """The part of caller `at`, whose memory is pinned where there is a device."""
        hidden, home = torch.randn(count, H, generator=random), torch.zeros(count, H)
        if torch.cuda.is_available():
            hidden, home = hidden.pin_memory(), home.pin_memory()

        def tell(outcome: object) -> None:
            self.told.append((at, outcome))

        return Part(hidden, home, tell, lambda: self.done.append(at), lambda: self.back.append(at))

    def whole(self) -> Tensor:
        """All rows."""
        return torch.cat([part.hidden for part in self.parts])


def check(engines: Engines, rows: Sequence[int], left: int | None) -> None:
    """A step of the job, which doubles its rows, beside two rows of a job that is gone."""
    callers, transfers = Callers(rows), Transfers(engines, 1 << 30)
    job, total = callers.job, sum(rows)
    job.upload = transfers.upload(job)
    assert (job.upload is not None) == (total * H * 4 >= ENGINES_AHEAD_BYTES)
    uploaded = job.upload is not None
    if left is not None:
        callers.together.leave(callers.parts[left], LEFT)
        assert callers.told == [(left, LEFT)]
        assert callers.back == ([] if uploaded else [left]), "its rows may be on their way to the device"
    room = StepRoom.of(torch.full((total + 2, H), 7.0, device=engines.device), K)
    kept = transfers.gather(room, [(2, None), (total, job)])
    ids = job.experts.clone()
    answer = room.rows.hidden * 2
    flight = transfers.fetch(answer, [(2, None), (total, job)], kept)
    flight.event.synchronize()
    assert torch.equal(room.rows.experts[2:].cpu(), ids)
    assert room.rows.valid.tolist() == [False] * 2 + [True] * total
    at = 0
    for number, part in enumerate(callers.parts):
        if number == left:
            assert uploaded or (ids[at : at + part.rows] == -1).all()
        else:
            assert torch.equal(room.rows.hidden[2 + at : 2 + at + part.rows].cpu(), part.hidden)
        at += part.rows
    flight.release()
    assert set(callers.back) <= {left}, "the call itself has not ended"
    stays = [number for number in range(len(rows)) if number != left]
    output = flight.outputs[1]
    assert output is not None
    job.finish(output, Stamp(3, 1))
    assert callers.told[left is not None :] == [(number, Stamp(3, 1)) for number in stays]
    assert sorted(callers.back) == list(range(len(rows))) and callers.over == [job]
    for number, part in enumerate(callers.parts):
        if number != left:
            assert torch.equal(part.home, 2 * part.hidden)
        elif not uploaded:  # else its memory was still lent when the answer went home
            assert not part.home.any()


SIZES = [(3,), (3, 40, 5), (1, 1, 1, 1), (MANY, 3, MANY)]
LEAVES = [(rows, left) for rows in SIZES for left in (None, 1) if left is None or left < len(rows)]


@pytest.mark.parametrize(
    "engines",
    [HostEngines, pytest.param(lambda: Engines("cuda:0"), marks=pytest.mark.gpu(1))],
    ids=["host", "device"],
)
@pytest.mark.parametrize(("rows", "left"), LEAVES)
def test_rows_go_to_one_step_and_answers_home_each_to_its_place(
    engines: Callable[[], Engines], rows: Sequence[int], left: int | None
) -> None:
    check(engines(), rows, left)


def test_a_step_on_the_host_has_the_rows_of_all_and_brings_answers_home() -> None:
    callers = Callers((2, 3))
    found = LaneInput.gather(_Header, [callers.job], empty_input(H, K, torch.float32))  # type: ignore[arg-type]
    assert torch.equal(found.hidden, callers.whole()) and torch.equal(found.experts, callers.job.experts)
    callers.job.finish(3 * found.hidden, Stamp(3, 1))
    assert all(torch.equal(part.home, 3 * part.hidden) for part in callers.parts)


class _Header:
    jobs = ((7, 5),)


def test_who_leaves_while_a_device_has_the_rows_has_its_memory_behind_that() -> None:
    callers = Callers((2, 3))
    memory = callers.job.lent.memory  # type: ignore[union-attr]
    assert memory.use()
    callers.together.leave(callers.parts[0], LEFT)
    callers.together.leave(callers.parts[0], LEFT)
    assert callers.told == [(0, LEFT)] and callers.back == []
    callers.job.finish(2 * joined_rows(callers.job), Stamp(3, 1))
    assert callers.told[1:] == [(1, Stamp(3, 1))] and callers.back == []
    memory.done()
    assert sorted(callers.back) == [0, 1]
    assert not callers.parts[0].home.any() and callers.parts[1].home.any()


def test_who_leaves_while_nothing_has_the_rows_has_its_memory_at_once() -> None:
    """Also behind a step without an answer, while the group forms again."""
    callers = Callers((2, 3))
    memory = callers.job.lent.memory  # type: ignore[union-attr]
    assert memory.use()
    memory.done()
    callers.together.leave(callers.parts[0], LEFT)
    assert callers.back == [0] and not joined_rows(callers.job)[:2].any()


def test_a_job_that_ends_twice_at_once_tells_each_caller_once() -> None:
    """The lane is closed by one thread while another brings the answer home."""
    callers = Callers((2, 3))

    class Slow:
        is_meta = False

        def data_ptr(self) -> int:
            return 0

        def __getitem__(self, rows: slice) -> Tensor:
            callers.job.fail(LEFT)
            return torch.ones(rows.stop - rows.start, H)

    callers.job.finish(Slow(), Stamp(3, 1))  # type: ignore[arg-type]
    assert callers.told == [(0, Stamp(3, 1)), (1, Stamp(3, 1))]
    assert callers.back == [0, 1] and callers.over == [callers.job] and callers.order == ["over"]


def test_what_goes_wrong_with_one_caller_concerns_no_other() -> None:
    callers = Callers((2, 3, 1))

    def broken(outcome: object) -> None:
        raise OSError("its words are gone")

    callers.parts[0].tell = callers.parts[1].given_back = broken  # type: ignore[assignment]
    callers.job.finish(2 * callers.whole(), Stamp(3, 1))
    assert callers.told == [(1, Stamp(3, 1)), (2, Stamp(3, 1))] and callers.back == [0, 2]
    assert callers.done == [0, 1, 2] and callers.order == ["over"]


def test_the_lane_holds_the_job_no_more_when_callers_hear_of_its_end() -> None:
    callers = Callers((2, 3))
    held = list[int]()
    callers.parts[0].tell = lambda outcome: held.append(len(callers.over))
    callers.job.finish(2 * callers.whole(), Stamp(3, 1))
    assert held == [1] and callers.order == ["over"]


def test_a_job_that_has_ended_goes_without_a_collection() -> None:
    callers = Callers((2, 3))
    gc.disable()
    try:
        job, together = weakref.ref(callers.job), weakref.ref(callers.together)
        callers.job.finish(2 * callers.whole(), Stamp(3, 1))
        callers.over.clear()
        del callers.job, callers.together
        assert job() is None and together() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("rows", [(2,), (2, 3)])
def test_the_job_ends_when_all_have_left_and_no_step_has_it(rows: Sequence[int]) -> None:
    callers = Callers(rows)
    for part in callers.parts:
        callers.together.leave(part, LEFT)
    assert callers.job.error is LEFT and callers.over == [callers.job]
    assert sorted(callers.back) == list(range(len(rows))) == [number for number, _ in callers.told]


def test_the_memory_of_one_caller_alone_cannot_be_taken_into_use_once_it_was_given_back() -> None:
    """A step may have taken the job before its caller left, and touches the memory only behind that."""
    callers = Callers((2,))
    used = list[bool]()
    memory = callers.job.lent.memory  # type: ignore[union-attr]
    callers.parts[0].given_back = lambda: used.append(memory.use())
    callers.together.leave(callers.parts[0], LEFT)
    assert used == [False] and callers.told == [(0, LEFT)] and callers.over == [callers.job]


def test_a_job_that_fails_tells_all_who_are_there_once() -> None:
    callers = Callers((2, 3))
    callers.job.fail(LEFT)
    callers.job.fail(RuntimeError("again"))
    callers.job.finish(callers.whole(), Stamp(3, 1))
    callers.together.leave(callers.parts[1], RuntimeError("late"))
    assert callers.told == [(0, LEFT), (1, LEFT)] and callers.back == [0, 1] == callers.done


def test_a_job_of_one_caller_has_its_rows_and_the_place_of_its_answer() -> None:
    callers = Callers((2,))
    part = callers.parts[0]
    assert callers.job.hidden is part.hidden and not callers.job.segments
    assert callers.job.lent is not None and callers.job.lent.home is part.home
    assert np.array_equal(callers.job.experts.numpy(), callers.together._ids)


@pytest.mark.gpu(1)
def test_threads_that_have_used_no_device_before_upload_rows() -> None:
    """The second finds its device memory in torch's cache, and so calls nothing that gives it a context."""
    transfers = Transfers(Engines("cuda:0"), 1 << 30)
    for _ in range(3):
        callers = Callers((MANY, 3))
        with ThreadPoolExecutor(1) as thread:
            upload = thread.submit(transfers.upload, callers.job).result()
        assert upload is not None
        upload.event.synchronize()
        assert torch.equal(upload.rows.cpu(), callers.whole())
        upload.release()
        del upload


def test_an_answer_that_is_not_dense_comes_home_right() -> None:
    callers, transfers = Callers((3, 40, 5)), Transfers(HostEngines(), 1 << 30)
    room = StepRoom.of(torch.zeros(48, H), K)
    kept = transfers.gather(room, [(48, callers.job)])
    wide = torch.zeros(48, 2 * H)
    wide[:, ::2] = 2 * room.rows.hidden
    transfers.fetch(wide[:, ::2], [(48, callers.job)], kept)
    assert all(torch.equal(part.home, 2 * part.hidden) for part in callers.parts)
