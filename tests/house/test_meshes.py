"""Every mesh serves every kind of checkpoint: whole experts, slices, uneven counts, idle ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from houses import DP2_TP2, EP4, TP4, Alone, house_config

from moeserve.proto.client import MoeClient
from moeserve.runtime.local_cluster import LocalCluster

CASES = {
    "gpt-oss, TP4": ("gpt_oss", TP4, {}),
    "mixtral, TP2 x DP2": ("mixtral", DP2_TP2, {}),
    "deepseek-v3, EP4, six experts": ("deepseek_v3", EP4, {"experts": 6, "n_group": 1}),
    "olmoe, EP4, three experts": ("olmoe", EP4, {"experts": 3}),
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
