"""The owner's kernels on rows in host memory, as their text says, on a CPU."""

from __future__ import annotations

import ctypes

import pytest
import torch
from host_words import MARK, HostWords
from mail_on_cpu import given, launches_by, library_in, room_of

from moeserve.dispatch.mail import kernels
from moeserve.dispatch.mail.host_layout import HostMailLayout
from moeserve.dispatch.mail.kernels import MISFIT, Given, OwnerKernels, Words
from moeserve.dispatch.mail.layout import STEPS, Word
from moeserve.runtime.rank.graphs import padded_rows

HIDDEN, EXPERTS, TOP_K, LAYER, BUFFERS = 1024, 16, 4, 3, 3
REFUSED = 5


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return library_in(tmp_path_factory.mktemp("kernels"))


class Lane(HostWords):
    """A lane of two stages between a caller that writes its words by hand and an owner."""

    def __init__(self, library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
        launches_by(library, monkeypatch)
        super().__init__(HostMailLayout(most, 2, HIDDEN, EXPERTS, TOP_K, torch.bfloat16, buffers=BUFFERS))
        cpu = torch.device("cpu")
        self.state, self.now, self.host = (kernels.words(cpu) for _ in range(3))
        self.state[Word.MAILBOX], self.state[Word.ANSWERS] = self.addresses
        self.state[Word.NUMBER], self.state[Word.PATIENCE] = 1, int(1e9)
        self.state[Word.OWN], self.number = self.state.data_ptr(), 1
        self.owner, self._words = OwnerKernels(self.layout, self.now), Words()

    def begin(self) -> None:
        """A run begins."""
        self._words.begin(self.state, self.now, self.host)

    def step(self, stage: int, padded: int, like: Given) -> tuple[Given, torch.Tensor]:
        """A run of one step: what the owner has of its rows."""
        room, valid = room_of(like, padded)
        self.begin()
        self.owner.take(stage, LAYER, room, valid)
        self.owner.post(stage, -room.hidden, last=True)
        return room, valid

    def untouched(self, stage: int, rows: int, buffer: int) -> bool:
        """Whether no answer of so many rows was written there."""
        return bool((self.raw_answer(stage, rows, buffer).view(torch.uint8) == MARK).all())


def batch_of(rows: int) -> Given:
    return given(rows, (HIDDEN, EXPERTS, TOP_K))


@pytest.mark.parametrize("rows", [1, 5, 33, 100])
def test_rows_come_and_answers_go_to_the_buffer_that_is_wanted(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    lane, batch, padded = Lane(library, monkeypatch, 128), batch_of(rows), padded_rows(rows)
    for turn in range(BUFFERS):
        lane.write(1, turn, LAYER, batch, buffer=turn)
        room, valid = lane.step(1, padded, batch)
        assert torch.equal(room.hidden[:rows], batch.hidden) and torch.equal(room.route[:rows], batch.route)
        assert valid.tolist() == [True] * rows + [False] * (padded - rows)
        assert lane.answered(1, turn) and torch.equal(lane.raw_answer(1, rows, turn), -batch.hidden)
        assert all(lane.untouched(1, rows, other) for other in range(turn + 1, BUFFERS))
    assert lane.state[STEPS : STEPS + 2].tolist() == [0, BUFFERS] and not int(lane.state[Word.ENDED])


@pytest.mark.parametrize("rows", [(1, 13), (60, 5), (100, 100)])
def test_rows_are_taken_while_the_step_before_is_posted(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, rows: tuple[int, int]
) -> None:
    """Its kernels are over, and its post has not read anything yet; each answer has a buffer of its own."""
    lane, batches = Lane(library, monkeypatch, 128), [batch_of(count) for count in rows]
    rooms = [room_of(one, padded_rows(count)) for one, count in zip(batches, rows, strict=True)]
    for stage, one in enumerate(batches):
        lane.write(stage, 0, LAYER, one, buffer=2 - stage)
    lane.begin()
    for stage, (room, valid) in enumerate(rooms):
        lane.owner.take(stage, LAYER, room, valid, early=stage)
        lane.now[Word.READ] = 1  # as the step's post says before it reads
    for stage, (room, _) in enumerate(rooms):
        lane.owner.post(stage, -room.hidden, took=stage + 1, last=stage == 1)
    for stage, one in enumerate(batches):
        assert lane.answered(stage, 0)
        assert torch.equal(lane.raw_answer(stage, rows[stage], 2 - stage), -one.hidden), stage
        assert lane.untouched(stage, rows[stage], 0)
    assert lane.state[STEPS : STEPS + 2].tolist() == [1, 1] and not int(lane.state[Word.ENDED])


@pytest.mark.parametrize(
    ("header", "padded", "status"),
    [
        ({"buffer": BUFFERS}, 64, REFUSED),
        ({"buffer": 1 << 40}, 64, REFUSED),
        ({"count": 129}, 64, REFUSED),
        ({"count": 1 << 63}, 64, REFUSED),
        ({"layer": LAYER + 1}, 64, REFUSED),
        ({"stage": 0}, 64, REFUSED),
        ({"kind": 7}, 64, REFUSED),
        ({}, 32, MISFIT),
    ],
)
def test_what_does_not_fit_is_left_and_gets_no_answer(
    library: ctypes.CDLL,
    monkeypatch: pytest.MonkeyPatch,
    header: dict[str, int],
    padded: int,
    status: int,
) -> None:
    lane, batch = Lane(library, monkeypatch, 128), batch_of(60)
    lane.write(1, 0, LAYER, batch, **header)
    _, valid = lane.step(1, padded, batch)
    assert int(lane.state[Word.ENDED]) == status and not valid.any() and not lane.answered(1, 0)
    assert all(lane.untouched(1, 60, buffer) for buffer in range(BUFFERS))
