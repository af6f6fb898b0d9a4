"""Large rows and answers of a pass, copied while the rank reads and writes others of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from threading import Thread

import numpy as np
import pytest

from moeserve.proto import moe_pb2
from moeserve.proto.client import Choice
from moeserve.proto.passes import mailbox as m
from moeserve.proto.passes.attached import AttachedLane, Wanted
from moeserve.proto.passes.expected import Expected
from moeserve.proto.passes.mailbox import MailboxLayout, filled_of, tag_of
from moeserve.proto.passes.memory import LaneMemory
from moeserve.proto.passes.running import PARTED_BYTES, Announced, Pass
from moeserve.proto.tensors import Plain
from moeserve.runtime.doors.payloads import RegionLimits, Regions

ROWS, HIDDEN, SECONDS = 1500, 4096, 20.0
LAYOUT = MailboxLayout.of((ROWS, 1), (HIDDEN, 4, 2), "bf16")


class Lane:
    """A lane's memory as its caller has it, and its words as a rank does that is no more than this."""

    def __init__(self, regions: Regions, *, goes_ahead: bool = True, takes: int = m.TAKES_FILLED) -> None:
        sizes = LAYOUT.mailbox_bytes, LAYOUT.answers_bytes
        names = [regions.create(size)[0] for size in sizes]
        self._held = [regions.hold(name, 0, size) for name, size in zip(names, sizes, strict=True)]
        self.box, self.out = (one.memory.cast("B").cast("Q") for one in self._held)
        self.out[m.TAKES] = takes
        places = LAYOUT.columns(0)[0], LAYOUT.answer(0)
        self.hidden, self.answer = (
            np.frombuffer(one.memory, np.uint16, ROWS * HIDDEN, place).reshape(ROWS, HIDDEN)
            for one, place in zip(self._held, places, strict=True)
        )
        made = moe_pb2.AttachLaneReply(
            mailbox=names[0],
            answers=names[1],
            mailbox_bytes=sizes[0],
            answers_bytes=sizes[1],
            socket=regions.socket,
            goes_ahead=goes_ahead,
        )
        self.made, self.memory = made, LaneMemory(LAYOUT, made)
        self.run = Pass(self.memory, Announced(1, (0,), 1), SECONDS, [Expected(0.0)])

    def close(self) -> None:
        """Lets go of both sides."""
        self.memory.close()
        del self.hidden, self.answer
        self.box.release()
        self.out.release()
        for one in self._held:
            one.close()

    @property
    def filled(self) -> int:
        """What the caller says of its rows."""
        return int(self.box[LAYOUT.header(0) + m.FILLED])

    def has_tag(self, step: int) -> bool:
        """Whether the rows of this step may be read."""
        return bool(self.box[LAYOUT.header(0) + m.TAG] == tag_of(1, step))

    def say(self, step: int, rows: int, *, last: bool = True) -> None:
        """Says that so many rows of an answer are there; last: by its tag, too."""
        head = LAYOUT.answer_header(0)
        self.out[head + m.ANSWERED] = filled_of(tag_of(1, step), rows)
        if last:
            self.out[head + m.TAG] = tag_of(1, step)


class Nobody:
    """A way to a rank that is not asked for anything."""

    def detach(self, mailbox: str, seconds: float) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


@pytest.fixture
def regions() -> Iterator[Regions]:
    made = Regions(RegionLimits(max_bytes=1 << 27))
    yield made
    made.close()


def rows_of(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 16, (ROWS, HIDDEN), np.uint16)


def post(lane: Lane, rows: np.ndarray) -> None:
    lane.run.post(0, rows, Choice(np.zeros((ROWS, 2), np.int32), np.ones((ROWS, 2), np.float32)))


def until(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + SECONDS
    while not condition() and time.monotonic() < end:
        time.sleep(0)
    return condition()


def test_rows_are_said_to_be_there_as_they_are(regions: Regions) -> None:
    """A rank that reads what it is told of reads the caller's rows, and has their tag before the last."""
    lane, seen, wrong = Lane(regions), set[int](), list[int]()
    batches = [rows_of(seed) for seed in range(6)]

    def rank(step: int) -> None:
        until(lambda: lane.has_tag(step))
        while (there := lane.filled - 1) < ROWS:
            seen.add(there)
            wrong.extend([step] * (not np.array_equal(lane.hidden[:there], batches[step][:there])))
        wrong.extend([step] * (not np.array_equal(lane.hidden, batches[step])))
        lane.answer[:] = lane.hidden
        lane.say(step, ROWS)

    for step, rows in enumerate(batches):
        thread = Thread(target=rank, args=(step,))
        thread.start()
        post(lane, rows)
        assert np.array_equal(lane.run.take(0), rows)
        thread.join(SECONDS)
    assert not wrong and not thread.is_alive() and min(seen) < ROWS
    lane.close()


@pytest.mark.parametrize("seconds", [float("nan"), -1.0])
def test_a_wait_that_would_not_end_is_refused_before_it_begins(regions: Regions, seconds: float) -> None:
    """The answer is there, and the pass has ended: what is wrong is said all the same."""
    lane = Lane(regions)
    post(lane, rows := rows_of(4))
    lane.answer[:] = rows
    waits = {
        "take": lambda: lane.run.take(0, seconds),
        "take_plain": lambda: lane.run.take_plain(0, seconds),
        "arrived": lambda: lane.run.arrived(0, seconds),
        "wait": lambda: lane.run.wait(seconds),
        "leave": lambda: lane.run.leave(seconds),
    }
    for ended in (False, True):
        lane.out[m.ENDED] = int(ended)
        for name, wait in waits.items():
            with pytest.raises(ValueError, match=rf"^timeout={seconds} must be 0 seconds or more$"):
                wait()
            assert lane.run.under_way(0), name
    lane.out[m.ENDED] = 0
    lane.say(0, ROWS)
    assert np.array_equal(lane.run.take(0, 0), rows)
    lane.close()


@pytest.mark.parametrize("seconds", [float("nan"), -1.0])
def test_nor_does_a_lane_wait_so(regions: Regions, seconds: float) -> None:
    rank = Lane(regions)
    rank.made.hidden, rank.made.experts, rank.made.top_k = HIDDEN, 4, 2
    lane = AttachedLane(Nobody(), Wanted("decoder", ROWS), rank.made)
    for name, wait in (
        ("timeout", lambda: lane.begin([0], timeout=seconds)),
        ("seconds", lambda: lane.rest(seconds)),
    ):
        with pytest.raises(ValueError, match=rf"^{name}={seconds} must be 0 seconds or more$"):
            wait()
    assert lane.number == 0, "no pass was announced"
    for end in (lane.detach, lane.close):
        with pytest.raises(ValueError, match=rf"^seconds={seconds} must be 0 seconds or more$"):
            end(seconds)
    lane.close()
    rank.close()


@pytest.mark.parametrize("lane_is", [{"goes_ahead": False}, {"takes": 0}])
def test_a_rank_that_does_not_take_them_so_has_all_rows_with_their_tag(
    regions: Regions, lane_is: dict[str, int]
) -> None:
    lane = Lane(regions, **lane_is)  # type: ignore[arg-type]
    lane.box[LAYOUT.header(0) + m.FILLED] = 9  # of a step before
    post(lane, rows := rows_of(1))
    assert lane.has_tag(0) and lane.filled == 0 and np.array_equal(lane.hidden, rows)
    lane.answer[:] = rows
    lane.out[LAYOUT.answer_header(0) + m.TAG] = tag_of(1, 0)
    assert np.array_equal(lane.run.take(0), rows)
    lane.close()


def test_an_answer_is_copied_while_the_rest_of_it_comes(regions: Regions) -> None:
    lane, answer, into = Lane(regions), rows_of(2), np.zeros((ROWS, HIDDEN), np.uint16)
    lane.say(7, 1000)  # of another step, and no row of this one
    post(lane, rows_of(1))
    early, copied = list[bool](), list[bool]()

    def rank() -> None:
        time.sleep(0.02)
        early.append(bool(into.any()))
        lane.answer[:500] = answer[:500]
        lane.say(0, 500, last=False)
        copied.append(until(lambda: np.array_equal(into[:500], answer[:500])))
        lane.answer[500:] = answer[500:]
        lane.say(0, ROWS)

    thread = Thread(target=rank)
    thread.start()
    lane.run.take_into(0, Plain(LAYOUT.dtype, into))
    thread.join(SECONDS)
    assert (early, copied) == ([False], [True]) and np.array_equal(into, answer)
    lane.close()


def test_a_rank_that_says_more_rows_than_there_are_gets_nobody_further(regions: Regions) -> None:
    lane, answer = Lane(regions), rows_of(3)
    post(lane, answer)
    lane.answer[:] = answer
    lane.say(0, ROWS + 7, last=False)
    Thread(target=lambda: (time.sleep(0.01), lane.say(0, ROWS))).start()
    assert np.array_equal(lane.run.take(0), answer)
    lane.close()


def test_a_small_answer_and_few_rows_are_one_part(regions: Regions) -> None:
    lane, count = Lane(regions), PARTED_BYTES // HIDDEN // 2 - 1
    rows = rows_of(4)[:count]
    lane.run.post(0, rows, Choice(np.zeros((count, 2), np.int32), np.ones((count, 2), np.float32)))
    assert lane.filled == 0
    lane.answer[:count] = rows
    lane.say(0, 5, last=False)
    Thread(target=lambda: (time.sleep(0.01), lane.say(0, count))).start()
    assert np.array_equal(lane.run.take(0), rows)
    lane.close()
