"""What recorded runs of passes hold of a GPU: bounded, and not more with more callers."""

from __future__ import annotations

import pytest
import torch
from houses import Alone
from pass_pairs import Pair, given

from moeserve.runtime.launch.torchrun import HostedRank
from moeserve.runtime.planning.passes import GRAPH_STEP_BYTES
from moeserve.runtime.rank.runs.run_graphs import RunGraphs
from moeserve.runtime.rank.runs.runs import PassRuns, Told

pytestmark = pytest.mark.gpu(1)


def test_recorded_runs_are_bounded_and_take_what_a_plan_allows(rank: HostedRank, alone: Alone) -> None:
    runs = PassRuns(rank, RunGraphs(2 * 64))
    pair = Pair(runs, alone, stages=1)
    others = [Pair(runs, alone, stages=1) for _ in range(3)]
    rooms = runs.held.rooms
    assert rooms > 0

    def run(of: Pair, layers: tuple[int, ...]) -> None:
        batch = given(alone, 2, seed=1)
        flight = of.launch(tuple((layer, 0) for layer in layers), 2, begins=of.begin())
        for layer in layers:
            of.bring(0, layer, batch)
            of.fetch(0, batch.hidden)
        assert of.told(flight) == Told(0, (len(layers),))

    run(pair, (0, 1) * 32)  # what is made once is there
    torch.cuda.synchronize()
    free, _ = torch.cuda.mem_get_info()
    run(pair, (1, 0) * 32)
    torch.cuda.synchronize()
    step = (free - torch.cuda.mem_get_info()[0]) / 64
    print(f"a recorded step takes {step:.0f} bytes of the device")
    assert step <= GRAPH_STEP_BYTES
    recorded, pool = len(runs), rank_pool(runs)
    for other in others:
        run(other, (1, 0) * 32)
    assert (len(runs), rank_pool(runs), runs.held.rooms) == (recorded, pool, rooms), "callers share them"
    for layers in ((0, 0), (1, 1), (0, 1), (1, 0)):
        run(pair, layers * 16)
    assert runs.recorded_steps <= 2 * 64
    few, small = PassRuns(rank, RunGraphs(8)), (0, 1) * 8
    last = Pair(few, alone, stages=1)
    flight = last.launch(tuple((layer, 0) for layer in small), 2, begins=last.begin())
    batch = given(alone, 2, seed=1)
    for layer in small[:2]:
        last.bring(0, layer, batch)
        last.fetch(0, batch.hidden)
    assert last.told(flight) == Told(0, (2,)) and len(few) == 0, "a longer run than are kept is not recorded"
    for one in (pair, *others):
        runs.forget(one.owner)
    assert (len(runs), runs.held.rooms) == (0, 0)


def rank_pool(runs: PassRuns) -> int:
    """Bytes of the pool that the graphs of `runs` share."""
    snapshots = [torch.cuda.memory_snapshot(pool) for pool in runs.held.pools]
    return sum(int(segment["total_size"]) for found in snapshots for segment in found)
