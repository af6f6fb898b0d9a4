"""Quantized checkpoints, served: the tokens are those that one process makes of the scheme's arithmetic.

A few of each kind; `bench/service/quantized.py` has every way to store experts on two meshes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from houses import Alone, house_config
from quantized import PRODUCERS
from quantized_models import QuantizedModel, greedy, logits, random_tokens, write_gpt_oss, write_model

from moeserve import cli
from moeserve.checkpoints.checkpoint import Checkpoint
from moeserve.proto.client import MoeClient
from moeserve.proto.errors import MoeError
from moeserve.proto.integrations.transformers import attach
from moeserve.runtime.launch.local_cluster import LocalCluster

EP2 = {"parallel__data_parallel_size": 2, "parallel__enable_expert_parallel": True}
TP2 = {"parallel__tensor_parallel_size": 2}
PROMPTS, NEW = (2, 8), 12


@dataclass(frozen=True)
class Case:
    """A model whose experts are stored in one way, and how it is served."""

    family: str
    stored: str
    slices: int = 1

    def write(self, path: Path) -> QuantizedModel:
        """Writes the checkpoint."""
        if self.family == "gpt_oss":
            return write_gpt_oss(path)
        return write_model(path, self.family, PRODUCERS[self.stored])


CASES = [
    Case("qwen3_moe", "ct FP8"),
    Case("mixtral", "fp8 block", slices=2),
    Case("qwen3_moe", "ct W8A8", slices=2),
    Case("mixtral", "ct asymmetric act order", slices=2),
    Case("qwen3_moe", "gptq act order"),
    Case("mixtral", "awq"),
    Case("mixtral", "ct W4AFP8"),
    Case("mixtral", "modelopt NVFP4", slices=2),
    Case("qwen3_moe", "ct MXFP4"),
    Case("qwen3_moe", "modelopt MXFP8", slices=2),
    Case("gpt_oss", "mxfp4 blocks", slices=2),
]


pytestmark = pytest.mark.usefixtures("one_thread")
"""The models are small."""


def assert_same_tokens(model: QuantizedModel, client: MoeClient, slices: int) -> None:
    """Greedy tokens are equal, and so are logits on them.

    A last bit may bring an activation to its next code where activations are rounded, so their bound is a
    tenth of what leaving them unrounded changes; it changes something, or the scheme would not show.
    """
    prompts, alone, remote = random_tokens(*PROMPTS), model.alone(slices), model.without_experts()
    attach(remote, client)
    tokens = greedy(alone, prompts, NEW)
    wanted, found = logits(alone, tokens), logits(remote, tokens)
    bound = 1e-4
    if model.activations != "fp32":
        bound = float((logits(model.alone(slices, activations="fp32"), tokens) - wanted).abs().max()) / 10
        assert bound > 1e-3
    assert torch.equal(greedy(remote, prompts, NEW), tokens)
    assert float((found - wanted).abs().max()) <= bound


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.family} {case.stored}")
def test_a_quantized_model_makes_the_tokens_of_one_process(case: Case, tmp_path: Path) -> None:
    model, mesh = case.write(tmp_path), TP2 if case.slices > 1 else EP2
    config = house_config(tmp_path, model__dtype="fp32", server__metrics_port=-1, **mesh)
    with LocalCluster(config) as house, MoeClient(house.address, timeout=30) as client:
        assert_same_tokens(model, client, case.slices)
        if case.slices == 1:
            alone = Alone(tmp_path)
            hidden, experts, weights = alone.batch(9, seed=3)
            experts[2], experts[4, 1] = -1, -1
            answer, wanted = (each.forward(1, hidden, experts, weights) for each in (client, alone))
            assert float((answer - wanted).norm() / wanted.norm()) < 1e-3


Run = Callable[[list[str]], str]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """The command line, and what it printed."""

    def printed(words: list[str]) -> str:
        assert cli.main(words) == 0
        return capsys.readouterr().out

    return printed


def test_a_deepseek_v4_with_mxfp4_experts_is_understood(tmp_path: Path, run: Run) -> None:
    model = write_model(tmp_path, "deepseek_v4", PRODUCERS["deepseek fp4 by the model's key"])
    checkpoint = Checkpoint(tmp_path)
    assert all(name.startswith("layers.1.ffn.experts.") for name in checkpoint.tensors(1))
    assert (checkpoint.dialect.name, checkpoint.scheme(0).name) == ("deepseek_fp4", "mxfp4 x fp32")
    for layer, (gate_up, down) in model.weights.items():
        read = checkpoint.experts(layer, range(4))
        assert torch.equal(read.gate_up.dequantize(), gate_up)
        assert torch.equal(read.down.dequantize(), down)
    shown: dict[str, Any] = json.loads(run(["inspect", str(tmp_path), "--json"]))
    assert shown["routing"]["method"] == "DeepseekV4"
    assert [layer["weights"] for layer in shown["layers"]] == ["mxfp4", "mxfp4"]
    assert checkpoint.shape(0).activation.limit == model.model.config.swiglu_limit


@torch.no_grad()
def test_a_deepseek_v4_with_mxfp4_experts_is_served(tmp_path: Path) -> None:
    model = write_model(tmp_path, "deepseek_v4", PRODUCERS["deepseek fp4"])
    hidden = torch.randn(7, model.model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    router = model.model.model.layers[1].mlp.gate
    theirs, weights, experts = router(hidden)
    ids, shares = Checkpoint(tmp_path).gate(1).route(theirs)
    order, own = experts.argsort(-1), ids.long().argsort(-1)
    assert torch.equal(ids.long().gather(1, own), experts.gather(1, order))
    torch.testing.assert_close(shares.gather(1, own), weights.gather(1, order), rtol=0, atol=3e-7)
    config = house_config(tmp_path, server__metrics_port=-1, **TP2)
    with LocalCluster(config) as house, MoeClient(house.address, timeout=30) as client:
        assert_same_tokens(model, client, slices=2)
        routed = client.forward_logits(1, hidden, theirs)
        chosen = client.forward(1, hidden, experts.int(), weights)
        torch.testing.assert_close(routed, chosen, rtol=1e-5, atol=1e-5)
        with pytest.raises(MoeError, match="layer 0 chooses experts by token id; send choice"):
            client.forward_logits(0, hidden, theirs)
