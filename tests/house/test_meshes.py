"""Every mesh serves every kind of checkpoint: whole experts, slices, uneven counts, idle ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint, quantize_fp8_block
from houses import DP2_TP2, EP4, TP4, Alone, house_config

from moeserve.proto.client import MoeClient
from moeserve.quant.formats import FP8_GROUP
from moeserve.runtime.launch.local_cluster import LocalCluster

RESERVED = {"members__max_lanes": 6, "members__max_owners": 5}

CASES = {
    "gpt-oss, TP4": ("gpt_oss", TP4, {}),
    "mixtral, TP2 x DP2": ("mixtral", DP2_TP2, {}),
    "deepseek-v3, EP4, six experts": ("deepseek_v3", EP4, {"experts": 6, "n_group": 1}),
    "olmoe, EP4, three experts": ("olmoe", EP4, {"experts": 3}),
    "mixtral, EP4, two lanes and one owner reserved": ("mixtral", EP4 | RESERVED, {}),
    "mixtral, TP4, two lanes reserved": ("mixtral", TP4 | {"members__max_lanes": 6}, {}),
    "mixtral, EP4 over peer memory, reserved": (
        "mixtral",
        EP4 | RESERVED | {"plan__all2all_backend": "nvlink_ll"},
        {},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_mesh_answers_as_one(tmp_path: Path, case: str) -> None:
    family, mesh, size = CASES[case]
    make_checkpoint(family, tmp_path, **size)
    alone = Alone(tmp_path)
    with (
        LocalCluster(house_config(tmp_path, **mesh)) as house,
        MoeClient(house.address, timeout=30) as client,
    ):
        for layer in alone.checkpoint.layers:
            for rows in (1, 50):
                batch = alone.batch(rows, seed=rows)
                torch.testing.assert_close(
                    client.forward(layer, *batch), alone.forward(layer, *batch), rtol=1e-4, atol=1e-4
                )


@pytest.mark.parametrize("mesh", [EP4, DP2_TP2], ids=["EP4", "TP2 x DP2"])
def test_fp8_blocks_are_served_with_rounded_activations(tmp_path: Path, mesh: dict[str, object]) -> None:
    make_checkpoint("deepseek_v3", tmp_path, hidden=256, inner=512, experts=4)
    quantize_fp8_block(tmp_path)
    alone = Alone(tmp_path)
    (layer,) = alone.checkpoint.layers
    with (
        LocalCluster(house_config(tmp_path, **mesh)) as house,
        MoeClient(house.address, timeout=30) as client,
    ):
        served = client.model().layers[0]
        assert (served.scheme, served.wire) == ("fp8_block128 x fp8_group128", "fp8_group128")
        batch = alone.batch(24, seed=1)
        answer, wanted = client.forward(layer, *batch), alone.forward(layer, *batch)
        assert float((answer - wanted).norm() / wanted.norm()) < 1e-5


def test_a_narrower_wire_is_used_when_it_is_named(tmp_path: Path) -> None:
    make_checkpoint("qwen3_moe", tmp_path, hidden=256)
    alone = Alone(tmp_path)
    config = house_config(tmp_path, plan__wire="fp8_group128", plan__all2all_backend="all2allv", **EP4)
    with LocalCluster(config) as house, MoeClient(house.address, timeout=30) as client:
        served = client.model().layers[0]
        assert (served.all2all_backend, served.wire) == ("all2allv", "fp8_group128")
        hidden, experts, weights = alone.batch(40, seed=2)
        sent = FP8_GROUP.quantize(hidden).dequantize()
        wanted = alone.forward(0, sent, experts, weights)
        torch.testing.assert_close(client.forward(0, hidden, experts, weights), wanted, rtol=1e-4, atol=1e-4)
