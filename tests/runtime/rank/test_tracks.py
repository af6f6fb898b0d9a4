"""Two tracks of one GPU: short runs beside large ones, and runs whose streams wait for tags."""

from __future__ import annotations

import time

import pytest
import torch
from houses import Alone
from pass_pairs import Pair, expected, given

from moeserve.device.streams import MAIN, SHORT, spared, track
from moeserve.dispatch.mail.kernels import MISFIT
from moeserve.dispatch.mail.layout import LINE_BYTES, Word
from moeserve.runtime.launch.torchrun import HostedRank
from moeserve.runtime.rank.runs.mail import INSIST_SECONDS, Mail
from moeserve.runtime.rank.runs.run_graphs import RunGraphs
from moeserve.runtime.rank.runs.runs import PassRuns, Told

pytestmark = pytest.mark.gpu(1)
YIELD = 2
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


def test_runs_of_both_tracks_have_the_bits_of_steps(both: PassRuns, rank: HostedRank, alone: Alone) -> None:
    few, many = Pair(both, alone, stages=1), Pair(both, alone, stages=1)
    batches = [(given(alone, 3, seed=seed), given(alone, 40, seed=seed)) for seed in range(12)]
    right = [[expected(rank, 0, one) for one in pair] for pair in batches]
    both.join()
    for turn, (batch, answers) in enumerate(zip(batches, right, strict=True)):
        begins = many.begin(), few.begin()
        many.bring(0, 0, batch[1])
        first = launched(many, 64, begins=begins[0], beside=turn % 2 == 0)
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
    """On one stream it would, until the large one's patience is over."""
    few, many = Pair(both, alone, stages=1), Pair(both, alone, stages=1, patience=20.0)
    small, large = given(alone, 3, seed=1), given(alone, 40, seed=1)
    for _ in range(3):
        torch.cuda.synchronize()
        waits = launched(many, 64, begins=many.begin(), tag=many.number << 32 | 1)
        flight = launched(few, 4, begins=few.begin(wait=False))
        few.bring(0, 0, small)
        began = time.monotonic()
        few.here.synchronize()
        assert few.told(flight) == Told(0, (1,)) and time.monotonic() - began < 5
        assert not waits.event.query()  # type: ignore[attr-defined]
        many.bring(0, 0, large)
        assert many.told(waits) == Told(0, (1,)) and not many.owner.held
    for pair in (few, many):
        both.forget(pair.owner)


def test_what_follows_runs_waits_for_both_tracks(both: PassRuns, alone: Alone) -> None:
    few = Pair(both, alone, stages=1)
    batch = given(alone, 3, seed=1)
    with torch.cuda.stream(few.there):
        flight = launched(few, 4, begins=few.begin(), tag=few.number << 32 | 1)
        both.join()
        behind = torch.cuda.Event()
        behind.record()
    time.sleep(0.05)
    assert not behind.query()
    few.bring(0, 0, batch)
    behind.synchronize()
    assert few.told(flight) == Told(0, (1,))
    both.forget(few.owner)


@pytest.mark.parametrize("liar", [False, True])
def test_a_stream_that_waits_for_a_tag_is_released(both: PassRuns, alone: Alone, liar: bool) -> None:
    """Also where its caller writes its tag all the time."""
    pair = Pair(both, alone, stages=1, patience=20.0)
    mail = Mail(pair.owner, None, both.release)  # type: ignore[arg-type]
    batch = given(alone, 3, seed=1)
    flight = launched(pair, 4, begins=pair.begin(), least=3)  # what a step needs is there
    pair.bring(0, 0, batch)
    pair.fetch(0, batch.hidden)
    assert pair.told(flight) == Told(0, (1,))
    flight = launched(pair, 4, tag=pair.number << 32 | 2, least=3)
    time.sleep(0.05)
    assert not flight.event.query() and list(pair.owner.held) == [pair.number << 32 | 2]  # type: ignore[attr-defined]
    writer = torch.cuda.Stream()
    at = pair.layout.columns(0)[0]
    tag = pair.box[at : at + 8].view(torch.int64)
    if liar:
        with torch.cuda.stream(writer):
            for _ in range(20_000):
                tag.zero_()
    mail.say(YIELD)
    until = time.monotonic() + 10
    while not flight.event.query() and time.monotonic() < until:  # type: ignore[attr-defined]
        mail.insist(time.monotonic())
        time.sleep(INSIST_SECONDS / 4)
    assert pair.told(flight).ended == MISFIT and not pair.owner.held
    mail.say(0)
    writer.synchronize()
    flight = launched(pair, 4, again=True)
    pair.bring(0, 0, batch)
    pair.fetch(0, batch.hidden)
    assert pair.told(flight) == Told(0, (2,)), "its next rows are read as they always were"
    both.forget(pair.owner)


def test_a_tag_that_is_there_when_its_stream_is_released_stays_true(both: PassRuns, alone: Alone) -> None:
    pair = Pair(both, alone, stages=1)
    batch = given(alone, 3, seed=1)
    begins = pair.begin()
    pair.bring(0, 0, batch)
    torch.cuda.synchronize()
    both.release(pair.owner)
    torch.cuda.synchronize()
    at = pair.layout.columns(0)[0]
    words = pair.box[at : at + LINE_BYTES].view(torch.int64)
    assert int(words[0]) == (begins << 32 | 1) | 1 << 62
    flight = launched(pair, 4, begins=begins, tag=begins << 32 | 1)
    answer = pair.fetch(0, batch.hidden)
    assert pair.told(flight) == Told(0, (1,)) and not torch.isnan(answer).any()
    assert int(pair.owner.state[Word.TAKEN]) == 3
    both.forget(pair.owner)


def test_tracks_do_not_share_what_kernels_keep(both: PassRuns) -> None:
    with both._tracks.of(short=True).current():
        assert track() == SHORT
        stream = torch.cuda.current_stream()
    assert track() == MAIN and torch.cuda.current_stream() != stream
