"""Dispatchers over peer memory where callers, seats and devices are unusual: what they bear, and refuse."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from peer_ranks import spec

from bench.dispatch.exact_steps import compute, lane_rows, wrong_rows
from moeserve.dispatch.members import Member, Members
from moeserve.dispatch.peers import twin
from moeserve.dispatch.peers.dispatcher import PeerDispatcher
from moeserve.dispatch.peers.kernels import LEAST_BLOCKS, PeerKernels
from moeserve.dispatch.peers.layout import PeerLayout
from moeserve.dispatch.peers.liveness import GIVEN_UP_BYTES
from moeserve.dispatch.peers.memory import PeerMemory
from moeserve.experts.batch import Grouping

BOTH, LANE = Member(0, lane=0, owner=0), Member(1, lane=1)
ALONE, TWO = Members((BOTH,), 2, 1), Members((BOTH, LANE), 2, 1)
HALF_A_TURN = 2**31


def member(
    seat: int, members: Members, offers: tuple[object, ...] = (), patience: float = 10.0
) -> PeerDispatcher:
    """The dispatcher of a seat, in this process."""
    here = replace(spec(0, 1, patience), members=members, seat=seat)
    return PeerDispatcher.seated(here, Grouping.RAGGED, offers)  # type: ignore[arg-type]


def pair() -> tuple[PeerDispatcher, PeerDispatcher]:
    """A member that is both, and one that brings rows."""
    both = member(0, ALONE)
    lane = member(1, TWO, (both.offer(),))
    both.admit(lane.offer())
    return both, lane


def step(dispatcher: PeerDispatcher, rows: tuple[int, ...], number: int) -> int:
    """One step of a member: how many of its rows are wrong."""
    here = dispatcher._spec
    hidden, routing = lane_rows(here, number % 997, rows, number)
    arrived = dispatcher.dispatch(hidden, routing)
    answer = dispatcher.combine(compute(here, arrived.batch), arrived.ticket)
    return int(wrong_rows(replace(here, held=None), hidden, routing, answer))


def together(dispatchers: tuple[PeerDispatcher, ...], rows: tuple[int, ...], number: int) -> list[int]:
    """A step of all: wrong rows by member, -1 where it raised."""
    found = [-1] * len(dispatchers)

    def run(at: int) -> None:
        found[at] = step(dispatchers[at], rows, number)

    threads = [threading.Thread(target=run, args=(at,)) for at in range(len(dispatchers))]
    for each in threads:
        each.start()
    for each in threads:
        each.join(30.0)
    return found


def test_a_lane_may_be_absent_for_more_than_half_a_turn_of_numbers() -> None:
    both, lane = pair()
    assert together((both, lane), (3, 5), 1) == [0, 0]
    for number in (HALF_A_TURN - 5, 2 * HALF_A_TURN - 20, 3 * HALF_A_TURN - 40):
        assert step(both, (4, 0), number) == 0
    for number in (3 * HALF_A_TURN - 39, 3 * HALF_A_TURN - 37, 3 * HALF_A_TURN - 36):
        assert together((both, lane), (2, 6), number) == [0, 0]
    assert (both.late(), lane.late()) == ((), ())
    assert step(both, (4, 0), 5 * HALF_A_TURN) == 0, "an owner that was idle for as long goes on, too"
    both.close(), lane.close()


def test_a_step_whose_buffers_a_replay_takes_is_refused() -> None:
    one = member(0, ALONE)
    hidden, routing = lane_rows(one._spec, 1, (3, 0), 1)
    arrived = one.dispatch(hidden, routing)
    one.expect(3)
    with pytest.raises(ValueError, match="step 3 has the buffers of step 1 now"):
        one.combine(compute(one._spec, arrived.batch), arrived.ticket)
    one.close()


def test_a_member_does_not_exclude_itself() -> None:
    both, lane = pair()
    with pytest.raises(ValueError, match="seat 0 is this member's own"):
        both.exclude((1, 0))
    assert together((both, lane), (3, 5), 1) == [0, 0], "nobody was excluded"
    both.close(), lane.close()


def test_a_vacant_seat_is_named_and_nobody_is_excluded_with_it() -> None:
    both, lane = pair()
    for attempt in (lambda: both.dismiss(2), lambda: both.exclude((1, 2))):
        with pytest.raises(ValueError, match=r"seat 2 is vacant; members have the seats \[0, 1\]"):
            attempt()
    assert together((both, lane), (3, 5), 1) == [0, 0]
    both.close(), lane.close()


class Queued:
    """Kernels of a GPU that are under way: who follows them, and what they still read when they end."""

    def __init__(self, dispatcher: PeerDispatcher) -> None:
        self.followed, self.told_at_end, self.begun_at_end = 0, [0], -1
        self._word, self._header = dispatcher._liveness.host_word, dispatcher._tables.header

    def follow(self) -> Queued:
        self.followed += 1
        return self

    def synchronize(self) -> None:
        self.told_at_end = self._word.tolist()
        self.begun_at_end = int(self._header[GIVEN_UP_BYTES // 4])


def test_phases_under_way_hear_of_who_left_before_the_seat_is_taken_again() -> None:
    """A kernel reads the host's word now and then: cleared sooner, it would name the next holder late."""
    both, lane = pair()
    queued = Queued(both)
    both._kernels = queued  # type: ignore[assignment]
    both.dismiss(1)
    assert queued.followed == 1, "maps are closed after the kernels of every stream"
    both.admit(lane.offer())
    assert queued.followed == 2, "tables change after the kernels of every stream"
    assert queued.told_at_end == [1 << LANE.lane] and both._liveness.host_word.tolist() == [0]  # type: ignore[operator]
    both._kernels = None
    both.close(), lane.close()


def test_what_an_owner_told_is_forgotten_before_the_next_one_can_tell_anything() -> None:
    """Its begun flag would be lost otherwise, and this lane would give up an owner that came in time."""
    lane_only, owner = Member(1, lane=1), Member(0, owner=0)
    lane = member(1, Members((lane_only,), 2, 1))
    lane._tables.header[GIVEN_UP_BYTES // 4] = 7
    lane._kernels = queued = Queued(lane)  # type: ignore[assignment]
    other = member(0, Members((lane_only, owner), 2, 1), (lane.offer(),))
    lane.admit(other.offer())
    assert queued.begun_at_end == 0
    lane._kernels = None
    lane.close(), other.close()


def test_a_dispatcher_that_cannot_be_built_keeps_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*given: object) -> None:
        raise ValueError("too few multiprocessors")

    closed: list[PeerMemory] = []
    monkeypatch.setattr("moeserve.dispatch.peers.dispatcher.PeerTwin", refuses)
    monkeypatch.setattr(PeerMemory, "close", lambda memory: closed.append(memory))
    with pytest.raises(ValueError, match="too few multiprocessors"):
        member(0, ALONE)
    assert len(closed) == 1


@pytest.mark.parametrize("blocks", [LEAST_BLOCKS, 5, 6, 9, 20, 132])
def test_a_dispatch_fits_the_multiprocessors_that_are_left(blocks: int) -> None:
    here = replace(spec(0, 1), members=Members.split(8, 2), lane_rows=4096, top_k=8, slots=64)
    for seat in (0, 8):
        kernels = PeerKernels.__new__(PeerKernels)
        kernels._layout = PeerLayout(replace(here, seat=seat), Grouping.RAGGED)
        kernels._blocks, kernels._owns = blocks, seat == 8
        for own in (0, 1, 2, 3, 64, 500, 4096):
            for rows in {max(own, 1), own + 1, own + 7, own + 3000, own + 7 * 4096}:
                made = kernels._division(own, rows)
                assert made.blocks <= blocks and made.choice_senders >= 1, (own, rows, made)
                assert made.senders >= min(own, 1)
                assert not kernels._owns or (made.readers - 1) * made.run >= rows


@pytest.mark.parametrize("buffers", ["two", "one"])
def test_two_steps_under_way_need_buffers_of_their_own(buffers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner stores the sums of both steps before the lane reads either."""
    if buffers == "one":
        monkeypatch.setattr(twin, "parity", lambda sequence: 0)
    both = Members((Member(0, owner=0), Member(1, lane=0)), 1, 1)
    owner = member(0, Members(both.present[:1], 1, 1), patience=1.0)
    lane = member(1, both, (owner.offer(),), patience=1.0)
    owner.admit(lane.offer())
    stored, wrong = threading.Event(), list[int]()

    def bring() -> None:
        given = [lane_rows(lane._spec, 1, (5,), number) for number in (1, 2)]
        arrived = [lane.dispatch(*one) for one in given]
        stored.wait(10.0)
        for (hidden, routing), came in zip(given, arrived, strict=True):
            answer = lane.combine(compute(lane._spec, came.batch), came.ticket)
            wrong.append(int(wrong_rows(replace(lane._spec, held=None), hidden, routing, answer)))

    bringing = threading.Thread(target=bring)
    bringing.start()
    arrived = [owner.dispatch(*lane_rows(owner._spec, 0, (5,), number)) for number in (1, 2)]
    for came in arrived:
        owner.combine(compute(owner._spec, came.batch), came.ticket)
    stored.set()
    bringing.join(20.0)
    kept = wrong == [0, 0] and lane.late() == owner.late() == ()
    owner.close(), lane.close()
    assert kept == (buffers == "two")
