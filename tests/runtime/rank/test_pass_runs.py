"""Runs of a pass on one GPU: a caller's stream and an owner's, and nothing of the host between them."""

from __future__ import annotations

import time

import pytest
import torch
from houses import Alone
from pass_pairs import MOST, Pair, expected, given
from torch import Tensor

from moeserve.dispatch.dispatcher import Living
from moeserve.dispatch.mail.kernels import CHOICE, LOGITS, MISFIT, Given
from moeserve.dispatch.mail.layout import FEW_BLOCKS, STEPS, Word
from moeserve.runtime.launch.torchrun import HostedRank
from moeserve.runtime.rank.graphs import padded_rows
from moeserve.runtime.rank.runs.runs import PassRuns, Told

pytestmark = pytest.mark.gpu(1)
LATE, LOST, REFUSED = 2, 3, 5
LAYERS = (0, 1)


ROUND = tuple((layer, stage) for layer in LAYERS for stage in (0, 1))


def test_answers_have_the_bits_of_a_step(runs: PassRuns, rank: HostedRank, alone: Alone) -> None:
    pair = Pair(runs, alone)
    for turn, rows in enumerate((1, 3, 16, 33, 40, 1)):
        for again in range(4):  # recorded, and replayed
            batches = [given(alone, rows, seed=100 * turn + 10 * again + stage) for stage in (0, 1)]
            begins = pair.begin() if again < 3 else 0
            flight = pair.launch(ROUND, padded_rows(rows), begins=begins)
            found = {}
            for layer in LAYERS:
                for stage in (0, 1):
                    pair.bring(stage, layer, batches[stage])
                for stage in (0, 1):
                    found[layer, stage] = pair.fetch(stage, batches[stage].hidden)
            told = pair.told(flight)
            assert told == Told(0, (4, 4) if again == 3 else (2, 2))
            assert pair.ended == 0
            for (layer, stage), answer in found.items():
                assert torch.equal(answer, expected(rank, layer, batches[stage])), (rows, again, layer, stage)
    assert len(runs) >= 4


@pytest.mark.parametrize("rows", [(1, 5, 2), (16, 1, 33), (300, 40, 1)])
def test_steps_are_right_beside_the_answers_before_them(
    runs: PassRuns, rank: HostedRank, alone: Alone, rows: tuple[int, ...]
) -> None:
    """In forward passes of many steps rows of a stage are taken, and computed, while another's are posted."""
    pair, stages, kinds = Pair(runs, alone, stages=3, rows=300), range(3), 4
    layers = LAYERS * 8
    batches = [
        [given(alone, rows[(stage + kind) % 3], seed=10 * kind + stage) for stage in stages]
        for kind in range(kinds)
    ]
    right = [[[expected(rank, layer, one) for one in of] for layer in LAYERS] for of in batches]
    steps = tuple((layer, stage) for layer in layers for stage in stages)
    for turn in range(24):
        of, wanted = batches[turn % kinds], right[turn % kinds]
        flight, found = pair.launch(steps, padded_rows(max(rows)), begins=pair.begin()), list[Tensor]()
        for stage in stages:
            pair.bring(stage, layers[0], of[stage])
        for behind in (*layers[1:], None):
            for stage in stages:
                found.append(pair.fetch(stage, of[stage].hidden))
                if behind is not None:
                    pair.bring(stage, behind, of[stage])
        assert pair.told(flight) == Told(0, (len(layers),) * 3) and pair.ended == 0
        wrong = [
            at for at, (layer, stage) in enumerate(steps) if not torch.equal(found[at], wanted[layer][stage])
        ]
        assert not wrong, (turn, wrong)


@pytest.mark.parametrize("others", [1, 300])
@pytest.mark.parametrize("rows", [1, 40, 112, 300, 1792])
def test_an_answer_is_fetched_as_other_rows_are_brought(
    runs: PassRuns, rank: HostedRank, alone: Alone, rows: int, others: int
) -> None:
    """By one kernel of few and of many blocks, and by two where many fetch."""
    pair = Pair(runs, alone, rows=1792)
    batches = [given(alone, count, seed=count) for count in (rows, others)]
    for _ in range(3):
        flight = pair.launch(ROUND, padded_rows(max(rows, others)), begins=pair.begin())
        pair.bring(0, 0, batches[0])
        found = [
            pair.exchange((at + 1) % 2, (at + 1) // 2, batches[(at + 1) % 2], at % 2, batches[at % 2].hidden)
            for at in range(3)
        ]
        found.append(pair.fetch(1, batches[1].hidden))
        assert pair.told(flight) == Told(0, (2, 2)) and pair.ended == 0
        for at, answer in enumerate(found):
            assert torch.equal(answer, expected(rank, at // 2, batches[at % 2])), at


def test_an_exchange_of_a_pass_that_has_ended_brings_nothing(runs: PassRuns, alone: Alone) -> None:
    pair = Pair(runs, alone)
    batch = given(alone, 33, seed=1)
    pair.begin()
    pair.table[Word.ENDED] = LOST
    before = pair.box.clone()
    for turn in range(1, 3):
        answer = pair.exchange(0, 0, batch, 1, batch.hidden)
        torch.cuda.synchronize()
        assert (
            not answer.any()
            and torch.equal(pair.box, before)
            and pair.table[STEPS : STEPS + 2].tolist() == [0, turn]
        )


def test_an_exchange_ends_its_pass_where_no_answer_comes(runs: PassRuns, alone: Alone) -> None:
    pair = Pair(runs, alone, patience=0.2)
    batch = given(alone, 33, seed=1)
    pair.begin()
    answer = pair.exchange(0, 0, batch, 1, batch.hidden)
    assert pair.ended == LOST and not answer.any()
    taken = pair.lines[:, 0:2].contiguous().view(torch.int64).flatten()
    assert set(taken[: pair.layout.blocks_of(33)].tolist()) <= {0, pair.number << 32 | 1}


def test_rows_of_runs_are_counted_behind_their_answers(
    runs: PassRuns, rank: HostedRank, alone: Alone
) -> None:
    """Of steps that are launched, recorded and replayed; of few blocks, and of many."""
    pair = Pair(runs, alone, rows=64)
    for rows in (3, 20, 64):
        batches = [given(alone, rows, seed=stage) for stage in (0, 1)]
        expected(rank, 0, batches[0])  # counts, too, as the first of all
        for _ in range(3):
            torch.cuda.synchronize()
            before = rank.rows_computed()
            flight = pair.launch(ROUND, padded_rows(rows), begins=pair.begin())
            for layer in LAYERS:
                for stage in (0, 1):
                    pair.bring(stage, layer, batches[stage])
                for stage in (0, 1):
                    pair.fetch(stage, batches[stage].hidden)
            assert pair.told(flight) == Told(0, (2, 2))
            now = rank.rows_computed()
            assert before is not None and now is not None
            more = [one - other for one, other in zip(now.read(), before.read(), strict=True)]
            assert more == [sum(int((batch.route >= 0).sum()) for batch in batches)] * len(LAYERS)


def test_logits_are_routed_by_the_layers_gate(runs: PassRuns, rank: HostedRank, alone: Alone) -> None:
    pair = Pair(runs, alone, stages=1)
    hidden = given(alone, 5, seed=3).hidden
    logits = torch.randn(5, alone.checkpoint.num_experts, device="cuda")
    batch = Given(hidden, logits, None)
    for _ in range(3):
        flight = pair.launch(((0, 0),), 8, begins=pair.begin(), kind=LOGITS)
        pair.bring(0, 0, batch)
        found = pair.fetch(0, hidden)
        assert pair.told(flight) == Told(0, (1,))
        assert torch.equal(found, expected(rank, 0, batch))


def test_a_captured_caller_is_replayed_without_its_host(
    runs: PassRuns, rank: HostedRank, alone: Alone
) -> None:
    pair = Pair(runs, alone, stages=1)
    static = given(alone, 4, seed=1)
    outs: list[Tensor] = []
    graph = torch.cuda.CUDAGraph()
    pair.begin()
    with torch.cuda.graph(graph, stream=pair.here):
        for layer in LAYERS:
            pair.caller.bring(0, layer, static)
            outs.append(torch.empty_like(static.hidden))
            pair.caller.fetch(0, outs[-1])
    number = pair.number
    for turn in range(20):
        fresh = given(alone, 4, seed=50 + turn)
        for into, column in zip(static, fresh, strict=True):
            into.copy_(column)
        torch.cuda.synchronize()
        flight = pair.launch(tuple((layer, 0) for layer in LAYERS), 4, begins=0 if turn else number)
        with torch.cuda.stream(pair.here):
            graph.replay()
        assert pair.told(flight) == Told(0, (2 * turn + 2,))
        for layer, out in zip(LAYERS, outs, strict=True):
            assert torch.equal(out, expected(rank, layer, fresh)), (turn, layer)


def test_a_caller_that_is_late_ends_its_pass_and_the_next_one_is_right(
    runs: PassRuns, rank: HostedRank, alone: Alone
) -> None:
    pair = Pair(runs, alone, stages=1, patience=0.2)
    batch = given(alone, 2, seed=1)
    started = time.monotonic()
    flight = pair.launch(((0, 0), (1, 0)), 2, begins=pair.begin())
    pair.bring(0, 0, batch)
    first = pair.fetch(0, batch.hidden)
    assert pair.told(flight) == Told(LATE, (2,)), "both steps are counted, and the second has no answer"
    assert time.monotonic() - started < 3.0
    assert torch.equal(first, expected(rank, 0, batch))
    pair.bring(0, 1, batch)
    second = pair.fetch(0, batch.hidden)
    assert pair.ended == LATE and not second.any()
    flight = pair.launch(((0, 0),), 2, begins=pair.begin())
    pair.bring(0, 0, batch)
    again = pair.fetch(0, batch.hidden)
    assert pair.told(flight) == Told(0, (1,)) and pair.ended == 0
    assert torch.equal(again, first)


def test_the_host_ends_all_waits_at_once(runs: PassRuns, alone: Alone) -> None:
    pair = Pair(runs, alone, stages=1, patience=60.0)
    flight = pair.launch(tuple((0, 0) for _ in range(5)), 2, begins=pair.begin())
    time.sleep(0.1)
    started = time.monotonic()
    pair.owner.abort[0] = 1
    assert pair.told(flight) == Told(LOST, (5,)) and time.monotonic() - started < 1.0
    pair.owner.abort[0] = 0


def test_rows_that_do_not_fit_are_left_and_launched_anew(
    runs: PassRuns, rank: HostedRank, alone: Alone
) -> None:
    pair = Pair(runs, alone, stages=1)
    batches = [given(alone, rows, seed=rows) for rows in (2, 9)]
    flight = pair.launch(((0, 0), (1, 0)), 2, begins=pair.begin())
    found = []
    for layer, batch in zip(LAYERS, batches, strict=True):
        pair.bring(0, layer, batch)
        found.append(pair.fetch(0, batch.hidden))
    assert pair.told(flight) == Told(MISFIT, (1,))
    flight = pair.launch(((1, 0),), 16, again=True)
    assert pair.told(flight) == Told(0, (2,))
    for layer, batch, answer in zip(LAYERS, batches, found, strict=True):
        assert torch.equal(answer, expected(rank, layer, batch))


@pytest.mark.parametrize(("rows", "padded"), [(3, 4), (3, 1024), (112, 128), (300, 1024), (896, 1024)])
def test_a_step_that_ends_a_run_costs_the_one_before_no_answer(
    runs: PassRuns, rank: HostedRank, alone: Alone, rows: int, padded: int
) -> None:
    """Its take begins beside the post of that, of which some blocks may have no share."""
    pair = Pair(runs, alone, rows=1792)
    first, few, more = (given(alone, count, seed=count) for count in (rows, 3, padded + 1))
    right = expected(rank, 0, first)
    for turn in range(12):  # launched, recorded, replayed
        fits = turn % 2 == 0
        flight = pair.launch(((0, 0), (0, 1)), padded, begins=pair.begin())
        pair.bring(1, 1 if fits else 0, few if fits else more)  # of another layer, or too many
        pair.bring(0, 0, first)
        answer = pair.fetch(0, first.hidden)
        if fits:
            lost = pair.fetch(1, few.hidden)
            assert pair.told(flight) == Told(REFUSED, (1, 1))
            assert pair.ended == REFUSED and not lost.any()
        else:
            assert pair.told(flight) == Told(MISFIT, (1, 0))
            flight = pair.launch(((0, 1),), padded_rows(padded + 1), again=True)
            assert pair.told(flight) == Told(0, (1, 1))
        torch.cuda.synchronize()
        assert torch.equal(answer, right), turn


@pytest.mark.parametrize(
    ("rows", "logits"), [(8, False), (5, False), (4, False), (0, False), (9, False), (6, True)]
)
def test_a_run_launched_before_its_rows_is_left_where_other_rows_come(
    runs: PassRuns, rank: HostedRank, alone: Alone, rows: int, logits: bool
) -> None:
    """So that a step is computed for as many rows as a call's is; its later steps may have fewer."""
    pair, batches = Pair(runs, alone, stages=1), [given(alone, count, seed=count) for count in (rows, 1)]
    if logits:
        route = torch.randn(rows, alone.checkpoint.num_experts, device="cuda")
        batches[0] = Given(batches[0].hidden, route, None)
    kind = LOGITS if logits else CHOICE
    for _ in range(3):  # launched, recorded, replayed
        flight = pair.launch(((0, 0), (1, 0)), 8, begins=pair.begin(), least=5)
        pair.bring(0, 0, batches[0])
        if 5 <= rows <= 8 and not logits:
            found = [pair.fetch(0, batches[0].hidden)]
            pair.bring(0, 1, batches[1])
            found.append(pair.fetch(0, batches[1].hidden))
            assert pair.told(flight) == Told(0, (2,))
            continue
        assert pair.told(flight) == Told(MISFIT, (0,))
        flight = pair.launch(((0, 0),), padded_rows(rows), again=True, kind=kind)
        assert pair.told(flight) == Told(0, (1,))
        found = [pair.fetch(0, batches[0].hidden)]
        pair.bring(0, 1, batches[1])
        torch.cuda.synchronize()  # nothing waits while the next run is recorded
        flight = pair.launch(((1, 0),), 8)
        assert pair.told(flight) == Told(0, (2,))
        found.append(pair.fetch(0, batches[1].hidden))
    for layer, batch, answer in zip(LAYERS, batches, found, strict=True):
        if len(batch.hidden) and batch.weights is not None:
            assert torch.equal(answer, expected(rank, layer, batch))


def test_a_run_launched_before_its_rows_is_left_where_another_layer_is_next(
    runs: PassRuns, rank: HostedRank, alone: Alone
) -> None:
    """The run before had fewer steps than were known when this one was launched."""
    pair, batch = Pair(runs, alone, stages=1), given(alone, 6, seed=1)
    for _ in range(3):
        flight = pair.launch(((0, 0), (1, 0)), 8, begins=pair.begin(), least=5)
        pair.bring(0, 1, batch)
        assert pair.told(flight) == Told(MISFIT, (0,))
        flight = pair.launch(((1, 0),), 8, again=True)
        assert pair.told(flight) == Told(0, (1,))
        assert torch.equal(pair.fetch(0, batch.hidden), expected(rank, 1, batch))
    assert pair.ended == 0


def test_an_answer_that_lacks_a_members_sums_is_not_given_out(
    rank: HostedRank, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a group of several, whose dispatcher says who was given up."""
    places = torch.ones(4, dtype=torch.int32, device="cuda")
    monkeypatch.setattr(rank, "living", lambda layer, rows: Living(places, 0b0101))
    pair, batch = Pair(PassRuns(rank), alone, stages=1), given(alone, 3, seed=1)
    for turn, gone in enumerate((1, 3, 2, 1)):  # launched, recorded, replayed
        places.fill_(1)
        places[gone] = 0
        torch.cuda.synchronize()
        flight = pair.launch(((0, 0),), 4, begins=pair.begin())
        pair.bring(0, 0, batch)
        found, ended = pair.fetch(0, batch.hidden), LOST if gone == 2 else 0
        assert pair.told(flight) == Told(ended, (1,)) and pair.ended == ended, turn
        assert torch.equal(found, torch.zeros_like(found) if ended else expected(rank, 0, batch))


@pytest.mark.parametrize("wrong", ["layer", "kind", "id", "far id"])
def test_what_a_pass_does_not_expect_ends_it(
    runs: PassRuns, rank: HostedRank, alone: Alone, wrong: str
) -> None:
    pair = Pair(runs, alone, stages=1)
    batch, layer = given(alone, 3, seed=1), 0
    if wrong == "layer":
        layer = 1
    elif wrong == "kind":
        batch = Given(batch.hidden, torch.zeros(3, alone.checkpoint.num_experts, device="cuda"), None)
    else:
        batch.route[1, 0] = alone.checkpoint.num_experts if wrong == "id" else -(2**31)
    flight = pair.launch(((0, 0),), 4, begins=pair.begin())
    pair.bring(0, layer, batch)
    found = pair.fetch(0, batch.hidden)
    assert pair.told(flight) == Told(REFUSED, (1,))
    assert pair.ended == REFUSED and not found.any()
    right = given(alone, 3, seed=2)
    flight = pair.launch(((0, 0),), 4, begins=pair.begin())
    pair.bring(0, 0, right)
    assert torch.equal(pair.fetch(0, right.hidden), expected(rank, 0, right)) and pair.ended == 0


COUNT = 2  # word of a line


def off(found: Tensor, right: Tensor) -> float:
    """How far the worst row is from what it has to be, of the row; another caller's is 1 or more."""
    return float(((found - right).float().norm(dim=1) / right.float().norm(dim=1)).max())


@pytest.mark.parametrize(("few", "many"), [(28, 112), (56, 448), (112, 1792)])
def test_a_count_that_changes_all_the_time_brings_no_rows_of_others(
    runs: PassRuns, rank: HostedRank, alone: Alone, few: int, many: int
) -> None:
    """Blocks of one take read it at different moments, by themselves or after one that waited for them."""
    pair, other = (Pair(runs, alone, stages=1, rows=many) for _ in range(2))
    assert pair.layout.blocks_of(few) < pair.layout.blocks_of(many)
    assert (pair.layout.readers_of(padded_rows(many)) > FEW_BLOCKS) == (many == 1792)
    batch, theirs = given(alone, many, seed=1), given(alone, many, seed=2)
    right, count = other.answered(batch, padded_rows(many)), pair.lines[0, COUNT]
    flips, stream, seen = torch.cuda.CUDAGraph(), torch.cuda.Stream(), set[int]()
    torch.cuda.synchronize()
    with torch.cuda.graph(flips, stream=stream):
        for _ in range(2000):
            count.fill_(few)
            count.fill_(many)
    for _ in range(100):
        other.answered(theirs, padded_rows(many))  # these are what is left in the room
        number = pair.begin()
        pair.bring(0, 0, batch)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for _ in range(3):  # some 15 ms
                flips.replay()
        time.sleep(0.001)
        flight = pair.launch(((0, 0),), padded_rows(many), begins=number)
        assert pair.told(flight) == Told(0, (1,))
        seen.add(pair.taken)
        assert off(pair.answer, right[: pair.taken]) < 0.1, pair.taken
    assert seen == {few, many}


@pytest.mark.parametrize("many", [448, 1792])
def test_a_count_that_grows_while_lines_are_waited_for_is_not_read_again(
    runs: PassRuns, rank: HostedRank, alone: Alone, many: int
) -> None:
    """By few blocks, or by one before many."""
    pair, other = (Pair(runs, alone, stages=1, rows=many) for _ in range(2))
    batch, padded = given(alone, many, seed=1), padded_rows(many)
    right = other.answered(batch, padded)
    other.answered(given(alone, many, seed=2), padded)
    number = pair.begin()
    pair.bring(0, 0, batch)
    torch.cuda.synchronize()
    lines, tags = pair.lines, pair.lines[:, :2].clone()
    lines[0, COUNT], lines[1:, COUNT] = 224, 7  # what other lines say of it has no say
    lines[4:, :2] = 0
    torch.cuda.synchronize()
    flight = pair.launch(((0, 0),), padded, begins=number)
    time.sleep(0.1)
    with torch.cuda.stream(pair.here):
        lines[0, COUNT] = many
        lines[4:, :2] = tags[4:]
    assert pair.told(flight) == Told(0, (1,))
    assert pair.taken == 224 and off(pair.answer, right[:224]) < 0.1


def test_more_rows_than_the_lane_has_end_the_pass(runs: PassRuns, alone: Alone) -> None:
    pair = Pair(runs, alone, stages=1)
    batch = given(alone, 3, seed=1)
    for count in (MOST + 1, -1):
        number = pair.begin()
        pair.bring(0, 0, batch)
        torch.cuda.synchronize()
        pair.lines[0, COUNT] = count
        torch.cuda.synchronize()
        flight = pair.launch(((0, 0),), 64, begins=number)
        assert pair.told(flight) == Told(REFUSED, (1,))
        assert pair.taken == 0
