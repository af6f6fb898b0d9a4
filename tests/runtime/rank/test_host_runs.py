"""Runs of a pass whose rows lie in host memory: the device reads them there, and writes answers there."""

from __future__ import annotations

import re
import time

import pytest
import torch
from host_pairs import HostPair
from host_words import MARK
from houses import Alone
from pass_pairs import expected, given
from torch import Tensor

from moeserve.dispatch.dispatcher import Living
from moeserve.dispatch.mail import kernels
from moeserve.dispatch.mail.kernels import ABORT, MISFIT, YIELD, Given
from moeserve.dispatch.mail.layout import FEW_BLOCKS
from moeserve.proto.passes import mailbox as m
from moeserve.runtime.launch.torchrun import HostedRank
from moeserve.runtime.rank.graphs import padded_rows
from moeserve.runtime.rank.runs.runs import PassRuns, Told

pytestmark = pytest.mark.gpu(1)
LATE, LOST, REFUSED = 2, 3, 5
LAYERS = (0, 1)
ROUND = tuple((layer, stage) for layer in LAYERS for stage in (0, 1))


def same(rank: HostedRank, found: list[tuple[int, Given, Tensor]]) -> None:
    """Answers of layers to rows have the bits of steps, which run when no run waits."""
    for layer, batch, answer in found:
        assert torch.equal(answer, expected(rank, layer, batch)), (layer, len(batch.hidden))


def test_answers_have_the_bits_of_a_step(runs: PassRuns, rank: HostedRank, alone: Alone) -> None:
    """Other rows each time, at the same places: nothing of the step before is read again."""
    pair = HostPair(runs, alone, stages=2)
    for turn, rows in enumerate((1, 3, 16, 33, 40, 1)):
        for again in range(4):  # launched, recorded, replayed; and the same pass goes on
            seed = 1000 * turn + 100 * again
            first, found = 2 if again == 3 else 0, list[tuple[int, Given, Tensor]]()
            flight = pair.launch(ROUND, padded_rows(rows), begins=0 if again == 3 else pair.begin())
            for layer in LAYERS:
                batches = [given(alone, rows, seed=seed + 10 * layer + stage) for stage in (0, 1)]
                for stage, batch in enumerate(batches):
                    pair.write(stage, first + layer, layer, batch)
                for stage, batch in enumerate(batches):
                    found.append((layer, batch, pair.answer(stage, first + layer, rows)))
            assert pair.told(flight) == Told(0, (first + 2,) * 2, 4)
            same(rank, found)


@pytest.mark.parametrize("rows", [112, 896, 1792])
def test_many_blocks_read_one_header_and_one_of_them_tells(
    runs: PassRuns, rank: HostedRank, alone: Alone, rows: int
) -> None:
    pair = HostPair(runs, alone, rows=rows)
    assert (pair.layout.readers_of(padded_rows(rows)) > FEW_BLOCKS) == (rows > 112)
    for turn, count in enumerate((rows, rows - 3, rows, 1, rows)):
        batch = given(alone, count, seed=turn)
        flight = pair.launch(((0, 0),), padded_rows(rows), begins=pair.begin())
        pair.write(0, 0, 0, batch)
        answer = pair.answer(0, 0, count)
        assert pair.told(flight) == Told(0, (1,), 1)
        right = expected(rank, 0, batch)
        assert torch.equal(answer, right) if count == rows else off(answer, right) < 0.1, count


@pytest.mark.parametrize("rows", [1, 16, 112, 896, 1792])
def test_rows_that_follow_their_tag_are_waited_for(
    runs: PassRuns, rank: HostedRank, alone: Alone, rows: int
) -> None:
    """What lies there before is another's: NaN."""
    pair = HostPair(runs, alone, rows=rows)
    for turn in range(4):  # launched, recorded, replayed
        batch, wrong = given(alone, rows, seed=turn), given(alone, rows, seed=turn)
        wrong.hidden.fill_(torch.nan)
        number = pair.begin()
        pair.write(0, 0, 0, wrong)
        pair.number = number
        pair.box[pair.words.header(0) + m.TAG] = 0
        flight = pair.launch(((0, 0),), padded_rows(rows), begins=number)
        pair.write(0, 0, 0, batch, filled=0)
        for part in range(1, 5):
            time.sleep(0.005)
            assert not pair.answered(0, 0)
            pair.fill(0, batch, rows * part // 4)
        answer = pair.answer(0, 0, rows)
        assert pair.told(flight) == Told(0, (1,), 1) and pair.rows_told(0, 0) == rows
        same(rank, [(0, batch, answer)])


@pytest.mark.parametrize("rows", [16, 1792])
def test_rows_that_do_not_follow_are_left_as_those_that_do_not_come(
    runs: PassRuns, rank: HostedRank, alone: Alone, rows: int
) -> None:
    pair, batch = HostPair(runs, alone, rows=rows, patience=0.2), given(alone, rows, seed=1)
    flight = pair.launch(((0, 0),), padded_rows(rows), begins=pair.begin())
    pair.write(0, 0, 0, batch, filled=rows - 1)
    assert pair.told(flight) == Told(LATE, (1,)) and not pair.answered(0, 0)
    flight = pair.launch(((0, 0),), padded_rows(rows), begins=pair.begin())
    pair.write(0, 0, 0, batch, filled=rows // 2)
    time.sleep(0.02)
    pair.owner.abort[0] = YIELD
    assert pair.told(flight) == Told(MISFIT, (0,)) and not pair.answered(0, 0)
    pair.owner.abort[0] = 0
    flight = pair.launch(((0, 0),), padded_rows(rows), again=True)
    pair.fill(0, batch, rows)
    answer = pair.answer(0, 0, rows)
    assert pair.told(flight) == Told(0, (1,), 1)
    same(rank, [(0, batch, answer)])


def test_a_large_answer_is_told_of_part_by_part(
    rank: HostedRank, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of 2 MiB here, of rows that are narrow."""
    text = kernels.source

    def patched(*parts: object) -> str:
        made, changed = re.subn(r"#define PARTED \d+", "#define PARTED 131072", text(*parts))  # type: ignore[arg-type]
        assert changed <= 1
        return made

    monkeypatch.setattr(kernels, "source", patched)
    rows, seen = 4096, set[int]()
    pair = HostPair(PassRuns(rank), alone, rows=rows)
    for turn in range(30):
        batch = given(alone, rows, seed=turn)
        pair.write(0, 0, 0, batch)
        number = pair.begin()
        pair.write(0, 0, 0, batch)
        assert not pair.rows_told(0, 0), "what is there is another step's"
        flight, parts, told = pair.launch(((0, 0),), rows, begins=number), list[Tensor](), 0
        while not pair.answered(0, 0):
            if (there := pair.rows_told(0, 0)) > told:
                parts.append(pair.raw_answer(0, there)[told:])
                told = there
                seen.add(there)
        answer = pair.answer(0, 0, rows)
        assert pair.told(flight) == Told(0, (1,), 1) and pair.rows_told(0, 0) == rows
        if parts:
            assert torch.equal(torch.cat(parts).cuda(), answer[:told])
        same(rank, [(0, batch, answer)])
    assert seen & {1024, 2048, 3072}, "none of its parts was told of before the whole"


@pytest.mark.parametrize("rows", [3, 1792])
def test_an_answer_lies_in_the_buffer_that_its_header_names(
    runs: PassRuns, rank: HostedRank, alone: Alone, rows: int
) -> None:
    """Launched, recorded and replayed, and what lies in the others stays."""
    pair = HostPair(runs, alone, stages=2, rows=rows, buffers=3)
    kept, number = {}, pair.begin()
    for step, buffer in enumerate((0, 2, 1, 2, 0, 1)):
        flight = pair.launch(((0, 0), (0, 1)), padded_rows(rows), begins=0 if step else number)
        for stage in (0, 1):
            batch = given(alone, rows, seed=10 * step + stage)
            pair.write(stage, step, 0, batch, buffer=(buffer + stage) % 3)
            kept[stage, (buffer + stage) % 3] = batch
            pair.answer(stage, step, rows)
        assert pair.told(flight).ended == 0
        for (stage, at), batch in kept.items():
            same(rank, [(0, batch, pair.raw_answer(stage, rows, at).cuda())])
    assert len(kept) == 6


@pytest.mark.parametrize("buffer", [3, 1 << 31, 1 << 63])
@pytest.mark.parametrize("rows", [3, 1792])
def test_a_buffer_that_there_is_not_is_refused(runs: PassRuns, alone: Alone, rows: int, buffer: int) -> None:
    pair = HostPair(runs, alone, rows=rows, buffers=3)
    flight = pair.launch(((0, 0),), padded_rows(rows), begins=pair.begin())
    pair.write(0, 0, 0, given(alone, rows, seed=1), buffer=buffer)
    assert pair.told(flight).ended == REFUSED and not pair.answered(0, 0)
    assert bool((pair.raw_answer(0, rows, 0).view(torch.uint8) == MARK).all()), "nothing is written"


def off(found: Tensor, right: Tensor) -> float:
    """How far the worst row is from what it has to be, of the row; another caller's is 1 or more."""
    return float(((found - right).float().norm(dim=1) / right.float().norm(dim=1)).max())


def test_a_pass_goes_on_behind_steps_that_were_calls(runs: PassRuns, rank: HostedRank, alone: Alone) -> None:
    pair = HostPair(runs, alone, stages=2)
    batches = [given(alone, 4, seed=stage) for stage in (0, 1)]
    for before in ((7, 3), (2**32 - 2, 0)):
        flight = pair.launch(((0, 0), (1, 1)), 4, begins=pair.begin(), before=before)
        for stage, batch in enumerate(batches):
            pair.write(stage, before[stage], stage, batch)
        found = [(stage, batch, pair.answer(stage, before[stage], 4)) for stage, batch in enumerate(batches)]
        assert pair.told(flight) == Told(0, (before[0] + 1, before[1] + 1), 2)
        same(rank, found)


def test_rows_that_do_not_fit_are_left_and_launched_anew(
    runs: PassRuns, rank: HostedRank, alone: Alone
) -> None:
    pair, batches = HostPair(runs, alone), [given(alone, rows, seed=rows) for rows in (2, 9)]
    flight = pair.launch(((0, 0), (1, 0)), 2, begins=pair.begin())
    pair.write(0, 0, 0, batches[0])
    found = [(0, batches[0], pair.answer(0, 0, 2))]
    pair.write(0, 1, 1, batches[1])
    assert pair.told(flight) == Told(MISFIT, (1,), 1) and not pair.answered(0, 1)
    flight = pair.launch(((1, 0),), 16, again=True)
    found.append((1, batches[1], pair.answer(0, 1, 9)))
    assert pair.told(flight) == Told(0, (2,), 1)
    same(rank, found)


@pytest.mark.parametrize("header", [{"kind": m.LOGITS}, {"count": 9}])
def test_a_step_of_another_kind_is_left(runs: PassRuns, alone: Alone, header: dict[str, int]) -> None:
    pair, batch = HostPair(runs, alone), given(alone, 4, seed=1)
    for least in (0, 3):
        flight = pair.launch(((0, 0),), 4, begins=pair.begin(), least=least)
        pair.write(0, 0, 0, batch, **header)
        assert pair.told(flight) == Told(MISFIT, (0,)) and not pair.answered(0, 0)


WRONG: dict[str, dict[str, int]] = {
    "layer": {"layer": 1},
    "far layer": {"layer": 2**32},
    "stage": {"stage": 1},
    "far stage": {"stage": 2**32},
    "kind": {"kind": 2},
    "far kind": {"kind": 2**40},
    "rows": {"count": 41},
    "many rows": {"count": 2**32},
    "most rows": {"count": 2**64 - 1},
    "id": {},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_a_pass_does_not_expect_ends_it_without_a_tag(
    runs: PassRuns, rank: HostedRank, alone: Alone, wrong: str
) -> None:
    pair, batch = HostPair(runs, alone), given(alone, 3, seed=1)
    if wrong == "id":
        batch.route[1, 0] = alone.checkpoint.num_experts
    flight = pair.launch(((0, 0), (1, 0)), 64, begins=pair.begin())
    before = pair.raw_answer(0, 40)
    pair.write(0, 0, 0, batch, **WRONG[wrong])
    assert pair.told(flight) == Told(REFUSED, (2,)) and not pair.answered(0, 0)
    assert torch.equal(before.view(torch.int16), pair.raw_answer(0, 40).view(torch.int16))
    assert wrong == "id" or pair.taken == 0
    right = given(alone, 3, seed=2)
    flight = pair.launch(((0, 0),), 4, begins=pair.begin())
    pair.write(0, 0, 0, right)
    answer = pair.answer(0, 0, 3)
    assert pair.told(flight) == Told(0, (1,), 1)
    same(rank, [(0, right, answer)])


@pytest.mark.parametrize(("few", "many"), [(28, 112), (112, 1792)])
def test_a_header_that_changes_all_the_time_brings_no_rows_of_others(
    runs: PassRuns, alone: Alone, few: int, many: int
) -> None:
    """Counts of rows, and one that is wrong, come and go while blocks read them."""
    pair, other = (HostPair(runs, alone, rows=many) for _ in range(2))
    batch, theirs, padded = given(alone, many, seed=1), given(alone, many, seed=2), padded_rows(many)

    def one(side: HostPair, rows: Given) -> Told:
        number = side.begin()
        side.write(0, 0, 0, rows)
        if side is pair and flips is not None:
            with torch.cuda.stream(stream):
                for _ in range(3):  # some milliseconds
                    flips.replay()
            time.sleep(0.001)
        return side.told(side.launch(((0, 0),), padded, begins=number))

    flips: torch.cuda.CUDAGraph | None = None
    assert one(pair, batch) == Told(0, (1,), 1)
    right, seen = pair.raw_answer(0, many), set[int]()
    counts = [torch.tensor(count, device="cuda") for count in (few, many, -(2**63), few, many)]
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(400):
            for count in counts:
                pair.word(pair.words.header(0) + m.COUNT).copy_(count, non_blocking=True)
    flips = graph
    for round_ in range(1000):  # on some hosts a launch takes longer than the copies, and sees their last
        if round_ >= 100 and seen == {few, many}:
            break
        assert one(other, theirs) == Told(0, (1,), 1), "these are what is left in the room"
        told = one(pair, batch)
        assert told.ended in (0, REFUSED), told
        if not told.ended:
            seen.add(pair.taken)
            assert off(pair.raw_answer(0, pair.taken), right[: pair.taken]) < 0.1, pair.taken
        torch.cuda.synchronize()
    assert seen == {few, many}


def test_a_late_caller_and_a_word_of_the_host_end_all_waits(
    runs: PassRuns, rank: HostedRank, alone: Alone
) -> None:
    pair, batch = HostPair(runs, alone, patience=0.2), given(alone, 2, seed=1)
    flight = pair.launch(((0, 0), (1, 0)), 2, begins=pair.begin())
    pair.write(0, 0, 0, batch)
    answer = pair.answer(0, 0, 2)
    assert pair.told(flight) == Told(LATE, (2,))
    pair.write(0, 1, 1, batch)
    assert not pair.answered(0, 1)
    same(rank, [(0, batch, answer)])
    for word, ended, steps in ((ABORT, LOST, (1,)), (YIELD, MISFIT, (0,))):
        flight = pair.launch(((0, 0),), 2, begins=pair.begin())
        time.sleep(0.05)
        started = time.monotonic()
        pair.owner.abort[0] = word
        told = pair.told(flight)
        pair.owner.abort[0] = 0
        assert (told.ended, told.steps) == (ended, steps) and time.monotonic() - started < 0.1


def test_a_member_given_up_leaves_a_step_without_an_answer(
    rank: HostedRank, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = torch.zeros(4, dtype=torch.int32, device="cuda")
    monkeypatch.setattr(rank, "living", lambda layer, rows: Living(places, 0b0101))
    pair, batch = HostPair(PassRuns(rank), alone), given(alone, 3, seed=1)
    flight = pair.launch(((0, 0),), 4, begins=pair.begin())
    pair.write(0, 0, 0, batch)
    assert pair.told(flight) == Told(LOST, (1,)) and not pair.answered(0, 0)
