"""A rank's kernels run for every size of batch before its first step, as each is compiled at first use."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from torch import Tensor

from moeserve.checkpoints.checkpoint import Checkpoint
from moeserve.device.machine import machine_named
from moeserve.dispatch.backends import DISPATCHERS
from moeserve.experts.activation import Activation
from moeserve.experts.batch import ExpertBatch, ExpertShape, ExpertWeights, Grouping
from moeserve.experts.kernel import KernelSpec, Prepared, Problem
from moeserve.experts.kernels import KERNELS
from moeserve.experts.kernels.tiles import tile_for
from moeserve.quant.formats.floats import BF16
from moeserve.quant.schemes import scheme_named
from moeserve.runtime.epoch import Epoch
from moeserve.runtime.mesh import Mesh
from moeserve.runtime.planning.layers import plans_for
from moeserve.runtime.planning.plan import DispatchSpan, Plan, make_plan
from moeserve.runtime.rank.rank import Rank
from moeserve.runtime.rank.warm.kernels import Arrivals, rooms, warm
from moeserve.runtime.sections import Wanted
from moeserve.runtime.served import Served

LANE_ROWS, EXPERTS = 48, 4


class Recorder:
    """A kernel that notes what it is applied to."""

    def __init__(self, spec: KernelSpec, applied: list[tuple[KernelSpec, ExpertBatch]]) -> None:
        self._spec, self._applied = spec, applied

    def prepare(self, weights: ExpertWeights) -> Prepared:
        return Prepared({"gate_up": weights.gate_up.parts[0], "down": weights.down.parts[0]})

    def apply(self, prepared: Prepared, batch: ExpertBatch) -> Tensor:
        assert prepared.slots == batch.slots
        self._applied.append((self._spec, batch))
        return torch.empty(batch.tokens.shape, dtype=self._spec.out_dtype)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    path: Path = tmp_path_factory.mktemp("warm")
    make_checkpoint("qwen3_moe", path, dtype=torch.bfloat16, hidden=64, inner=32, experts=EXPERTS)
    checkpoint = Checkpoint(path)
    mesh = Mesh.flatten(1, 1, expert_parallel=False)
    return Served(checkpoint, checkpoint.layers, mesh, torch.bfloat16, LANE_ROWS)


def spans(groupings: Sequence[Grouping]) -> tuple[DispatchSpan, ...]:
    """A dispatcher for each grouping; those of the table that are PADDED need not run here."""
    local = DISPATCHERS["local"]
    return tuple(DispatchSpan(LANE_ROWS, replace(local, grouping=grouping), BF16) for grouping in groupings)


def loaded(
    served: Served, device: str, groupings: Sequence[Grouping]
) -> tuple[Rank, list[tuple[KernelSpec, ExpertBatch]]]:
    """A rank whose kernels note what they compute, and their notes."""
    applied: list[tuple[KernelSpec, ExpertBatch]] = []

    def noting(plan: Plan) -> Plan:
        (span,) = plan.kernels
        entry = replace(span.kernel, build=lambda spec: Recorder(spec, applied))
        kernel = replace(plan.kernel, spans=(replace(span, kernel=entry),))
        return replace(plan, kernel=kernel, fitting=spans(groupings))

    plans = plans_for(served, machine_named("cpu"), Wanted())
    rank = Rank(0, served, {layer: noting(plan) for layer, plan in plans.items()}, device)
    rank.load(Epoch.first(served.mesh, len(served.layers), EXPERTS))
    return rank, applied


NOT_THE_CPU = "cpu:0"
"""A device that ranks do not take for the CPU, and torch does."""


def test_every_kernel_is_applied_once_for_every_room_when_the_experts_are_loaded(served: Served) -> None:
    assert len(served.layers) > 1  # of one spec: they share the kernel
    rank, applied = loaded(served, NOT_THE_CPU, list(Grouping))
    most = LANE_ROWS * served.checkpoint.top_k + 1
    found = Counter((batch.grouping, batch.tokens.shape[-2]) for _, batch in applied)
    ragged = {(Grouping.RAGGED, rows): 1 for rows in rooms(most)}
    padded = {(Grouping.PADDED, rows): 1 for rows in rooms(LANE_ROWS)}
    assert found == Counter(ragged | padded)
    assert all(batch.tokens.format == BF16 and int(batch.counts.sum()) == 0 for _, batch in applied)
    before = len(applied)
    rank.load(Epoch.first(served.mesh, len(served.layers), EXPERTS))
    assert len(applied) == before  # they are warm


def test_nothing_is_counted_as_load(served: Served) -> None:
    rank, applied = loaded(served, NOT_THE_CPU, [Grouping.RAGGED])
    assert applied
    assert int(rank.load_reading().tokens.sum()) == 0


def test_on_the_cpu_there_is_nothing_to_warm(served: Served) -> None:
    _, applied = loaded(served, "cpu", list(Grouping))
    assert applied == []


@pytest.mark.parametrize("grouping", list(Grouping))
def test_an_empty_batch_has_the_starts_its_grouping_gives(grouping: Grouping) -> None:
    batch = Arrivals(BF16, grouping, slots=3, hidden=8, most=5).empty(5, torch.device("cpu"))
    assert batch.offsets.tolist() == ([0, 5, 10, 15] if grouping is Grouping.PADDED else [0, 0, 0, 0])
    assert batch.tokens.shape == ((3, 5, 8) if grouping is Grouping.PADDED else (5, 8))


@pytest.mark.parametrize("kind", ["bf16", "fp8", "fp4"])
@pytest.mark.parametrize("slots", [1, 64, 512])
def test_rooms_meet_every_tile_that_a_step_can_ask_for(kind: str, slots: int) -> None:
    most = 4 * 4096 * 8
    asked = {tile_for("NVIDIA H200", kind, rows / slots) for rows in range(1, most + 1, 7)}
    assert {tile_for("NVIDIA H200", kind, rows / slots) for rows in rooms(most)} >= asked


@pytest.mark.parametrize("grouping", list(Grouping))
@pytest.mark.parametrize("experts", [8, 96, 256])
@pytest.mark.parametrize("scheme", ["nvfp4 x bf16", "bf16", "fp8_block128 x fp8_group128"])
def test_every_kernel_of_a_plan_is_met_before_a_step_asks_for_it(
    scheme: str, experts: int, grouping: Grouping
) -> None:
    problem = Problem(
        scheme_named(scheme), BF16, ExpertShape(4096, 1536, Activation("silu")), experts, 4, 4, 8, LANE_ROWS
    )
    plan = make_plan(problem, machine_named("h200"), KERNELS, DISPATCHERS)
    span = replace(plan.fitting[0], dispatcher=replace(plan.fitting[0].dispatcher, grouping=grouping))
    arrivals = Arrivals.over(span, plan, problem.slots)
    batches = [arrivals.empty(rows, "meta", likely) for rows, likely in arrivals.sizes()]
    met = {plan.kernel.span_of(batch).kernel.name for batch in batches}
    asked = {plan.kernel.span(rows).kernel.name for rows in range(1, 4 * LANE_ROWS + 1)}
    assert len(asked) > 1
    assert met >= asked


def test_rooms_end_with_the_most_and_there_is_none_in_nothing() -> None:
    assert list(rooms(5)) == [1, 2, 4, 5]
    assert list(rooms(8)) == [1, 2, 4, 8]
    assert list(rooms(0)) == []


def test_a_batch_that_does_not_fit_ends_it_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    class Full:
        def prepare(self, weights: ExpertWeights) -> Prepared:
            return Prepared({"codes": torch.empty(2, 1)})

        def apply(self, prepared: Prepared, batch: ExpertBatch) -> Tensor:
            if batch.tokens.shape[0] > 4:
                raise torch.OutOfMemoryError("no room")
            return torch.empty(batch.tokens.shape)

    with caplog.at_level(logging.WARNING):
        done = warm(Full(), Prepared({"codes": torch.empty(2, 1)}), Arrivals(BF16, Grouping.RAGGED, 2, 8, 64))
    assert done == 3
    assert "a step's batch of 8 rows would not fit beside the experts: no room" in caplog.text


def test_what_is_warmed_is_chosen_without_a_tensor(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """For one on another device than the host's, torch brought in its compiler: 3.4 s of a start on a GPU."""
    monkeypatch.setattr(Arrivals, "empty", lambda *_: pytest.fail("a tensor was made"))
    for plan in plans_for(served, machine_named("h200"), Wanted()).values():
        assert plan.fitting
        for span in plan.fitting:
            assert Arrivals.over(span, plan, EXPERTS).most > 0
