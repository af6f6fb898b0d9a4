"""Answers of a client of lanes that stay where they were written, in memory of the lane."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from houses import Alone, house_config
from lane_calls import CLOSE, Ordinary, in_threads, line_of

from moeserve.proto.passes import called_lane, lane_client
from moeserve.proto.passes import mailbox as m
from moeserve.proto.passes.attached import AttachedLane, Wanted
from moeserve.proto.passes.buffers import BUFFERS
from moeserve.proto.passes.lane_client import LaneClient
from moeserve.proto.passes.mailbox import MailboxLayout
from moeserve.runtime.launch.local_cluster import LocalCluster

LEAST, MOST = 16, 32
"""Rows of lanes that have memory for several buffers of answers, and for one."""


@pytest.fixture(scope="module")
def house(checkpoint_path: Path, alone: Alone) -> Iterator[LocalCluster]:
    one = alone.checkpoint
    layout = MailboxLayout.of((MOST, 1), (one.hidden, one.num_experts, one.top_k), "fp32")
    nbytes = layout.mailbox_bytes + layout.answers_bytes
    config = house_config(checkpoint_path, step__lane_rows=MOST, passes__lane_bytes=nbytes)
    with LocalCluster(config) as cluster:
        yield cluster


@pytest.fixture
def ordinary(monkeypatch: pytest.MonkeyPatch) -> Ordinary:
    monkeypatch.setattr(called_lane, "SMALLEST_BYTES", 1)
    monkeypatch.setattr(lane_client, "SMALLEST_BYTES", 1)
    return Ordinary(monkeypatch)


@pytest.fixture
def client(house: LocalCluster) -> Iterator[LaneClient]:
    with LaneClient(house.address, timeout=20.0, lane=0) as made:
        yield made


def asked(client: LaneClient, alone: Alone, rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """An answer, and what it has to be."""
    layer, batch = seed % 2, alone.batch(rows, seed=seed)
    found = client.forward(layer, *batch)
    assert isinstance(found, torch.Tensor)
    return found, alone.forward(layer, *batch)


def stays(client: LaneClient, found: torch.Tensor) -> bool:
    """Whether an answer lies in memory of the lane."""
    _, answers = line_of(client).lane.memory.bytes
    first = torch.frombuffer(answers, dtype=torch.uint8).data_ptr()
    return first <= found.data_ptr() < first + len(answers)


def test_answers_that_are_held_stay_as_they_are_and_are_copied_where_no_buffer_is_left(
    client: LaneClient, alone: Alone, ordinary: Ordinary
) -> None:
    held = [asked(client, alone, 5, seed) for seed in range(6)]
    assert line_of(client).lane.memory.buffers == BUFFERS == 3
    assert [stays(client, found) for found, _ in held] == [True, True, False, False, False, False]
    del held[0]
    held.append(asked(client, alone, 7, 10))
    assert stays(client, held[-1][0]), "the buffer of one that nobody holds is used again"
    assert len({found.data_ptr() for found, _ in held}) == len(held)
    for found, wanted in held:
        torch.testing.assert_close(found, wanted, **CLOSE)
    for found, _ in held:
        found.fill_(3.0)  # it is its caller's
    del found, held
    for seed in range(40):
        found, wanted = asked(client, alone, 1 + seed % LEAST, seed)
        assert stays(client, found), "a caller who holds the last answer"
        torch.testing.assert_close(found, wanted, **CLOSE)
    assert ordinary.calls == 0


def test_a_part_of_an_answer_holds_its_buffer(client: LaneClient, alone: Alone, ordinary: Ordinary) -> None:
    found, wanted = asked(client, alone, 6, 1)
    part, place = found[2:3, :4], found.data_ptr()
    del found
    for seed in range(20):
        other, right = asked(client, alone, 6, seed)
        assert other.data_ptr() != place
        torch.testing.assert_close(other, right, **CLOSE)
    torch.testing.assert_close(part, wanted[2:3, :4], **CLOSE)
    assert ordinary.calls == 0


def test_an_answer_outlives_its_client(house: LocalCluster, alone: Alone, ordinary: Ordinary) -> None:
    with LaneClient(house.address, timeout=20.0, lane=0) as client:
        found, wanted = asked(client, alone, 6, 3)
        assert stays(client, found)
    with LaneClient(house.address, timeout=20.0, lane=0) as other:
        for seed in range(8):
            asked(other, alone, 6, seed)
    torch.testing.assert_close(found, wanted, **CLOSE)
    found.fill_(1.0)
    assert bool((found == 1.0).all())


def test_an_answer_of_several_steps_stays_where_these_lie_behind_one_another(
    client: LaneClient, alone: Alone, ordinary: Ordinary, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = AttachedLane.attach

    def attach(address: str, wanted: Wanted) -> AttachedLane:
        lane = real(address, wanted)
        lane.goes_ahead = True
        return lane

    monkeypatch.setattr(lane_client, "MOST_ROWS", 8)
    monkeypatch.setattr(AttachedLane, "attach", attach)
    for seed in range(12):
        rows = 16 if seed % 3 else 13  # two of 8, or of 7 and 6
        found, wanted = asked(client, alone, rows, seed)
        assert stays(client, found) == (rows == 16)
        torch.testing.assert_close(found, wanted, **CLOSE)
    assert line_of(client).lane.wanted.stages == 2 and ordinary.calls == 0


def test_small_answers_and_those_with_a_place_of_their_own_are_copied(
    client: LaneClient, alone: Alone, ordinary: Ordinary, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, experts, weights = alone.batch(4, seed=2)
    asked(client, alone, 4, 2)
    output = client.allocate(0, tuple(hidden.shape), "fp32")
    client.forward(0, hidden, experts, weights, output=output)
    assert len(line_of(client)._buffers._free) == BUFFERS
    torch.testing.assert_close(output.tensor, alone.forward(0, hidden, experts, weights), **CLOSE)
    monkeypatch.setattr(called_lane, "SMALLEST_BYTES", hidden.nbytes + 1)
    found, wanted = asked(client, alone, 4, 4)
    assert not stays(client, found) and ordinary.calls == 0
    torch.testing.assert_close(found, wanted, **CLOSE)


def test_a_rank_with_less_memory_or_of_before_gives_a_lane_of_one_buffer(
    client: LaneClient, alone: Alone, ordinary: Ordinary, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, wanted = asked(client, alone, MOST, 1)
    memory = line_of(client).lane.memory
    assert memory.layout.rows == MOST and memory.buffers == 1 and not stays(client, found)
    torch.testing.assert_close(found, wanted, **CLOSE)
    monkeypatch.setattr(m, "TAKES_BUFFER", 1 << 60)  # what this rank does not say
    with LaneClient(client.address, timeout=20.0, lane=0) as other:
        for seed in range(3):
            found, wanted = asked(other, alone, 5, seed)
            assert line_of(other).lane.memory.buffers == 1 and not stays(other, found)
            torch.testing.assert_close(found, wanted, **CLOSE)
    assert ordinary.calls == 0


def test_what_is_held_when_the_process_forks_is_the_childs_too(
    client: LaneClient, alone: Alone, ordinary: Ordinary
) -> None:
    found, wanted = asked(client, alone, 4, 1)
    place, (from_child, to_parent), (from_parent, to_child) = found.data_ptr(), os.pipe(), os.pipe()
    child = os.fork()
    if not child:  # it says whether its answer is right when its parent has made others
        os.read(from_parent, 1)
        os.write(to_parent, b"+" if _close(found, wanted) else b"-")
        os._exit(0)
    try:
        del found
        for seed in range(8):
            other, right = asked(client, alone, 4, seed + 2)
            assert other.data_ptr() != place
            torch.testing.assert_close(other, right, **CLOSE)
        os.write(to_child, b".")
        assert os.read(from_child, 1) == b"+"
    finally:
        os.close(to_child)  # it ends, whatever has happened here
        os.waitpid(child, 0)
        for one in (from_child, to_parent, from_parent):
            os.close(one)
    assert ordinary.calls == 0


def _close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return bool(((found.numpy() - wanted.numpy()) ** 2).max() < CLOSE["atol"])


def test_threads_hold_answers_of_one_lane(client: LaneClient, alone: Alone, ordinary: Ordinary) -> None:
    def call(number: int) -> None:
        held = list[tuple[torch.Tensor, torch.Tensor]]()
        for turn in range(12):
            held = [*held[-2:], asked(client, alone, 1 + turn % 5, 100 * number + turn)]
            for found, wanted in held:
                torch.testing.assert_close(found, wanted, **CLOSE)

    in_threads(4, call)
