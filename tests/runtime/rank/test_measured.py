"""What a device says of its steps: phases by its own clock, and rows that its experts computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint

from moeserve.device.machine import machine_named
from moeserve.runtime.config import Config
from moeserve.runtime.epoch import Epoch
from moeserve.runtime.planning.layers import plans_for
from moeserve.runtime.rank import runner as runner_module
from moeserve.runtime.rank.answers import MOST_UNFINISHED
from moeserve.runtime.rank.graphs import StepGraphs
from moeserve.runtime.rank.measured import TIMED_EVERY, DeviceTimes, ExpertRows, since
from moeserve.runtime.rank.rank import Rank
from moeserve.runtime.sections import Wanted
from moeserve.runtime.served import served_from
from moeserve.runtime.step import FIRST_NUMBER, LaneInput, Phases


class Tick:
    """A timestamp of a clock that goes on by 10 ms each time it is looked at."""

    now = 0.0

    def record(self) -> None:
        Tick.now += 10.0
        self.at = Tick.now

    def elapsed_time(self, end_event: Any) -> float:
        return float(end_event.at - self.at)


def test_phases_lie_between_timestamps() -> None:
    times = DeviceTimes(Tick)
    for _ in range(4):
        times.mark()
    assert times.seconds() == [0.01, 0.01, 0.01]
    launched = Phases(1.0, 2.0, 3.0, -1, 4, 5, "x", timed=False, on_device=times.seconds)
    measured = launched.measured()
    assert (measured.dispatch, measured.compute, measured.combine) == (0.01, 0.01, 0.01)
    assert measured.timed and measured.measured() is measured
    assert (measured.dispatched_bytes, measured.combined_bytes) == (4, 5)


def test_a_timed_graph_is_read_before_it_runs_again() -> None:
    assert TIMED_EVERY > MOST_UNFINISHED


def test_rows_are_counted_by_layer_also_when_slots_change() -> None:
    rows = ExpertRows(3)
    assert rows.reading() is None
    rows.take(0, torch.tensor([1, 2, 3], dtype=torch.int32))
    rows.take(2, torch.tensor([4, 0, 0], dtype=torch.int32))  # the first is counted by now
    reading = rows.reading()
    assert reading is not None and reading.read() == [6, 0, 4]
    rows.take(2, torch.tensor([1, 1], dtype=torch.int32))  # this member holds other slots now
    again = rows.reading()
    assert again is not None and again.read() == [6, 0, 6]
    assert since(again.read(), reading.read()) == [0, 0, 2] and since([3, 4], []) == [3, 4]
    assert again.taken() == [0, 0, 0]
    for position, counts, taken in ((1, [1, 1], 5), (1, [1, 2, 3], 7), (2, [1, 1], 1)):
        rows.tally(position, torch.tensor(counts, dtype=torch.int32)).taken.add_(taken)  # as a kernel does
    last = rows.reading()
    assert last is not None and last.read() == [6, 0, 6] and last.taken() == [0, 12, 1]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-MoE checkpoint of two layers."""
    path = tmp_path_factory.mktemp("qwen3")
    make_checkpoint("qwen3_moe", path)
    return path


def rank_of(path: Path, device: str) -> Rank:
    served = served_from(Config().with_values({"model.checkpoint": str(path)}).checked())
    plans = plans_for(served, machine_named("cpu", ()), Wanted())
    rank = Rank(0, served, plans, device)
    rank.load(Epoch.first(served.mesh, len(served.layers), served.checkpoint.num_experts))
    rank.join()
    return rank


class Capture:
    """Stands for a GPU's capture: a replay runs the work anew, in the same memory."""

    def __call__(self, work: Any) -> Any:
        return work


@pytest.mark.parametrize("recorded", [True, False])
def test_a_rank_counts_what_it_computed_and_times_some_steps(
    path: Path, monkeypatch: pytest.MonkeyPatch, recorded: bool
) -> None:
    """The device is a CPU by another name: the rank asks it nothing that only the host knows."""
    rank = rank_of(path, "cpu")
    monkeypatch.setattr(runner_module, "DeviceTimes", lambda: DeviceTimes(Tick))
    monkeypatch.setattr(rank._runner, "graphs", StepGraphs(64 if recorded else 0, "cpu", Capture()))
    monkeypatch.setattr(rank, "_recordable", lambda layer, fullest: recorded)
    monkeypatch.setattr(rank, "device", "cpu:0")
    monkeypatch.setattr(rank._runner, "_device", "cpu:0")
    checkpoint, wanted, timed = rank.served.checkpoint, [0, 0], []
    for number in range(FIRST_NUMBER - TIMED_EVERY, FIRST_NUMBER + 4 * TIMED_EVERY):
        layer, rows = number % 2, 1 + number % 4
        experts = torch.arange(checkpoint.top_k, dtype=torch.int32).repeat(rows, 1)
        experts[0] = -1
        lane = LaneInput(
            torch.randn(rows, checkpoint.hidden),
            experts,
            torch.ones(rows, checkpoint.top_k),
            torch.ones(rows, dtype=torch.bool),
        )
        _, phases = rank.step(layer, lane, (rows,), number)
        wanted[layer] += (rows - 1) * checkpoint.top_k
        assert not phases.timed, "the host's clock knows no device's phases"
        if phases.on_device is not None:
            timed.append(number)
            assert phases.measured().timed
    assert timed == [FIRST_NUMBER + TIMED_EVERY * at for at in range(4)], "none before a service's first"
    reading = rank.rows_computed()
    assert reading is not None and reading.read() == wanted


@pytest.mark.gpu(1)
def test_timestamps_in_a_graph_are_taken_at_each_replay() -> None:
    times, work = DeviceTimes(), torch.randn(2048, 2048, device="cuda")
    graph = torch.cuda.CUDAGraph()
    work @ work  # what makes a library ready cannot be recorded
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        times.mark()
        for _ in range(8):
            work = work @ work
        times.mark()
    found = []
    for _ in range(3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append((times.seconds()[0], begin.elapsed_time(end) / 1e3))
    assert all(0 < inside <= 1.02 * around for inside, around in found), found
