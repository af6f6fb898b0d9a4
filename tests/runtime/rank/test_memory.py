"""What a rank's memory is for: planned from sizes, held as planned, loaded one expert at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from checkpoints import make_checkpoint
from prometheus_client import generate_latest

from moeserve.device.machine import machine_named
from moeserve.dispatch.backends import DISPATCHERS
from moeserve.dispatch.dispatcher import DispatchSpec
from moeserve.dispatch.members import Members
from moeserve.dispatch.peers.layout import PeerLayout
from moeserve.experts.batch import ExpertWeights, Grouping
from moeserve.quant.formats import BF16
from moeserve.runtime.config import Config
from moeserve.runtime.epoch import Epoch
from moeserve.runtime.mesh import Mesh
from moeserve.runtime.planning.layers import plans_for
from moeserve.runtime.planning.memory import PURPOSES, planned_bytes
from moeserve.runtime.rank import rank as rank_room
from moeserve.runtime.rank.memory import RunsHeld, held_bytes
from moeserve.runtime.rank.rank import Rank
from moeserve.runtime.sections import BalanceConfig, Wanted
from moeserve.runtime.served import Served, served_from
from moeserve.runtime.telemetry.exporter import RankTelemetry


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    path = tmp_path_factory.mktemp("qwen3")
    make_checkpoint("qwen3_moe", path, dtype=torch.bfloat16)
    return served_from(Config().with_values({"model.checkpoint": str(path)}).checked())


def rank_of(served: Served) -> Rank:
    return Rank(0, served, plans_for(served, machine_named("cpu", ()), Wanted()), "cpu")


def first(served: Served) -> Epoch:
    return Epoch.first(served.mesh, len(served.layers), served.checkpoint.num_experts)


def test_one_expert_at_a_time_is_brought_to_the_device(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[int] = []
    to = ExpertWeights.to

    def watched(weights: ExpertWeights, device: torch.device | str) -> ExpertWeights:
        moved.append(weights.experts)
        return to(weights, device)

    monkeypatch.setattr(ExpertWeights, "to", watched)
    rank_of(served).load(first(served))
    assert max(moved) == 1
    assert sum(moved) == len(served.layers) * served.checkpoint.num_experts


def test_what_loading_and_joining_took_is_given_back(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    rank, done = rank_of(served), []
    monkeypatch.setattr(rank, "warm", lambda: done.append("warm"))
    monkeypatch.setattr(rank_room, "release_cached", lambda device: done.append(f"released {device}"))
    rank.load(first(served))
    assert done == ["warm", "released cpu"]
    rank.join()
    assert done[2:] == ["released cpu"]


def test_a_rank_holds_the_weights_that_were_planned(served: Served) -> None:
    rank = rank_of(served)
    planned = planned_bytes(served, rank.plans, BalanceConfig())
    rank.load(first(served))
    rank.join()
    held = rank.held_bytes()
    assert held.keys() == PURPOSES.keys() > planned.keys()
    assert held["weights"] == planned["weights"] == rank.experts.bank.nbytes
    assert (held["staging"], held["dispatch"], planned["dispatch"]) == (0, 0, 0)
    for slot in range(BalanceConfig().staging_slots):
        rank.experts.bank.room(served.layers[0], slot)
    assert rank.held_bytes()["staging"] == planned["staging"]
    batch = served.lane_rows * served.checkpoint.top_k * served.checkpoint.hidden * 2
    assert planned["workspace"] > 3 * batch  # what arrives and both answers, with room for whole segments


def test_dispatchers_over_peer_memory_say_what_their_buffers_take() -> None:
    spec = DispatchSpec(Members.of_ranks(4), 0, 8, 256, 2, 64, torch.bfloat16, BF16)
    for name, grouping in (("nvlink_ll", Grouping.PADDED), ("nvlink_ht", Grouping.RAGGED)):
        told = DISPATCHERS[name].buffer_bytes
        assert told is not None and told(spec) == PeerLayout(spec, grouping).nbytes > 0
    assert DISPATCHERS["deepep_ll"].buffer_bytes is None  # its library's own


def test_a_group_over_peer_memory_plans_what_it_keeps_after_a_loss(served: Served) -> None:
    several, machine = replace(served, mesh=Mesh(2, 1, 2)), machine_named("cpu", ())
    for backend, keeps in (("nvlink_ht", True), ("all2allv", False)):
        plans = plans_for(several, machine, Wanted(dispatcher=backend))
        planned = planned_bytes(several, plans, BalanceConfig())
        assert planned["kept"] == planned["dispatch"] and bool(planned["kept"]) == keeps
    alone = planned_bytes(served, plans_for(served, machine, Wanted()), BalanceConfig())
    assert alone["kept"] == 0


def test_the_metric_tells_every_purpose(served: Served) -> None:
    rank, telemetry = rank_of(served), RankTelemetry("model", 0, "1", {0: ["local"]})
    telemetry.device_bytes(rank.held_bytes)
    rank.load(first(served))
    text = generate_latest(telemetry._registry).decode()
    lines = [line for line in text.splitlines() if "moe_device_bytes{" in line]
    found = {line.split('what="')[1].split('"')[0]: line for line in lines}
    assert found.keys() == PURPOSES.keys()
    assert float(found["weights"].rsplit(" ", 1)[1]) == rank.experts.bank.nbytes


def test_what_runs_of_callers_gpus_hold_is_told_apart(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = rank_of(served)
    rank.load(first(served))
    weights = rank.experts.bank.slots_nbytes
    pools = {
        "steps": [{"total_size": 70, "allocated_size": 50}],
        "runs": [{"total_size": 6, "allocated_size": 3}],
        "short": [{"total_size": 3, "allocated_size": 1}],
    }
    monkeypatch.setattr(torch.cuda, "memory_snapshot", pools.__getitem__)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: weights + 54 + 30 + 1000)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: weights + 79 + 30 + 1000 + 200)
    held = held_bytes(
        rank.experts.bank, (0, 0), "cuda", "steps", RunsHeld(("runs", "short"), rooms=30, mailboxes=500)
    )
    assert (held["graphs"], held["passes"], held["workspace"], held["cached"]) == (79, 530, 1000, 200)
    rank.runs_held = lambda: RunsHeld((), 30, 500)
    assert rank.held_bytes()["passes"] == 0, "there is none on a CPU"


@pytest.mark.gpu(1)
def test_on_a_gpu_a_loaded_rank_keeps_little_beside_its_weights(served: Served) -> None:
    from moeserve.device.machine import this_machine

    rank = Rank(0, served, plans_for(served, this_machine(), Wanted()), "cuda")
    rank.load(first(served))
    rank.join()
    held = rank.held_bytes()
    assert held["weights"] == rank.experts.bank.nbytes
    assert held["cached"] <= 64 << 20  # blocks of 2 and 20 MiB that are in use in part
