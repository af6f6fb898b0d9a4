"""`model.load_as`: a service that quantizes while it loads answers as one process with such a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from houses import Alone, house_config
from torch import Tensor

from moeserve.checkpoints.checkpoint import Checkpoint
from moeserve.device.machine import machine_named
from moeserve.proto.client import MoeClient
from moeserve.runtime.epoch import Epoch
from moeserve.runtime.launch.local_cluster import LocalCluster
from moeserve.runtime.mesh import Mesh
from moeserve.runtime.planning.layers import plans_for
from moeserve.runtime.rank.rank import Rank
from moeserve.runtime.sections import Wanted
from moeserve.runtime.served import Served, served_from
from moeserve.runtime.step import LaneInput

NAME, SCHEME = "fp8_per_block", "fp8_block128 x fp8_group128"
LANE_ROWS = 64


pytestmark = pytest.mark.usefixtures("one_thread")
"""The service below has one thread too: GEMMs cut alike give the same bits."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-MoE checkpoint of two layers in bf16."""
    path = tmp_path_factory.mktemp("qwen3")
    make_checkpoint("qwen3_moe", path, dtype=torch.bfloat16, hidden=256, inner=128, experts=4)
    return path


@pytest.fixture(scope="module")
def rank(path: Path) -> Rank:
    """One rank, in this process, of the checkpoint opened with `load_as`."""
    checkpoint = Checkpoint(path, load_as=NAME)
    served = Served(
        checkpoint, checkpoint.layers, Mesh.flatten(1, 1, expert_parallel=False), torch.bfloat16, LANE_ROWS
    )
    rank = Rank(0, served, plans_for(served, machine_named("cpu"), Wanted()), "cpu")
    rank.load(Epoch.first(served.mesh, len(served.layers), checkpoint.num_experts))
    rank.join()
    return rank


def batch(path: Path) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states in bf16, chosen experts and weights."""
    hidden, experts, weights = Alone(path).batch(24, seed=3)
    return hidden.bfloat16(), experts, weights


def test_a_service_answers_bit_for_bit_as_such_a_checkpoint(path: Path, rank: Rank) -> None:
    hidden, experts, weights = batch(path)
    rows = LaneInput(hidden, experts, weights, torch.ones(len(hidden), dtype=torch.bool))
    config = house_config(path, model__load_as=NAME, step__lane_rows=LANE_ROWS, cluster__threads_per_rank=1)
    with LocalCluster(config) as house, MoeClient(house.address, timeout=30) as client:
        assert {layer.scheme for layer in client.model().layers} == {SCHEME}
        for layer in rank.served.layers:
            wanted, _ = rank.step(layer, rows, (len(hidden),))
            answer = client.forward(layer, hidden, experts, weights)
            assert answer.dtype == torch.bfloat16 and float(wanted.abs().max()) > 0
            assert torch.equal(answer, wanted)


def test_a_configuration_opens_the_checkpoint_so(path: Path) -> None:
    served = served_from(house_config(path, model__load_as=NAME))
    direct = Checkpoint(path, load_as=NAME)
    for layer in served.layers:
        assert served.scheme(layer).name == SCHEME
        found, wanted = (view.experts(layer, [1, 3]).tensors() for view in (served.checkpoint, direct))
        assert found.keys() == wanted.keys()
        assert all(
            torch.equal(found[name].view(torch.uint8), wanted[name].view(torch.uint8)) for name in found
        )


def test_without_the_key_experts_are_served_as_stored(path: Path) -> None:
    served = served_from(house_config(path))
    assert {served.scheme(layer).name for layer in served.layers} == {"bf16"}
