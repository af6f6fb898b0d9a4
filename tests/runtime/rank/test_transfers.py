"""Rows to the device and answers home: the same bytes by every way, and no memory given back too soon."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from slow_engines import SlowEngines
from torch import Tensor

from moeserve.runtime.errors import CallerLeft, GroupUnavailable
from moeserve.runtime.rank.lanes.lane import Lane
from moeserve.runtime.rank.lanes.lane_call import LaneBatch
from moeserve.runtime.rank.transfers.engines import Engines, HostEngines
from moeserve.runtime.rank.transfers.step_room import StepRoom
from moeserve.runtime.rank.transfers.transfers import (
    AHEAD_BYTES,
    DIRECT_BYTES,
    ENGINES_AHEAD_BYTES,
    Transfers,
)
from moeserve.runtime.step import CallerMemory, Job, Lent, Stamp, Upload

H, K = 64, 2
ROW = H * 4  # bytes
SMALL, LARGE = 3, ENGINES_AHEAD_BYTES // ROW + 1


class Memory:
    """Memory of a caller, and when it was given back."""

    def __init__(self) -> None:
        self.closed = 0
        self.held = CallerMemory(self._close)

    def _close(self) -> None:
        self.closed += 1


def job(rows: int, seed: int = 0, lent: Lent | None = None) -> Job:
    random = torch.Generator().manual_seed(seed)
    experts = torch.randint(-1, 8, (rows, K), generator=random, dtype=torch.int32)
    hidden, weights = torch.randn(rows, H, generator=random), torch.rand(rows, K, generator=random)
    return Job(seed, 0, hidden, experts, weights, float("inf"), lambda job: None, lent=lent)


def room(rows: int, more: int = 2) -> StepRoom:
    made = StepRoom.of(torch.full((rows + more, H), 7.0), K)
    made.routes.fill_(255)
    return made


def lent(memory: Memory, rows: int, *, home: bool = True) -> Lent:
    return Lent(memory.held, True, torch.zeros(rows, H) if home else None)


@pytest.mark.parametrize("sizes", [(SMALL,), (LARGE,), (SMALL, SMALL, LARGE, SMALL), (LARGE, LARGE, SMALL)])
@pytest.mark.parametrize("registered", [True, False])
@pytest.mark.parametrize("ahead", [True, False])
def test_every_way_brings_the_same_rows_and_answers(
    sizes: tuple[int, ...], registered: bool, ahead: bool
) -> None:
    check_every_way(HostEngines(), sizes, registered, ahead)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("sizes", [(SMALL,), (LARGE,), (SMALL, SMALL, LARGE, SMALL), (LARGE, LARGE, SMALL)])
@pytest.mark.parametrize("ahead", [True, False])
def test_every_way_brings_the_same_rows_and_answers_on_a_device(sizes: tuple[int, ...], ahead: bool) -> None:
    check_every_way(Engines("cuda:0"), sizes, False, ahead)


def check_every_way(engines: Engines, sizes: tuple[int, ...], registered: bool, ahead: bool) -> None:
    transfers, memory = Transfers(engines, 1 << 30), [Memory() for _ in sizes]
    jobs = [job(rows, at, lent(memory[at], rows) if registered else None) for at, rows in enumerate(sizes)]
    if ahead:
        for one in jobs:
            one.upload = transfers.upload(one)
            least = ENGINES_AHEAD_BYTES if registered else AHEAD_BYTES
            assert (one.upload is not None) == (one.hidden.nbytes >= least)
    gone = 2  # rows of a job that left
    parts = [(one.hidden.shape[0], one) for one in jobs] + [(gone, None)]
    total = sum(rows for rows, _ in parts)
    hidden = torch.full((total + 2, H), 7.0, device=engines.device)
    there = StepRoom.of(hidden, K)
    there.routes.fill_(255)
    kept = transfers.gather(there, parts)
    answer = there.rows.hidden[:total] * 2
    flight = transfers.fetch(answer, parts, kept)
    flight.event.synchronize()
    at = 0
    for output, (rows, one) in zip(flight.outputs, parts, strict=True):
        here = slice(at, at + rows)
        at += rows
        if one is None:
            assert output is None and not there.rows.valid[here].any()
            continue
        assert output is not None and output.device.type == "cpu"
        assert torch.equal(output, one.hidden * 2)
        assert torch.equal(there.rows.experts[here].cpu(), one.experts)
        assert torch.equal(there.rows.weights[here].cpu(), one.weights)
        assert there.rows.valid[here].all()
        in_place = one.lent is not None and (rows * ROW >= DIRECT_BYTES or len(parts) == 1)
        assert (one.lent is not None and output is one.lent.home) == in_place
    assert not there.rows.valid[at:].any(), "rows that nobody brought are not valid"
    for one in memory:
        one.held.done()  # the call has ended
    flight.release()
    assert [one.closed for one in memory] == [1] * len(memory)


def test_memory_is_given_back_when_no_copy_can_touch_it() -> None:
    memory, transfers = Memory(), Transfers(HostEngines(), 1 << 30)
    one = job(LARGE, 0, lent(memory, LARGE))
    there = room(LARGE)
    flight = transfers.fetch(
        there.rows.hidden[:LARGE], [(LARGE, one)], transfers.gather(there, [(LARGE, one)])
    )
    memory.held.done()  # the caller has left
    assert memory.closed == 0
    flight.release()
    assert memory.closed == 1
    assert not memory.held.use(), "what was given back is not used again"


def test_rows_of_a_caller_who_has_left_are_copied_by_the_host() -> None:
    memory, transfers = Memory(), Transfers(HostEngines(), 1 << 30)
    one = job(LARGE, 0, lent(memory, LARGE))
    memory.held.done()
    there = room(LARGE)
    flight = transfers.fetch(
        there.rows.hidden[:LARGE], [(LARGE, one)], transfers.gather(there, [(LARGE, one)])
    )
    assert flight.outputs[0] is not one.lent.home  # type: ignore[union-attr]
    flight.release()
    assert memory.closed == 1


def test_memory_of_routes_is_filled_again_when_its_step_has_ended() -> None:
    class Counting(HostEngines):
        made = 0

        def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
            self.made += dtype == torch.uint8
            return super().pinned(shape, dtype)

    engines = Counting()
    transfers, there = Transfers(engines, 1 << 30), room(4)
    flights = []
    for seed, rows in enumerate((4, 2, 3)):  # fewer rows than before: the others are not valid any more
        one = job(rows, seed, lent(Memory(), rows))
        kept = transfers.gather(there, [(rows, one)])
        assert torch.equal(there.rows.experts[:rows], one.experts)
        assert torch.equal(there.rows.weights[:rows], one.weights)
        assert there.rows.valid.tolist() == [True] * rows + [False] * (6 - rows)
        flights.append(transfers.fetch(there.rows.hidden[:rows], [(rows, one)], kept))
        if seed == 1:
            flights.pop().release()
    assert engines.made == 2, "the first step's is not filled again before it has ended"
    for flight in flights:
        flight.release()
    assert len(there.staged) == 2


def test_uploads_ahead_of_their_steps_have_bounded_room() -> None:
    transfers = Transfers(HostEngines(), 2 * LARGE * ROW)
    uploads = [transfers.upload(job(LARGE, seed)) for seed in range(3)]
    assert [one is not None for one in uploads] == [True, True, False]
    assert uploads[0] is not None
    uploads[0].release()
    assert transfers.upload(job(LARGE)) is not None


def test_an_upload_that_fails_gives_memory_and_room_back() -> None:
    class Broken(HostEngines):
        def uploading(self) -> None:  # type: ignore[override]
            raise RuntimeError("no stream")

    memory, transfers = Memory(), Transfers(Broken(), LARGE * ROW)
    with pytest.raises(RuntimeError, match="no stream"):
        transfers.upload(job(LARGE, 0, lent(memory, LARGE)))
    memory.held.done()
    assert memory.closed == 1
    transfers.engines = HostEngines()
    assert transfers.upload(job(LARGE)) is not None


class Placed:
    """A lane whose rows are uploaded slowly, and a call on it."""

    def __init__(self, rows: int = LARGE) -> None:
        self.engines = SlowEngines()
        self.lane = Lane(0, 2 * LARGE, 8)
        self.lane.transfers = Transfers(self.engines, 1 << 30)
        self.retired: list[Upload] = []
        self.lane.retire = self.retired.append
        self.lane.announce = lambda job: None
        self.lane.open()
        self.memory = Memory()
        one = job(rows)
        self.batch = LaneBatch(0, one.hidden, one.experts, one.weights, lent=lent(self.memory, rows))


LEAVING: dict[str, Callable[[Placed], object]] = {
    "left": lambda placed: placed.lane.submit(placed.batch).give_up(CallerLeft("left")),
    "aborted": lambda placed: (placed.lane.submit(placed.batch), placed.lane.close("gone")),
}


@pytest.mark.parametrize("way", LEAVING)
def test_what_was_uploaded_for_a_call_that_ended_is_let_go_after_its_copy(way: str) -> None:
    placed = Placed()
    LEAVING[way](placed)
    placed.memory.held.done()  # as the door does when the call ends
    (upload,) = placed.retired
    assert placed.memory.closed == 0, "the engines may still read it"
    upload.release()
    assert placed.memory.closed == 1


def test_a_job_whose_step_took_it_is_retired_by_nobody_else() -> None:
    placed = Placed()
    call = placed.lane.submit(placed.batch)
    (taken,) = placed.lane.take(((call.jobs[0].number, LARGE),))
    assert taken is call.jobs[0]
    call.give_up(CallerLeft("left"))
    assert placed.retired == []


def test_a_job_that_ended_before_its_step_takes_it_is_gone() -> None:
    placed = Placed()
    call = placed.lane.submit(placed.batch)
    assert call.jobs[0].upload is not None and call.jobs[0].upload.claim()  # as its end does
    assert placed.lane.take(((call.jobs[0].number, LARGE),)) == [None]


def test_a_call_that_cannot_be_announced_lets_go_of_its_upload() -> None:
    placed = Placed()

    def refuse(job: object) -> None:
        raise GroupUnavailable("nobody is there")

    placed.lane.announce = refuse
    with pytest.raises(GroupUnavailable):
        placed.lane.submit(placed.batch)
    assert len(placed.retired) == 1 and placed.lane.in_flight == 0


def test_parts_of_a_large_call_are_joined_where_the_device_wrote_them() -> None:
    placed = Placed(4 * LARGE)
    call = placed.lane.submit(placed.batch)
    home = placed.batch.lent.home  # type: ignore[union-attr]
    assert home is not None and len(call.jobs) == 2
    for one in call.jobs:
        written: Tensor | None = one.lent.home  # type: ignore[union-attr]
        assert written is not None
        written.copy_(one.hidden)
        one.finish(written, Stamp(1, 1))
    answer, _ = call.result()
    assert answer is home and torch.equal(answer, placed.batch.hidden)
