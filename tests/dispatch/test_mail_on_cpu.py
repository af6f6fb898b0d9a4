"""The kernels of a caller's GPU and its owner's, as their text says, on a CPU."""

from __future__ import annotations

import ctypes

import pytest
import torch
from mail_on_cpu import given as rows_of
from mail_on_cpu import launches_by, library_in, room_of

from moeserve.dispatch.mail import kernels
from moeserve.dispatch.mail.kernels import MISFIT, CallerKernels, Given, OwnerKernels, Words
from moeserve.dispatch.mail.layout import FEW_BLOCKS, STEPS, MailLayout, Word
from moeserve.experts.batch import Tally
from moeserve.runtime.rank.graphs import padded_rows

HIDDEN, EXPERTS, TOP_K, LAYER = 7168, 64, 8, 3


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return library_in(tmp_path_factory.mktemp("kernels"))


class Both:
    """A lane of `most` rows between a caller and an owner, both of which are this process."""

    def __init__(self, library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
        launches_by(library, monkeypatch)
        self.layout = MailLayout(most, 2, HIDDEN, EXPERTS, TOP_K, torch.bfloat16)
        cpu = torch.device("cpu")
        self.table, self.state, self.now, self.host = (kernels.words(cpu) for _ in range(4))
        self._box = torch.zeros(self.layout.mailbox_bytes, dtype=torch.uint8)
        self._answers = torch.zeros(self.layout.answers_bytes, dtype=torch.uint8)
        for words in (self.table, self.state):
            words[Word.MAILBOX], words[Word.ANSWERS] = self._box.data_ptr(), self._answers.data_ptr()
            words[Word.NUMBER], words[Word.PATIENCE] = 1, int(1e9)
        self.state[Word.OWN] = self.state.data_ptr()
        self.caller, self.owner = CallerKernels(self.layout, self.table), OwnerKernels(self.layout, self.now)
        self._words = Words()

    def step(self, given: Given, padded: int, *, lone: bool) -> tuple[Given, torch.Tensor, torch.Tensor]:
        """What the owner has of the rows, which are valid, and what the caller has of the answer."""
        out = torch.full_like(given.hidden, torch.nan)
        self.caller.bring(0, LAYER, given)
        room, valid = self.computed(0, given, padded, lone=lone)
        if not int(self.state[Word.ENDED]):
            self.caller.fetch(0, out)
        return room, valid, out

    def computed(
        self, stage: int, given: Given, padded: int, *, lone: bool = False
    ) -> tuple[Given, torch.Tensor]:
        """A run of one step, on rows like those that were brought: what the owner has of them."""
        room, valid = room_of(given, padded)
        self.begin()
        self.owner.take(stage, LAYER, room, valid, lone=lone)
        self.tally = Tally(torch.ones(3, dtype=torch.int32), *torch.zeros(4, dtype=torch.int64).split(3))
        self.owner.post(stage, -room.hidden, self.tally, last=True)
        return room, valid

    def begin(self) -> None:
        """A run begins."""
        self._words.begin(self.state, self.now, self.host)


def given(rows: int, *, logits: bool = False) -> Given:
    return rows_of(rows, (HIDDEN, EXPERTS, TOP_K), logits=logits)


@pytest.mark.parametrize("logits", [False, True])
@pytest.mark.parametrize("lone", [False, True])
@pytest.mark.parametrize("rows", [1, 4, 5, 13, 32, 33, 60, 100])
def test_all_rows_come_to_the_owner_and_all_answers_home(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, rows: int, lone: bool, logits: bool
) -> None:
    """lone: one block waits for rows that few blocks read, though they came in more shares than these are."""
    both, batch, padded = Both(library, monkeypatch, 128), given(rows, logits=logits), padded_rows(rows)
    for turn in range(1, 4):
        room, valid, out = both.step(batch, padded, lone=lone)
        assert int(both.state[Word.ENDED]) == 0 and int(both.state[STEPS]) == turn
        assert torch.equal(room.hidden[:rows], batch.hidden) and torch.equal(room.route[:rows], batch.route)
        if room.weights is not None and batch.weights is not None:
            assert torch.equal(room.weights[:rows], batch.weights)
        assert valid.tolist() == [True] * rows + [False] * (padded - rows)
        assert torch.equal(out, -batch.hidden)
        assert both.tally.totals.tolist() == [1, 1, 1] and both.tally.taken.tolist() == [rows]


@pytest.mark.parametrize("rows", [(1, 13), (60, 5), (100, 100)])
def test_rows_are_taken_while_the_step_before_is_posted(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, rows: tuple[int, int]
) -> None:
    """Its kernels are over, and its post has not read anything yet."""
    both, batches = Both(library, monkeypatch, 128), [given(count) for count in rows]
    rooms = [room_of(one, padded_rows(count)) for one, count in zip(batches, rows, strict=True)]
    for stage, one in enumerate(batches):
        both.caller.bring(stage, LAYER, one)
    both.begin()
    for stage, (room, valid) in enumerate(rooms):
        both.owner.take(stage, LAYER, room, valid, early=stage)
        assert int(both.now[Word.READ]) == stage  # as the step's post says before it reads
        both.now[Word.READ] = 1
    for stage, (room, _) in enumerate(rooms):
        both.owner.post(stage, -room.hidden, took=stage + 1, last=stage == 1)
    for stage, (one, (room, valid)) in enumerate(zip(batches, rooms, strict=True)):
        assert torch.equal(room.hidden[: rows[stage]], one.hidden) and int(valid.sum()) == rows[stage]
        out = torch.full_like(one.hidden, torch.nan)
        both.caller.fetch(stage, out)
        assert torch.equal(out, -one.hidden), stage
    assert int(both.state[Word.ENDED]) == 0 and both.state[STEPS : STEPS + 2].tolist() == [1, 1]
    assert int(both.state[Word.DONE]) == int(both.state[Word.TOOK]) == 2


def test_a_step_that_does_not_fit_is_left_and_counts_no_rows(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = Both(library, monkeypatch, 128)
    _, valid, _ = both.step(given(40), 16, lone=True)
    assert int(both.state[Word.ENDED]) == MISFIT and int(both.state[STEPS]) == 0
    assert not valid.any() and both.tally.taken.tolist() == [0]


@pytest.mark.parametrize("rows", [(1, 13), (13, 1), (5, 60), (60, 5)])
def test_an_answer_is_fetched_as_other_rows_are_brought(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, rows: tuple[int, int]
) -> None:
    both, batches = Both(library, monkeypatch, 64), [given(count) for count in rows]
    both.caller.bring(0, LAYER, batches[0])
    for turn in range(4):
        stage, other = turn % 2, (turn + 1) % 2
        room, _ = both.computed(stage, batches[stage], padded_rows(rows[stage]))
        assert torch.equal(room.hidden[: rows[stage]], batches[stage].hidden)
        out = torch.full_like(batches[stage].hidden, torch.nan)
        both.caller.exchange(other, LAYER, batches[other], 0, (stage, out))
        assert torch.equal(out, -batches[stage].hidden), turn
    assert both.table[STEPS : STEPS + 2].tolist() == [2, 2] and not int(both.state[Word.ENDED])


def test_there_are_cases_of_few_blocks_that_read_more_shares() -> None:
    layout = MailLayout(128, 1, HIDDEN, EXPERTS, TOP_K, torch.bfloat16)
    assert layout.readers_of(16) == FEW_BLOCKS < layout.blocks_of(13) == 13
