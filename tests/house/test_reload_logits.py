"""Calls with logits while weights with another correction bias come: bias and experts are of one version."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import torch
from checkpoints import make_checkpoint, rewrite
from houses import Alone, house_config
from torch import Tensor

from moeserve.proto.client import MoeClient
from moeserve.proto.client.batch import Logits
from moeserve.runtime.launch.local_cluster import LocalCluster

ROWS, CALLERS, RELOADS = 64, 4, 12
TWO = {"parallel__data_parallel_size": 2, "parallel__enable_expert_parallel": True}


def write(path: Path, seed: int, slope: float) -> Alone:
    """A checkpoint whose correction bias prefers the last experts, or the first ones."""
    make_checkpoint("deepseek_v3", path, seed=seed)

    def biased(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        for name, tensor in tensors.items():
            if name.endswith("e_score_correction_bias"):
                tensor.copy_(slope * torch.arange(tensor.numel()))
        return tensors

    rewrite(path, biased)
    return Alone(path)


def test_a_call_with_logits_is_routed_by_the_weights_that_answer_it(tmp_path: Path) -> None:
    models = [write(tmp_path / "even", 0, 10.0), write(tmp_path / "odd", 1, -10.0)]
    layer, random = models[0].checkpoint.layers[0], torch.Generator().manual_seed(5)
    hidden, logits = (torch.randn(ROWS, width, generator=random) for width in (64, 8))
    answers = [one.forward(layer, hidden, *one.checkpoint.gate(layer).route(logits)) for one in models]
    wrong, stop = list[int](), threading.Event()

    with LocalCluster(house_config(tmp_path / "even", **TWO)) as house:

        def ask() -> None:
            with MoeClient(house.address, timeout=60) as client:
                while not stop.is_set():
                    reply = client.call(layer, hidden, Logits(logits))
                    right = answers[(reply.weights_version - 1) % 2]
                    if not torch.allclose(torch.as_tensor(reply.hidden), right, rtol=1e-4, atol=1e-4):
                        wrong.append(reply.weights_version)

        callers = [threading.Thread(target=ask, daemon=True) for _ in range(CALLERS)]
        for caller in callers:
            caller.start()
        with MoeClient(house.address, timeout=60) as client:
            for version in range(2, RELOADS + 2):
                path = tmp_path / ("even" if version % 2 else "odd")
                assert client.reload(str(path)).weights_version == version
                time.sleep(0.1)
        stop.set()
        for caller in callers:
            caller.join(60)
    assert not wrong, f"{len(wrong)} answers of experts that another version's bias chose: {wrong[:5]}"
