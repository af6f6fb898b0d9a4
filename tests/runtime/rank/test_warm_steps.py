"""A rank that is alone has run every size of step before it serves, and every rank what it can run alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from torch import Tensor

from moeserve.device.machine import machine_named
from moeserve.runtime.config import Config
from moeserve.runtime.epoch import Epoch
from moeserve.runtime.planning.layers import plans_for
from moeserve.runtime.rank import runner as runner_room
from moeserve.runtime.rank.graphs import StepGraphs
from moeserve.runtime.rank.rank import Rank
from moeserve.runtime.rank.warm import steps as warming
from moeserve.runtime.rank.warm.kernels import rooms
from moeserve.runtime.sections import Wanted
from moeserve.runtime.served import Served, served_from
from moeserve.runtime.step import LaneInput, LaneLogits

LANE_ROWS, GRAPH_ROWS = 12, 8
NOT_THE_CPU = "cpu:0"
"""A device that ranks do not take for the CPU, and torch does."""


class Recorder:
    """Stands for a GPU's capture, and counts."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            work()

        return replay


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    make_checkpoint("qwen3_moe", path)
    return path


def served(path: Path, ranks: int = 1) -> Served:
    values = {"model.checkpoint": str(path), "step.lane_rows": LANE_ROWS, "step.graph_rows": GRAPH_ROWS}
    mesh = {"parallel.data_parallel_size": ranks, "parallel.enable_expert_parallel": True}
    return served_from(Config().with_values(values | mesh).checked())


def loaded(served: Served, device: str) -> Rank:
    rank = Rank(0, served, plans_for(served, machine_named("cpu", ()), Wanted()), device)
    rank.load(Epoch.first(served.mesh, len(served.layers), served.checkpoint.num_experts))
    return rank


def test_a_rank_alone_has_recorded_every_size_when_it_has_joined(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = Recorder()
    monkeypatch.setattr(runner_room, "StepGraphs", lambda most, device: StepGraphs(most, device, record))
    rank = loaded(served(path), NOT_THE_CPU)
    rank.join()
    small, forms = [1, 2, 4, 8], 2  # with choices, and with logits
    assert (record.recorded, record.replayed) == (len(small) * forms, 2 * len(small) * forms)
    assert int(rank.load_reading().tokens.sum()) == 0
    layer, hidden, gate = rank.served.layers[0], rank.served.checkpoint.hidden, rank.experts.gate(0)
    before, most = record.recorded, rank.served.checkpoint.top_k
    for rows in range(1, GRAPH_ROWS + 1):
        valid = torch.ones(rows, dtype=torch.bool)
        experts = torch.arange(most, dtype=torch.int32).repeat(rows, 1)
        chosen = LaneInput(torch.randn(rows, hidden), experts, torch.ones(rows, most), valid)
        rank.step(layer, chosen, (rows,))
        rank.step(
            layer, LaneLogits(torch.randn(rows, hidden), torch.zeros(rows, gate.experts), valid), (rows,)
        )
    assert record.recorded == before


def test_ranks_among_others_and_on_the_cpu_run_no_step_by_themselves(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Rank, "step", lambda *args: pytest.fail("a step was run"))
    alone = loaded(served(path), "cpu")
    alone.join()
    among = loaded(served(path, ranks=2), NOT_THE_CPU)
    monkeypatch.setattr(among._dispatchers, "join", lambda planned, *group: planned)
    among.join()


def test_what_needs_no_other_rank_is_run_before_a_rank_serves(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: Counter[str] = Counter()

    def watched(name: str) -> Callable[..., Any]:
        true = getattr(warming, name)

        def run(*args: Any) -> Any:
            seen[name] += 1
            return true(*args)

        return run

    for name in ("addressed", "routed", "group_rows", "weigh_rows"):
        monkeypatch.setattr(warming, name, watched(name))
    two = served(path, ranks=2)
    rank = loaded(two, NOT_THE_CPU)
    chosen = {"addressed": len(list(rooms(LANE_ROWS))), "routed": 1}  # both layers have one gate, in float32
    assert seen == chosen
    monkeypatch.setattr(rank._dispatchers, "join", lambda planned, *group: planned)
    grouped = len(list(rooms(warming.GROUPED_CHOICES // two.checkpoint.top_k)))
    wires = {span.wire for plan in rank.plans.values() for span in plan.dispatchers}
    for _ in range(2):  # what is warm stays so when the group forms again
        rank.join()
        assert seen == {**chosen, "group_rows": grouped * len(wires), "weigh_rows": grouped * len(wires)}
    assert int(rank.load_reading().tokens.sum()) == 0
    loaded(two, "cpu")
    assert seen["addressed"] == len(list(rooms(LANE_ROWS)))


def test_a_size_that_does_not_fit_ends_it_with_a_warning(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def run(rows: LaneInput | LaneLogits) -> Tensor:
        if rows.hidden.shape[0] > 4:
            raise torch.OutOfMemoryError("no room")
        return rows.hidden

    one = served(path)
    assert warming.warm_steps(run, one, one.checkpoint.gate(0), recorded=2) == 2 * (3 + 3 + 1)
    assert "a step of 8 rows would not fit beside the experts: no room" in caplog.text


@pytest.mark.skipif(find_spec("triton") is None, reason="needs the package triton")
def test_the_kernels_that_group_rows_are_compiled_for_two_widths() -> None:
    from moeserve.dispatch.row_kernels import block_of

    assert {block_of(choices) for choices in range(1, 1 << 14)} == {256, 2048}
