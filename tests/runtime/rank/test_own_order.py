"""A member that is alone in its group orders its own steps, and tells the head what it did."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from moeserve.dispatch.members import Members
from moeserve.runtime.control.run_messages import AskedRun, asked_message
from moeserve.runtime.epoch import Epoch
from moeserve.runtime.mesh import Mesh
from moeserve.runtime.ordering.in_flight import MOST
from moeserve.runtime.ordering.sequencer import StepPace
from moeserve.runtime.rank.member import own_order
from moeserve.runtime.rank.member.own_order import OwnOrder, header_in, run_in
from moeserve.runtime.step import FIRST_NUMBER, Announcement, Header

GENERATION, LAYERS, SECONDS = 3, (5, 9), 5.0
FOREVER = float("inf")


class Member:
    """What surrounds an order: entries for the thread that launches steps, and what the head is told."""

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []
        self.told: list[dict[str, Any]] = []
        self.order = OwnOrder(0, self.entries.append, self.told.append)
        self.order.pace = StepPace(8, 16)
        self._jobs = itertools.count(1)

    def begin(self, generation: int = GENERATION, lacks: tuple[int, ...] = ()) -> None:
        join = {"kind": "join", "generation": generation, "orders": FIRST_NUMBER}
        self.order.begin(join, LAYERS, Members.of_ranks(1), lacks)

    def call(self, layer: int = 5, rows: int = 2, generation: int = GENERATION) -> bool:
        job = Announcement(0, next(self._jobs), layer, rows, FOREVER, generation)
        return self.order.announce([job])

    def done(self, number: int, generation: int = GENERATION) -> bool:
        return self.order.take({"kind": "done", "generation": generation, "step": number})

    @property
    def numbers(self) -> list[int]:
        return [one["header"].number for one in self.entries]

    def count(self, name: str) -> int:
        return sum(one[name] for one in list(self.told))


@pytest.fixture
def member(monkeypatch: pytest.MonkeyPatch) -> Iterator[Member]:
    monkeypatch.setattr(own_order, "TELL_SECONDS", 0.05)
    made = Member()
    made.begin()
    yield made
    made.order.end()


def until(true: Callable[[], bool]) -> None:
    limit = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < limit
        time.sleep(0.005)


def test_jobs_are_steps_at_once_and_as_many_run_as_at_the_head(member: Member) -> None:
    for _ in range(4):
        assert member.call()
    assert member.numbers == [FIRST_NUMBER + at for at in range(MOST)]
    header = member.entries[0]["header"]
    assert (header.layer, header.lane_rows, header.jobs) == (5, (2,), ((1, 2),))
    assert member.entries[0]["generation"] == GENERATION
    assert member.done(FIRST_NUMBER)
    assert member.entries[-1]["header"].jobs == ((3, 2), (4, 2)), "those that waited go together"


def test_the_head_hears_before_the_first_step_and_then_now_and_again(member: Member) -> None:
    member.call()
    first = member.told[0]
    assert (first["kind"], first["generation"], first["active"], first["steps"]) == ("ordered", 3, True, 0)
    until(lambda: member.count("steps") == 1)
    now = member.told[-1]
    assert (now["running"], now["number"], now["active"], now["held"]) == (1, FIRST_NUMBER, True, False)
    until(lambda: len(member.told) > 5)
    assert member.told[-1]["went_on"] == now["went_on"], "it does not go on, and says so"
    member.done(FIRST_NUMBER)
    until(lambda: not member.told[-1]["active"])
    (layer, seconds), *others = [one for said in member.told for one in said["ended"]]
    assert (layer, others) == (5, []) and 0.0 < seconds < SECONDS
    assert (member.count("steps"), member.count("jobs")) == (1, 1)
    many = len(member.told)
    time.sleep(0.2)
    assert len(member.told) == many, "who rests says nothing"
    member.call()
    assert member.told[many]["active"]
    turns = [one["turn"] for one in member.told]
    assert turns == sorted(set(turns))


def test_a_step_is_told_of_before_it_can_hang(member: Member) -> None:
    order = list[str]()
    member.order._tell = lambda told: order.append("head")
    member.order._put = lambda entry: order.append("step")
    member.call()
    assert order[:2] == ["head", "step"]


def test_many_steps_are_told_of_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_order, "TELL_SECONDS", 60.0)
    monkeypatch.setattr(own_order, "MOST_ENDED", 8)
    one = Member()
    one.begin()
    for at in range(12):
        one.call()
        one.done(FIRST_NUMBER + at)
    until(lambda: sum(len(told["ended"]) for told in list(one.told)) >= 4)
    assert all(len(told["ended"]) <= 8 for told in one.told)
    one.order.end()


def test_no_step_begins_while_others_are_about_to_join(member: Member) -> None:
    member.call()
    member.order.steady({"generation": GENERATION, "steady": False})
    member.call()
    assert member.numbers == [FIRST_NUMBER]
    until(lambda: member.told[-1]["held"])
    assert member.told[-1]["running"] == 1
    member.done(FIRST_NUMBER)
    until(lambda: member.told[-1]["running"] == 0)
    assert member.told[-1]["held"] and member.told[-1]["queued"] == 1
    member.order.steady({"generation": GENERATION, "steady": True})
    assert member.numbers == [FIRST_NUMBER, FIRST_NUMBER + 1]
    until(lambda: not member.told[-1]["held"])


def test_of_another_generation_the_head_is_told(member: Member) -> None:
    assert not member.call(generation=GENERATION + 1)
    assert not member.done(FIRST_NUMBER, GENERATION - 1)
    member.order.steady({"generation": GENERATION + 1, "steady": False})
    assert member.call() and member.numbers == [FIRST_NUMBER]
    assert not member.order.take({"kind": "here", "generation": GENERATION})


def test_a_generations_end_is_the_orders_and_numbers_rise(member: Member) -> None:
    member.call()
    member.order.end()
    until(lambda: member.count("steps") == member.count("jobs") == 1)
    assert not member.call() and not member.done(FIRST_NUMBER)
    assert member.order.next_number == FIRST_NUMBER + 1
    member.begin(GENERATION + 2)
    assert member.call(generation=GENERATION + 2)
    assert member.numbers == [FIRST_NUMBER, FIRST_NUMBER + 1]
    member.order.end()
    until(lambda: not any(thread.name == "own-order" for thread in threading.enumerate()))


def test_whoever_ends_a_generation_waits_for_no_head(member: Member) -> None:
    member.call()
    heard, takes = threading.Event(), threading.Event()

    def tell(told: dict[str, Any]) -> None:
        takes.wait(SECONDS)
        if told["steps"]:
            heard.set()

    member.order._tell = tell
    began = time.monotonic()
    member.order.end()
    assert time.monotonic() - began < SECONDS / 2 and not heard.is_set()
    takes.set()
    assert heard.wait(SECONDS)


def test_a_generation_that_begins_is_the_end_of_one_that_nobody_ended(member: Member) -> None:
    member.call()
    member.order.begin({"generation": GENERATION + 1, "orders": 0}, LAYERS, Members.of_ranks(2), ())
    assert not member.call() and not member.call(generation=GENERATION + 1)
    assert member.order.next_number == FIRST_NUMBER + 1
    until(lambda: member.count("steps") == 1)
    until(lambda: not any(thread.name == "own-order" for thread in threading.enumerate()))


def test_who_comes_to_rest_while_a_job_comes_tells_of_it_all_the_same() -> None:
    one = Member()
    one.begin()
    seen = list[str]()

    def tell(told: dict[str, Any]) -> None:
        seen.append("head")
        one.order._rests = one.order._rests or len(seen) == 1  # the thread has found that nothing runs

    one.order._tell = tell
    one.order._put = lambda entry: seen.append("step")
    one.call()
    assert seen == ["head", "head", "step"]
    one.order.end()


def test_a_run_that_waits_is_no_rest(member: Member) -> None:
    """Others were about to join, and a run waited; they have not, and it ran and ended."""
    ask = [asked_message(AskedRun(0, number, LAYERS, 4), GENERATION) for number in range(2)]
    member.order.take(ask[0])
    member.order.steady({"generation": GENERATION, "steady": False})
    member.order.take(ask[1])
    member.done(FIRST_NUMBER)
    until(lambda: member.told[-1]["held"] and not member.told[-1]["running"])
    assert member.told[-1]["active"]
    member.order.steady({"generation": GENERATION, "steady": True})
    member.done(FIRST_NUMBER + len(LAYERS))
    until(lambda: not member.told[-1]["active"])
    assert not member.told[-1]["running"]


def test_what_no_head_takes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_order, "MOST_ENDED", 6)
    one, stands = Member(), threading.Event()
    one.begin()
    one.order._tell = lambda told: (one.told.append(told), stands.wait(SECONDS))[0]
    stands.set()
    one.call()
    stands.clear()
    one.done(FIRST_NUMBER)
    for at in range(1, 20):
        one.call()
        one.done(FIRST_NUMBER + at)
    assert len(one.order._ended) <= 6
    stands.set()
    one.order.end()


@pytest.mark.parametrize("late", [1e-6, 0.5, 1e9])
def test_the_head_is_told_soon_enough_and_not_all_the_time(late: float, member: Member) -> None:
    member.order.late_seconds = late
    assert own_order.SHORTEST_TELLING <= member.order._interval <= own_order.TELL_SECONDS
    assert member.order._interval <= max(own_order.SHORTEST_TELLING, late / 4)


@pytest.mark.parametrize("wrong", ["the head orders", "no pace"])
def test_the_head_orders_where_it_says_so_or_no_pace_is_known(wrong: str) -> None:
    one = Member()
    if wrong == "no pace":
        one.order.pace = None
        one.begin()
    else:
        one.order.begin({"generation": 3, "orders": 0}, LAYERS, Members.of_ranks(1), ())
    assert not one.call() and not one.done(FIRST_NUMBER) and one.entries == one.told == []


def test_jobs_of_layers_that_are_read_wait_for_them() -> None:
    one = Member()
    one.begin(lacks=(1,))
    try:
        one.call(layer=9)
        assert one.entries == []
        one.call(layer=5)
        assert [entry["header"].layer for entry in one.entries] == [5]
        one.order.close_layers(())
        assert [entry["header"].layer for entry in one.entries] == [5, 9]
    finally:
        one.order.end()


def test_withdrawn_jobs_are_in_no_step(member: Member) -> None:
    member.order.steady({"generation": GENERATION, "steady": False})
    member.call()
    member.call()
    assert member.order.take({"kind": "withdraw", "generation": GENERATION, "jobs": [1]})
    member.order.steady({"generation": GENERATION, "steady": True})
    assert [one["header"].jobs for one in member.entries] == [((2, 2),)]


def test_runs_are_ordered_beside_steps_and_told_of_company(member: Member) -> None:
    heard = threading.Event()
    member.order.on_company = heard.set
    asked = asked_message(AskedRun(0, 7, LAYERS, 4), GENERATION)
    assert member.order.take(asked)
    (entry,) = member.entries
    assert (entry["kind"], entry["run"], entry["number"], entry["own"]) == ("run", 7, FIRST_NUMBER, True)
    assert not heard.is_set()
    member.call()
    assert heard.wait(SECONDS)
    member.order.close_layers([9])
    member.order.take(asked_message(AskedRun(0, 8, LAYERS, 4), GENERATION))
    refused = member.entries[-1]
    assert (refused["run"], refused["number"], refused["why_not"]) == (8, 0, "layer 9 is being restored")


def test_a_step_that_gathers_company_is_begun_by_the_orders_own_thread(member: Member) -> None:
    order = member.order._order
    assert order is not None
    due = time.monotonic() + 0.5
    order.in_flight._start_at = lambda layer, now: due  # type: ignore[method-assign]
    member.call()
    assert member.entries == []
    until(lambda: bool(member.entries))
    assert 0.0 <= time.monotonic() - due < 3.0


def test_an_order_that_cannot_go_on_ends_its_generation(member: Member) -> None:
    failures = list[tuple[dict[str, Any], Exception]]()
    member.order.failed = lambda entry, error: failures.append((entry, error))
    with member.order._lock:
        member.order._order.begin = lambda: 1 / 0  # type: ignore
        member.order._lock.notify_all()
    until(lambda: bool(failures))
    assert failures[0][0]["generation"] == GENERATION and isinstance(failures[0][1], ZeroDivisionError)


def test_entries_are_of_the_epoch_that_their_executor_holds() -> None:
    epoch = Epoch.first(Mesh(1, 1, 1), layers=2, experts=4)
    header = Header(FIRST_NUMBER, 0, 5, (2,), ((1, 2),))
    assert header_in({"header": header, "own": True}, epoch).epoch == epoch.number == 1
    assert header_in({"header": header, "own": True}, None) == header
    assert run_in({"kind": "run", "epoch": 0, "own": True}, epoch)["epoch"] == 1
    assert run_in({"kind": "run", "epoch": 7}, epoch)["epoch"] == 7, "the head knew it"


def test_callers_from_many_threads_are_all_in_steps(member: Member) -> None:
    """Steps end while jobs come: none is lost, none runs twice."""
    total, threads = 400, 8

    def callers() -> None:
        for _ in range(total // threads):
            member.call()

    running = [threading.Thread(target=callers) for _ in range(threads)]
    for thread in running:
        thread.start()
    seen, at = list[int](), 0
    limit = time.monotonic() + 30.0
    while len(seen) < total:
        assert time.monotonic() < limit
        while at < len(member.entries):
            header = member.entries[at]["header"]
            seen += [job for job, _ in header.jobs]
            member.done(header.number)
            at += 1
        time.sleep(0.0005)
    for thread in running:
        thread.join()
    assert sorted(seen) == list(range(1, total + 1))
    until(lambda: member.count("jobs") == total and member.told[-1]["running"] == 0)
    assert member.count("steps") == len(member.entries)
