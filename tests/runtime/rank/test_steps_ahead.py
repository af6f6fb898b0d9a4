"""A step is launched before the last one's answer is there; answers come in order, and none of a bad step."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from running_steps import GENERATION, H, K, Running
from slow_engines import SECONDS, SlowEngines

from moeserve.runtime.rank import answers
from moeserve.runtime.rank.answers import MOST_UNFINISHED, InOrder
from moeserve.runtime.rank.lanes.lane_call import LaneBatch
from moeserve.runtime.rank.lanes.together import Part, Together
from moeserve.runtime.rank.member import finishing
from moeserve.runtime.rank.member.steps import APART_STEPS
from moeserve.runtime.rank.transfers import transfers
from moeserve.runtime.rank.transfers.transfers import Transfers
from moeserve.runtime.step import CallerMemory, Header, Lent, Upload


@pytest.fixture
def running() -> Any:
    made = Running()
    yield made
    made.end()


def test_the_next_step_is_launched_before_the_last_answer_is_there(running: Running) -> None:
    first, second = running.call(1), running.call(2)
    assert running.rank.launched == [1, 2]
    assert not first.ended and not second.ended and running.said.empty()
    running.engines.moments[1].passed.set()  # a later answer waits for the earlier ones
    assert not second.wait(0.05)
    running.engines.moments[0].passed.set()
    for number, call in ((1, first), (2, second)):
        assert call.wait(SECONDS)
        assert torch.equal(call.result()[0], torch.full((2, H), 2.0 * number))
        assert running.said.get(timeout=SECONDS)["step"] == number
    running.steps.drain()
    assert [record.number for record in running.records] == [1, 2]
    assert running.given_back == [1, 2]


def alone(running: Running) -> None:
    """Has steps come that are over before the next one does, until callers are answered at once."""
    running.steps.another = lambda: False
    running.engines.passed = True
    for number in range(1, APART_STEPS + 3):
        call = running.call(number)
        assert call.wait(SECONDS) and torch.equal(call.result()[0], torch.full((2, H), 2.0 * number))
        running.steps.drain()


def test_a_caller_who_is_alone_is_answered_by_the_thread_of_the_steps(running: Running) -> None:
    answered: list[int] = []
    running.on_done = lambda: answered.append(threading.get_ident())
    alone(running)
    me = threading.get_ident()
    assert [ident == me for ident in answered] == [False] * (APART_STEPS - 1) + [True] * 3
    assert [running.said.get(timeout=SECONDS)["step"] for _ in answered] == list(range(1, APART_STEPS + 3))
    assert [record.number for record in running.records] == list(range(1, APART_STEPS + 3))


@pytest.mark.parametrize(
    ("large", "in_place", "told_first"), [(False, False, False), (True, False, True), (True, True, False)]
)
def test_the_head_is_told_before_a_large_answer_is_copied(
    running: Running, large: bool, in_place: bool, told_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who is given it may copy it, and the next step waits for the word."""
    monkeypatch.setattr(finishing, "LARGE_BYTES", 2 * H * 4 if large else 2 * H * 4 + 1)
    order = list[str]()
    running.on_done = lambda: order.append("told")
    running.given_back = Noted(order)
    running.engines.passed = True
    call = running.submit(1, in_place=in_place)
    running.step(1, [call])
    assert call.wait(SECONDS) and call.in_place == in_place
    running.steps.drain()
    assert order == (["told", "answered"] if told_first else ["answered", "told"])


class Noted(list[int]):
    """Notes in `order` when a caller's memory was given back, as its answer is."""

    def __init__(self, order: list[str]) -> None:
        super().__init__()
        self.order = order

    def append(self, number: int) -> None:
        super().append(number)
        self.order.append("answered")


@pytest.mark.parametrize("why", ["another entry", "another job", "two callers"])
def test_who_is_not_alone_is_answered_by_the_other_thread(running: Running, why: str) -> None:
    answered: list[int] = []
    alone(running)
    running.on_done = lambda: answered.append(threading.get_ident())
    if why == "another entry":
        running.steps.another = lambda: True
    if why == "another job":
        running.submit(99)
    calls = [running.submit(20)]
    if why == "two callers":
        calls.append(running.submit(21))
    running.step(20, calls)
    assert all(call.wait(SECONDS) for call in calls)
    running.steps.drain()
    assert answered and threading.get_ident() not in answered


def test_steps_that_come_before_the_last_one_is_over_are_launched_at_once_again(running: Running) -> None:
    alone(running)
    came = iter([False, True])  # none before it waits for the device, one afterwards
    running.steps.another = lambda: next(came)
    running.call(20)
    running.steps.another = lambda: False
    running.engines.passed = False
    first, second = running.call(21), running.call(22)  # neither waits for the device here
    assert running.rank.launched[-2:] == [21, 22] and not first.ended and not second.ended


def test_a_bad_step_of_a_caller_who_is_alone_has_no_answer(running: Running) -> None:
    alone(running)
    running.rank.bad[running.rank.looked + 1] = RuntimeError("blocks waited in vain")
    call = running.call(20)
    assert [str(error) for error in running.failures] == ["blocks waited in vain"] and not call.ended
    running.lane.close("the group forms again")


def test_memory_of_a_caller_who_leaves_is_held_until_its_step_has_ended(running: Running) -> None:
    call = running.call(1)
    call.give_up(RuntimeError("left"))
    time.sleep(0.02)
    assert running.given_back == []
    running.engines.moments[0].passed.set()
    running.steps.drain()
    assert running.given_back == [1]


def test_no_step_behind_a_bad_one_is_answered(running: Running) -> None:
    calls = [running.call(1), running.call(2)]
    running.rank.bad[1] = RuntimeError("blocks waited in vain")
    for moment in running.engines.moments:
        moment.passed.set()
    running.steps.drain()
    assert [str(error) for error in running.failures] == [
        "blocks waited in vain",
        "step 2 has no answer, since one before it failed",
    ]
    assert not any(call.ended for call in calls) and running.said.empty()
    running.lane.close("the group forms again")  # as the abort that follows does
    assert all(call.error is not None for call in calls)
    assert running.given_back == [1, 2]


def test_a_generation_that_is_aborted_with_answers_in_flight_ends_whole(running: Running) -> None:
    calls = [running.call(1), running.call(2)]
    running.lane.close("rank 1 is gone")
    assert all("rank 1 is gone" in str(call.error) for call in calls)
    assert running.given_back == [], "the device may still write their answers"
    drained = threading.Thread(target=running.steps.drain)
    drained.start()
    assert drained.is_alive()
    for moment in running.engines.moments:
        moment.passed.set()
    drained.join(SECONDS)
    assert not drained.is_alive() and running.given_back == [1, 2]


def test_a_step_that_cannot_be_launched_gives_memory_back_after_its_copies(running: Running) -> None:
    def refuse(*given: object, lent: bool) -> Any:
        raise ValueError("no such layer")

    running.rank.step = refuse  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="no such layer"):
        running.call(1)
    running.lane.close("aborted")
    assert running.given_back == []
    running.engines.moments[0].passed.set()
    running.steps.drain()
    assert running.given_back == [1]


def fail_once(of: Any, name: str) -> None:
    """Has the next call of a method fail, and the later ones work again."""
    works = getattr(of, name)

    def fail(*given: object, **named: object) -> Any:
        setattr(of, name, works)
        raise ValueError(f"no {name}")

    setattr(of, name, fail)


def fail_in_fetch(running: Running) -> None:
    step = running.rank.step

    def launched(*given: Any, lent: bool) -> Any:
        fail_once(running.engines, "event")
        return step(*given, lent=lent)

    running.rank.step = launched  # type: ignore[method-assign]


FAILING: dict[str, Callable[[Running], None]] = {
    "room": lambda running: fail_once(running.rank, "room"),
    "gather": lambda running: fail_once(running.engines, "follow"),
    "step": lambda running: fail_once(running.rank, "step"),
    "fetch": fail_in_fetch,
    "count": lambda running: fail_once(running.rank, "count"),
}


@pytest.mark.parametrize("way", FAILING)
def test_a_launch_that_fails_anywhere_gives_back_memory_and_the_room_of_uploads(
    running: Running, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for least in ("AHEAD_BYTES", "ENGINES_AHEAD_BYTES"):
        monkeypatch.setattr(transfers, least, 1)
    running.lane.transfers = Transfers(running.engines, 2 * H * 4)  # room for one call's rows
    FAILING[way](running)
    with pytest.raises(ValueError, match="no "):
        running.call(1)
    running.lane.close("aborted")
    time.sleep(0.02)
    assert running.given_back == [], "the engines may still read its rows"
    for moment in running.engines.moments:
        moment.passed.set()
    running.steps.drain()
    assert running.given_back == [1]
    running.lane.open()
    ids, weights = torch.zeros(2, K, dtype=torch.int32), torch.ones(2, K)
    following = running.lane.submit(LaneBatch(0, torch.ones(2, H), ids, weights))
    assert following.jobs[0].upload is not None, "there is room for uploads again"


def test_a_step_that_finds_no_place_to_be_finished_gives_memory_back(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(1, MOST_UNFINISHED + 1):
        running.call(number)
    running.steps.finish_within(0.05)
    with pytest.raises(
        TimeoutError, match=r"3 launched steps have not ended within 0.05 s \(step.finish_seconds"
    ):
        running.call(MOST_UNFINISHED + 1)
    running.steps.finish_within(SECONDS)
    running.lane.close("aborted")
    assert running.given_back == []
    for moment in running.engines.moments:
        moment.passed.set()
    running.steps.drain()
    assert running.given_back == list(range(1, MOST_UNFINISHED + 2))


def test_an_upload_is_let_go_of_once() -> None:
    released: list[int] = []
    upload = Upload(torch.ones(1), SlowEngines().event(), lambda: released.append(1))
    upload.release()
    upload.release()
    assert released == [1]


def test_a_call_that_ends_after_its_rank_has_stopped_gives_its_rows_back(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    for least in ("AHEAD_BYTES", "ENGINES_AHEAD_BYTES"):
        monkeypatch.setattr(transfers, least, 1)
    monkeypatch.setattr(answers, "FINISH_SECONDS", SECONDS)
    memory = CallerMemory(lambda: running.given_back.append(1))
    ids, weights = torch.zeros(2, K, dtype=torch.int32), torch.ones(2, K)
    batch = LaneBatch(0, torch.ones(2, H), ids, weights, lent=Lent(memory, True))
    running.lane.submit(batch, lambda call: memory.done())
    running.steps.close()
    running.engines.moments[0].passed.set()
    running.lane.close("the rank is stopping")
    running.steps.drain()  # a member does so once more when it leaves its group
    assert running.given_back == [1]


@pytest.mark.parametrize("used", [False, True])
def test_what_comes_after_the_close_is_done_at_once(
    used: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(answers, "FINISH_SECONDS", SECONDS)
    finishing, done = InOrder("test"), list[int]()

    def slow() -> None:
        time.sleep(0.05)
        done.append(0)

    def fail() -> None:
        raise ValueError("broken")

    if used:
        finishing.put(slow)
    finishing.close()
    finishing.close()
    finishing.put(lambda: done.append(1))
    finishing.beside(lambda: done.append(2))
    finishing.beside(fail)
    assert done == ([0, 1, 2] if used else [1, 2]), "in their order still"
    finishing.drain()
    assert "ValueError: broken" in caplog.text


def test_a_thread_that_finishes_does_so_in_order_and_holds_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "FINISH_SECONDS", 0.05)
    finishing, go, done = InOrder("test"), threading.Event(), list[int]()
    for number in range(MOST_UNFINISHED):
        finishing.put(lambda number=number: (go.wait(SECONDS), done.append(number)))  # type: ignore[misc]
    with pytest.raises(TimeoutError, match="3 launched steps have not ended"):
        finishing.put(lambda: None)
    with pytest.raises(TimeoutError):
        finishing.drain()
    go.set()
    finishing.seconds = SECONDS
    finishing.drain()
    assert done == list(range(MOST_UNFINISHED)) and finishing.idle
    finishing.close()


def test_what_fails_ends_no_thread(caplog: pytest.LogCaptureFixture) -> None:
    finishing, done = InOrder("test"), list[int]()

    def fail() -> None:
        raise ValueError("broken")

    finishing.put(fail)
    finishing.put(lambda: done.append(1))
    finishing.drain()
    assert done == [1] and "broken" in caplog.text
    finishing.close()


def test_a_head_that_cannot_be_told_keeps_no_answer_back(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told of a large answer before the caller is."""

    def fails() -> None:
        raise OSError("no way to the head")

    monkeypatch.setattr(finishing, "LARGE_BYTES", 1)
    running.on_done, running.engines.passed = fails, True
    call = running.submit(1, in_place=False)
    running.step(1, [call])
    assert call.wait(SECONDS) and call.error is None
    running.steps.drain()
    assert [record.number for record in running.records] == [1] and not running.failures


def test_the_head_is_told_before_several_callers_of_one_job_are(running: Running) -> None:
    """To tell all of them takes longer than to tell it, and the next step waits for the word."""
    order = list[str]()

    def part() -> Part:
        rows = torch.ones(1, H), torch.zeros(1, H)
        return Part(*rows, lambda told: order.append("answered"), lambda: None, lambda: None)

    running.on_done, running.engines.passed = lambda: order.append("told"), True
    choice = np.zeros((2, K), np.int32), torch.ones(2, K)
    together = Together([part(), part()], choice, running.lane.forget, lambda: None)
    running.lane.submit_together(together, (0, 0), math.inf, (True, True))
    running.steps.run(Header(1, 1, 0, (2,), ((running.announced[-1], 2),)), GENERATION, running.epoch)
    running.steps.drain()
    assert order == ["told", "answered", "answered"]
