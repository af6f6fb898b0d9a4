"""A rank runs, for each step, the kernel that its plan printed for that many rows of all lanes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from torch import Tensor

from moeserve.device.machine import machine_named
from moeserve.experts.batch import ExpertBatch, ExpertWeights
from moeserve.experts.kernel import Kernel, KernelSpec, Prepared
from moeserve.experts.spans import KernelSpan
from moeserve.runtime.config import Config
from moeserve.runtime.control.messages import plans_message
from moeserve.runtime.epoch import Epoch
from moeserve.runtime.planning.layers import plans_for
from moeserve.runtime.planning.plan import Plan
from moeserve.runtime.rank.graphs import StepGraphs
from moeserve.runtime.rank.rank import Rank
from moeserve.runtime.sections import Wanted
from moeserve.runtime.served import served_from
from moeserve.runtime.step import LaneInput

FEW_ROWS = 5


class Noting:
    """A kernel that notes its name when it computes."""

    def __init__(self, kernel: Kernel, name: str, ran: list[str]) -> None:
        self._kernel, self._name, self._ran = kernel, name, ran

    def prepare(self, weights: ExpertWeights) -> Prepared:
        return self._kernel.prepare(weights)

    def apply(self, prepared: Prepared, batch: ExpertBatch) -> Tensor:
        self._ran.append(self._name)
        return self._kernel.apply(prepared, batch)


def spanned(plan: Plan, ran: list[str]) -> Plan:
    """The plan with two kernels, one for few rows and one for all others."""
    (only,) = plan.kernels

    def named(name: str, up_to: int) -> KernelSpan:
        def build(spec: KernelSpec) -> Noting:
            return Noting(only.kernel.build(spec), name, ran)

        return KernelSpan(up_to, replace(only.kernel, name=name, build=build))

    spans = (named("few", FEW_ROWS), named("many", only.up_to))
    return replace(plan, kernel=replace(plan.kernel, name="both", spans=spans))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("spans")
    make_checkpoint("qwen3_moe", path)
    return path


def rank_of(path: Path, ran: list[str]) -> Rank:
    served = served_from(Config().with_values({"model.checkpoint": str(path)}).checked())
    plans = plans_for(served, machine_named("cpu", ()), Wanted())
    rank = Rank(0, served, {layer: spanned(plan, ran) for layer, plan in plans.items()}, "cpu")
    rank.load(Epoch.first(served.mesh, len(served.layers), served.checkpoint.num_experts))
    rank.join()
    return rank


def lane(rank: Rank, rows: int) -> LaneInput:
    """Rows of which all choose the first experts: what is likely is not what is."""
    checkpoint = rank.served.checkpoint
    experts = torch.arange(checkpoint.top_k, dtype=torch.int32).expand(rows, -1).contiguous()
    weights = torch.ones(rows, checkpoint.top_k)
    hidden = torch.randn(rows, checkpoint.hidden, generator=torch.Generator().manual_seed(rows))
    return LaneInput(hidden, experts, weights, torch.ones(rows, dtype=torch.bool))


def test_every_step_runs_the_kernel_of_its_span(path: Path) -> None:
    ran: list[str] = []
    rank = rank_of(path, ran)
    plan = rank.plans[0]
    for rows in range(1, 3 * FEW_ROWS):
        rank.step(0, lane(rank, rows), (rows,))
        assert ran[-1] == plan.kernel.span(rows).kernel.name == ("few" if rows <= FEW_ROWS else "many")
    assert len(ran) == 3 * FEW_ROWS - 1


def test_a_replayed_step_runs_the_kernel_of_its_padded_size(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five rows alone are few; in the graph of eight they are what the graph was recorded for."""
    ran: list[str] = []
    rank = rank_of(path, ran)
    monkeypatch.setattr(rank._runner, "graphs", StepGraphs(64, "cpu", lambda work: work))
    monkeypatch.setattr(rank, "_recordable", lambda layer, fullest: True)
    for rows, name in ((4, "few"), (5, "many"), (8, "many"), (3, "few"), (5, "many")):
        rank.step(0, lane(rank, rows), (rows,))
        assert ran[-1] == name, rows


def test_those_who_ask_what_is_served_hear_every_kernel(path: Path) -> None:
    plans = rank_of(path, []).plans
    assert {tuple(entry[:2]) for entry in plans_message(plans)} == {(0, "few+many"), (1, "few+many")}
    assert [line for line in plans[0].lines() if line.startswith("kernel")] == [
        f"kernel   few up to {FEW_ROWS} rows of all lanes (verified: {', '.join(verified(plans[0]))})",
        f"kernel   many up to 4096 rows of all lanes (verified: {', '.join(verified(plans[0]))})",
    ]


def verified(plan: Plan) -> tuple[str, ...]:
    return plan.kernel.verified
