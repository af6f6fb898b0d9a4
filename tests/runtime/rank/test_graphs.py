"""Small steps as graphs: padded alike on all ranks, recorded at the second step, replayed from then on."""

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from moeserve.dispatch.members import Member, Members
from moeserve.runtime.rank import graphs
from moeserve.runtime.rank.graphs import OWN_ANSWER_ROWS, GraphStep, StepGraphs, absent_lanes, padded_rows
from moeserve.runtime.step import LaneInput

H, K = 4, 2


class Recorder:
    """A capture that runs the work anew at each replay, as a graph would."""

    def __init__(self) -> None:
        self.captured = self.replayed = 0

    def __call__(self, work):
        self.captured += 1

        def replay() -> None:
            self.replayed += 1
            work()

        return replay


class Layer:
    """Doubles the rows that are valid; what is not comes back as zeros."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, tuple[int, ...]]] = []

    def __call__(self, rows: LaneInput, lane_rows: tuple[int, ...]) -> Tensor:
        self.calls.append((rows.hidden.shape[0], lane_rows))
        return torch.where(rows.valid[:, None], rows.hidden * 2, 0.0)


def lane(rows: int, value: float = 1.0) -> LaneInput:
    return LaneInput(
        torch.full((rows, H), value),
        torch.zeros(rows, K, dtype=torch.int32),
        torch.ones(rows, K),
        torch.ones(rows, dtype=torch.bool),
    )


def test_a_size_is_run_then_recorded_then_replayed() -> None:
    record, layer = Recorder(), Layer()
    graphs = StepGraphs(64, "cpu", record)
    for at, value in enumerate((1.0, 2.0, 3.0, 4.0)):
        answer = graphs.run(GraphStep(0, "decode", (3, 5)), lane(3, value), layer)
        assert torch.equal(answer, torch.full((3, H), 2 * value))
        assert (record.captured, record.replayed) == (min(at, 1), at)
    assert set(layer.calls) == {(8, (8, 8))}  # the fullest lane's rows, padded, on every rank
    assert len(graphs) == 1


def test_an_answer_outlives_the_next_step() -> None:
    graphs, layer = StepGraphs(64, "cpu", Recorder()), Layer()
    answers = [graphs.run(GraphStep(0, "", (2,)), lane(2, value), layer) for value in (1.0, 2.0, 3.0)]
    assert [float(answer[0, 0]) for answer in answers] == [2.0, 4.0, 6.0]


def test_rows_of_a_fuller_step_do_not_stay_valid() -> None:
    graphs = StepGraphs(64, "cpu", Recorder())
    seen = []

    def compute(rows: LaneInput, lane_rows: tuple[int, ...]) -> Tensor:
        seen.append(int(rows.valid.sum()))
        return rows.hidden

    for rows in (4, 3, 0, 4):
        assert graphs.run(GraphStep(0, "", (rows, 4)), lane(rows), compute).shape == (rows, H)
    assert seen == [4, 3, 0, 4]


def test_layers_sizes_and_kinds_have_graphs_of_their_own() -> None:
    record, layer = Recorder(), Layer()
    graphs = StepGraphs(64, "cpu", record)
    for which, kind, rows in ((0, "a", 2), (1, "a", 2), (0, "b", 2), (0, "a", 3)):
        for _ in range(2):
            graphs.run(GraphStep(which, kind, (rows,)), lane(rows), layer)
    assert record.captured == len(graphs) == 4


def test_what_cannot_be_recorded_runs_padded_with_one_warning(caplog) -> None:
    def refuse(work):
        raise RuntimeError("operation not permitted")

    graphs, layer = StepGraphs(64, "cpu", refuse), Layer()
    with caplog.at_level(logging.WARNING):
        for value in (1.0, 2.0, 3.0):
            assert float(graphs.run(GraphStep(7, "", (3,)), lane(3, value), layer)[0, 0]) == 2 * value
    assert set(layer.calls) == {(4, (4,))}
    assert [r.getMessage() for r in caplog.records] == [
        "layer 7, 4 rows: no CUDA graph, steps are launched: operation not permitted"
    ]


def test_rows_are_padded_to_powers_of_two() -> None:
    assert [padded_rows(rows) for rows in (0, 1, 2, 3, 4, 5, 255, 256)] == [1, 1, 2, 4, 4, 8, 256, 256]


def test_a_step_without_a_row_runs_padded_too() -> None:
    graphs, layer = StepGraphs(64, "cpu", Recorder()), Layer()
    for _ in range(3):
        assert graphs.run(GraphStep(0, "", (0, 0)), lane(0), layer).shape == (0, H)
    assert set(layer.calls) == {(1, (1, 1))}


def test_a_graph_has_rows_of_every_lane_and_absent_ones_are_told_before_a_replay() -> None:
    record, layer, told = Recorder(), Layer(), []
    graphs = StepGraphs(64, "cpu", record)
    steps = [
        GraphStep(0, "", (3, 2, 0, 0), absent=(2, 3)),  # as it is: absent lanes bring nothing
        GraphStep(0, "", (3, 0, 4, 0), absent=(1, 3)),  # recorded: with rows of all, the reserved one too
        GraphStep(0, "", (4, 0, 0, 0), absent=(1, 2, 3)),
        GraphStep(0, "", (3, 1, 1, 4)),  # the reserved lane was taken, and nothing is recorded again
    ]
    for at, step in enumerate(steps):
        answer = graphs.run(
            step, lane(step.lane_rows[0], at), layer, lambda step=step: told.append(step.absent)
        )
        assert torch.equal(answer, torch.full((step.lane_rows[0], H), 2.0 * at))
    # the recorder's replay calls it again
    assert layer.calls == [(4, (4, 4, 0, 0))] + 3 * [(4, (4, 4, 4, 4))]
    assert (record.captured, record.replayed) == (1, 3)
    assert told == [step.absent for step in steps[1:]]


def test_what_cannot_be_recorded_is_launched_without_the_absent_lanes() -> None:
    def refuse(work):
        raise RuntimeError("operation not permitted")

    graphs, layer, told = StepGraphs(64, "cpu", refuse), Layer(), []
    for absent in ((), (1,), ()):
        step = GraphStep(0, "", (3, 0 if absent else 1), absent)
        graphs.run(step, lane(3), layer, lambda: told.append("replayed"))
    calls = [lanes for _, lanes in layer.calls]
    # the second is tried to be recorded, which calls nothing here, and launched
    assert calls == [(4, 4), (4, 0), (4, 4)] and not told


def test_a_member_without_a_lane_has_no_rows_in_its_graph() -> None:
    record, layer = Recorder(), Layer()
    graphs = StepGraphs(64, "cpu", record)
    for _ in range(3):
        assert graphs.run(GraphStep(0, "", (3,), brings=False), lane(0), layer).shape == (0, H)
    assert set(layer.calls) == {(0, (4,))} and record.replayed == 2


def test_absent_lanes_are_those_of_nobody_who_launches() -> None:
    both, lane_only, owner_only = Member(0, lane=0, owner=0), Member(1, lane=1), Member(2, owner=1)
    members = Members((both, lane_only, owner_only), 4, 2)
    assert absent_lanes(members, (5, 3, 0, 0)) == (2, 3)
    assert absent_lanes(members, (5, 0, 0, 0)) == (1, 2, 3)
    assert absent_lanes(members, (0, 3, 0, 0)) == (2, 3)  # lane 0 is an owner's, who launches anyway
    assert absent_lanes(Members.of_ranks(2), (0, 3)) == ()


def test_large_answers_of_all_layers_share_their_memory_and_outlive_it() -> None:
    graphs, layer = StepGraphs(256, "cpu", Recorder()), Layer()
    rows, found = OWN_ANSWER_ROWS + 1, {}
    for value in (1.0, 2.0, 3.0):
        for which in (0, 1, 2):
            found[which, value] = graphs.run(
                GraphStep(which, "", (rows,)), lane(rows, value * (which + 1)), layer
            )
    for (which, value), answer in found.items():
        assert torch.equal(answer, torch.full((rows, H), 2 * value * (which + 1)))
    assert len({answer.data_ptr() for answer in graphs._answers.values()}) == 1


def test_room_that_was_filled_is_not_copied_again() -> None:
    graphs, layer = StepGraphs(64, "cpu", Recorder()), Layer()
    for value in (1.0, 2.0, 3.0):
        graphs.run(GraphStep(0, "", (4,)), lane(4), layer)  # as warm steps do, in a form of the same columns
        room = graphs.room(4, (H, K), torch.float32)
        room.rows.hidden.fill_(value)
        room.rows.valid.copy_(torch.tensor([True, True, True, False]))
        answer = graphs.run(GraphStep(0, "", (3,)), room.rows.rows(slice(3)), layer)
        assert torch.equal(answer, torch.full((3, H), 2 * value))
        assert room.rows.valid.tolist() == [True, True, True, False]


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The pools that graphs are recorded to, on a device that can record only what raises nothing."""
    used: list[int] = []

    @contextmanager
    def graph(made: Any, pool: int, capture_error_mode: str) -> Iterator[None]:
        assert not gc.isenabled(), "the collector may destroy a graph in the middle of this one"
        used.append(pool)
        yield

    handles = iter(range(100))
    monkeypatch.setattr(graphs.torch.cuda, "graph", graph)
    monkeypatch.setattr(graphs.torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
    monkeypatch.setattr(graphs.torch.cuda, "graph_pool_handle", lambda: next(handles))
    return used


def test_a_graph_that_cannot_be_recorded_does_not_keep_later_ones_from_it(pools: list[int]) -> None:
    record = graphs.CudaCapture()

    def broken() -> None:
        raise RuntimeError("operation failed due to a previous error during capture")

    record(lambda: None)
    record(lambda: None)
    with pytest.raises(RuntimeError, match="previous error"):
        record(broken)
    record(lambda: None)
    assert pools == [0, 0, 0, 1]  # torch leaves the third's as one that is recorded to
    assert gc.isenabled()
