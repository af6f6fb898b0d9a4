"""Two tracks of one GPU: short runs beside large ones."""

from __future__ import annotations

import time

import pytest
import torch
from houses import Alone
from pass_pairs import Pair, expected, given

from moeserve.device.streams import MAIN, SHORT, spared, track
from moeserve.dispatch.mail.layout import FEW_BLOCKS
from moeserve.runtime.launch.torchrun import HostedRank
from moeserve.runtime.rank.graphs import padded_rows
from moeserve.runtime.rank.runs.run_graphs import RunGraphs
from moeserve.runtime.rank.runs.runs import PassRuns, Told

pytestmark = pytest.mark.gpu(1)
SHORT_ROWS = 8


@pytest.fixture(scope="module")
def both(rank: HostedRank) -> PassRuns:
    """Runs of two tracks."""
    made = PassRuns(rank, RunGraphs(), SHORT_ROWS)
    assert made.short_rows == SHORT_ROWS, "this model's kernels keep nothing that two tracks would share"
    return made


def launched(pair: Pair, rows: int, **more: object) -> object:
    """One step, on the stream that is current: of MAIN it is the test's."""
    return pair.launch(((0, 0),), rows, short=rows <= SHORT_ROWS, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("large", [40, 200, 1000])
def test_runs_of_both_tracks_have_the_bits_of_steps(
    both: PassRuns, rank: HostedRank, alone: Alone, large: int
) -> None:
    """Also of rows that come in several blocks' shares and are read by few blocks, for which one waits."""
    few, many = Pair(both, alone, stages=1), Pair(both, alone, stages=1, rows=large)
    padded, layout = padded_rows(large), many.layout
    blocks = layout.readers_of(padded), layout.blocks_of(large)
    assert {40: (1, 1), 200: (FEW_BLOCKS, 7), 1000: (35, 35)}[large] == blocks
    batches = [(given(alone, 3, seed=seed), given(alone, large, seed=seed)) for seed in range(12)]
    right = [[expected(rank, 0, one) for one in pair] for pair in batches]
    both.join()
    for turn, (batch, answers) in enumerate(zip(batches, right, strict=True)):
        begins = many.begin(), few.begin()
        many.bring(0, 0, batch[1])
        first = launched(many, padded, begins=begins[0], beside=turn % 2 == 0)
        second = launched(few, 4, begins=begins[1], beside=True)
        few.bring(0, 0, batch[0])
        assert torch.equal(few.fetch(0, batch[0].hidden), answers[0]), turn
        assert torch.equal(many.fetch(0, batch[1].hidden), answers[1]), turn
        assert many.told(first) == few.told(second) == Told(0, (1,))
    assert track() == MAIN and spared() == 0
    for pair in (few, many):
        both.forget(pair.owner)


def test_rows_of_both_tracks_are_counted(both: PassRuns, rank: HostedRank, alone: Alone) -> None:
    few, many = Pair(both, alone, stages=1), Pair(both, alone, stages=1)
    batches = given(alone, 3, seed=1), given(alone, 40, seed=1)
    for one in batches:
        expected(rank, 0, one)
    torch.cuda.synchronize()
    before = rank.rows_computed()
    assert before is not None
    counted = before.read()[0]
    both.join()
    times = 30
    for _ in range(times):
        begins = many.begin(), few.begin()
        many.bring(0, 0, batches[1])
        flights = launched(many, 64, begins=begins[0]), launched(few, 4, begins=begins[1])
        few.bring(0, 0, batches[0])
        for pair, flight in zip((many, few), flights, strict=True):
            assert pair.told(flight) == Told(0, (1,))
    both.join()
    now = rank.rows_computed()
    assert now is not None
    chosen = sum(int((one.route >= 0).sum()) for one in batches)
    assert now.read()[0] - counted == times * chosen
    for pair in (few, many):
        both.forget(pair.owner)


def test_a_short_run_does_not_wait_for_the_rows_of_a_large_one(both: PassRuns, alone: Alone) -> None:
    """On one stream it would, until the large one's patience is over; nor the other way about."""
    few, many = Pair(both, alone, stages=1, patience=20.0), Pair(both, alone, stages=1, patience=20.0)
    batches = given(alone, 3, seed=1), given(alone, 40, seed=1)
    pairs = ((few, batches[0], 4), (many, batches[1], 64))
    for turn in range(8):
        begins = [pair.begin() for pair, _, _ in pairs]
        at = turn % 2 if turn > 3 else None  # who waits; at first what both need is loaded and recorded
        flights = {}
        for one, (pair, batch, rows) in sorted(enumerate(pairs), key=lambda item: item[0] != at):
            if one != at:
                pair.bring(0, 0, batch)
            flights[one] = launched(pair, rows, begins=begins[one], beside=True)
        began = time.monotonic()
        for one, (pair, batch, _) in enumerate(pairs):
            if one != at:
                pair.fetch(0, batch.hidden)
                assert pair.told(flights[one]) == Told(0, (1,)) and time.monotonic() - began < 5
        if at is not None:
            pair, batch, _ = pairs[at]
            assert not flights[at].event.query()  # type: ignore[attr-defined]
            pair.bring(0, 0, batch)
            pair.fetch(0, batch.hidden)
            assert pair.told(flights[at]) == Told(0, (1,))
    for pair in (few, many):
        both.forget(pair.owner)


def test_what_follows_runs_waits_for_both_tracks(both: PassRuns, alone: Alone) -> None:
    few = Pair(both, alone, stages=1)
    batch = given(alone, 3, seed=1)
    for _ in range(3):
        begins = few.begin()
        few.bring(0, 0, batch)
        few.fetch(0, batch.hidden)
        assert few.told(launched(few, 4, begins=begins)) == Told(0, (1,))
    with torch.cuda.stream(few.there):
        flight = launched(few, 4, begins=few.begin())
        both.join()
        behind = torch.cuda.Event()
        behind.record()
    time.sleep(0.05)
    assert not behind.query()
    few.bring(0, 0, batch)
    behind.synchronize()
    assert few.told(flight) == Told(0, (1,))
    both.forget(few.owner)


def test_tracks_do_not_share_what_kernels_keep(both: PassRuns) -> None:
    with both._tracks.of(short=True).current():
        assert track() == SHORT
        stream = torch.cuda.current_stream()
    assert track() == MAIN and torch.cuda.current_stream() != stream
