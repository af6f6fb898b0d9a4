"""A rank whose small steps are replayed answers, counts load and tells bytes as one that launches them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint

from moeserve.device.machine import machine_named
from moeserve.experts.routing.gate import Gate
from moeserve.runtime.config import Config
from moeserve.runtime.epoch import Epoch
from moeserve.runtime.planning.layers import plans_for
from moeserve.runtime.rank import graphs as graphs_room
from moeserve.runtime.rank.graphs import StepGraphs
from moeserve.runtime.rank.rank import Rank
from moeserve.runtime.sections import Wanted
from moeserve.runtime.served import served_from
from moeserve.runtime.step import FIRST_NUMBER, LaneInput, LaneLogits

SIZES = (3, 1, 3, 4, 0, 3, 1, 130, 2, 3)


class Recorder:
    """Stands for a GPU's capture: a replay runs the work anew."""

    replays = 0

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        def replay() -> None:
            self.replays += 1
            work()

        return replay


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-MoE checkpoint of two layers."""
    path = tmp_path_factory.mktemp("qwen3")
    make_checkpoint("qwen3_moe", path)
    return path


def rank_of(path: Path) -> Rank:
    served = served_from(Config().with_values({"model.checkpoint": str(path)}).checked())
    rank = Rank(0, served, plans_for(served, machine_named("cpu", ()), Wanted()), "cpu")
    rank.load(Epoch.first(served.mesh, len(served.layers), served.checkpoint.num_experts))
    rank.join()
    return rank


def lane(rank: Rank, rows: int, seed: int) -> LaneInput:
    checkpoint = rank.served.checkpoint
    random = torch.Generator().manual_seed(seed)
    experts = torch.randint(-1, checkpoint.num_experts, (rows, checkpoint.top_k), generator=random).int()
    return LaneInput(
        torch.randn(rows, checkpoint.hidden, generator=random),
        experts,
        torch.rand(rows, checkpoint.top_k, generator=random),
        torch.arange(rows) % 3 != 1,
    )


def test_replayed_steps_are_those_that_are_launched(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launching, replaying, record = rank_of(path), rank_of(path), Recorder()
    monkeypatch.setattr(replaying._runner, "graphs", StepGraphs(64, "cpu", record))
    monkeypatch.setattr(replaying, "_recordable", lambda layer, fullest: fullest <= 64)
    for seed, rows in enumerate(SIZES):
        for layer in (0, 1):
            wanted, phases = launching.step(layer, lane(launching, rows, seed), (rows,))
            found, told = replaying.step(layer, lane(replaying, rows, seed), (rows,))
            assert found.shape == wanted.shape
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
            assert told.dispatcher == phases.dispatcher
    # sizes 3 and 4 share a graph of 4 rows, 0 and 1 one of 1, and 2 came once; each on two layers
    assert record.replays == 2 * (4 + 2)
    for one, other in zip(
        vars(launching.load_reading()).values(), vars(replaying.load_reading()).values(), strict=True
    ):
        if isinstance(one, tuple):
            assert len(one) == len(other)
        else:
            assert (one == other).all()


def test_a_dispatcher_is_told_of_every_replay_which_step_it_is(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, told = rank_of(path), []
    monkeypatch.setattr(rank._runner, "graphs", StepGraphs(64, "cpu", Recorder()))
    monkeypatch.setattr(rank, "_recordable", lambda layer, fullest: True)
    monkeypatch.setattr(rank._dispatchers, "expect", lambda *given: told.append(given))
    for number, rows in ((FIRST_NUMBER, 3), (FIRST_NUMBER + 4, 4), (FIRST_NUMBER + 5, 3), (None, 4)):
        rank.step(1, lane(rank, rows, seed=rows), (rows,), number)
    # the first was launched, and the second recorded before it was replayed
    assert told == [(1, 4, (FIRST_NUMBER + number, ())) for number in (4, 5, 6)]


def test_rows_in_their_room_are_replayed_at_one_look(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer may be lent: then it lies in the graph's memory, and the next step writes it over."""
    launching, rank = rank_of(path), rank_of(path)
    monkeypatch.setattr(graphs_room, "OWN_ANSWER_ROWS", 0)  # so that answers stay in one place
    monkeypatch.setattr(rank._runner, "graphs", StepGraphs(64, "cpu", Recorder()))
    monkeypatch.setattr(rank, "_recordable", lambda layer, fullest: True)
    told: list[tuple[int, ...]] = []
    monkeypatch.setattr(rank._dispatchers, "expect", lambda layer, rows, step: told.append(step[0]))
    answers = []
    for seed in range(6):
        given = lane(rank, 3, seed)
        room = rank.room(0, (3,)).first(3)
        for into, column in zip(room.columns(), given.columns(), strict=True):
            into.copy_(column)
        found, phases = rank.step(0, room, (3,), FIRST_NUMBER + seed, lent=seed % 2 == 1)
        wanted, _ = launching.step(0, given, (3,))
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
        assert phases.expert_rows == -1 or seed == 0
        answers.append((found, wanted))
    assert told == [FIRST_NUMBER + seed for seed in range(1, 6)]
    kept = [torch.allclose(found, wanted, rtol=1e-5, atol=1e-6) for found, wanted in answers]
    assert kept == [True, True, True, False, True, True], "only what was lent is written over"
    assert len(rank._runner._ready) == 1
    gate = rank.experts.gate(0)
    rank._runner.gate(0)
    monkeypatch.setattr(rank.experts, "gate", lambda layer: Gate("SigmoidRenorm", gate.experts, gate.top_k))
    rank._runner.gate(0)
    assert not rank._runner._ready, "a graph that was dropped is not replayed"


def test_logits_are_routed_by_the_gate_held(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given, routing, record = rank_of(path), rank_of(path), Recorder()
    monkeypatch.setattr(routing._runner, "graphs", StepGraphs(64, "cpu", record))
    monkeypatch.setattr(routing, "_recordable", lambda layer, fullest: True)
    first = given.experts.gate(0)
    for gate in (first, Gate("SigmoidRenorm", first.experts, first.top_k)):  # as of weights loaded since
        monkeypatch.setattr(routing.experts, "gate", lambda layer, gate=gate: gate)
        for seed in range(4):
            rows = lane(given, 3, seed)
            logits = torch.randn(3, first.experts, generator=torch.Generator().manual_seed(seed))
            experts, weights = gate.route(logits)
            wanted, _ = given.step(0, LaneInput(rows.hidden, experts, weights, rows.valid), (3,))
            found, _ = routing.step(0, LaneLogits(rows.hidden, logits, rows.valid), (3,))
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    assert record.replays == 2 * 3
    assert (given.load_reading().tokens == routing.load_reading().tokens).all()


def test_logits_of_another_width_are_refused_before_the_step(path: Path) -> None:
    rank = rank_of(path)
    logits = torch.randn(2, rank.served.checkpoint.num_experts + 1)
    rows = LaneLogits(torch.randn(2, rank.served.checkpoint.hidden), logits, torch.ones(2, dtype=torch.bool))
    with pytest.raises(ValueError, match="router logits must be"):
        rank.step(0, rows, (2,))


def test_a_graph_of_the_caller_s_is_told_the_first_of_its_numbers_once(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, told = rank_of(path), list[tuple[int, tuple[int, ...]]]()
    assert rank._dispatchers[0] is rank._dispatchers[1], "layers of one size share a dispatcher"
    monkeypatch.setattr(rank._dispatchers[0], "expect", lambda number, absent: told.append((number, absent)))
    rank.step(0, lane(rank, 3, 1), (3,))
    before = rank._number
    rank.expect([(0, 4), (1, 4), (0, 4)])
    assert told == [(before + 1, ())] and rank._number == before + 3
    rank.expect([])
    assert len(told) == 1 and rank._number == before + 3
    rank.step(0, lane(rank, 3, 1), (3,))
    assert rank._number == before + 4


def test_a_recorded_step_answers_as_one_that_is_launched(path: Path) -> None:
    rank = rank_of(path)
    rows = lane(rank, 4, 2)
    for layer in (0, 1):
        assert torch.equal(rank.record(layer, rows, (4,)), rank.step(layer, rows, (4,))[0])


def test_what_reads_a_count_on_the_host_is_not_recorded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = rank_of(path)
    (span,) = rank.plans[0].dispatchers
    reads = replace(span, dispatcher=replace(span.dispatcher, host_sync=True))
    monkeypatch.setattr(type(rank.plans[0]), "span", lambda plan, rows: reads)
    with pytest.raises(ValueError, match="reads a count on the host, and cannot be in a CUDA graph"):
        rank.record(0, lane(rank, 4, 2), (4,))
