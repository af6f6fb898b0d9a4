"""`bench/experts/gpu_experts.py`: which peers a kind of experts has, and what is recorded beside them."""

import pytest
import torch

pytest.importorskip("triton")

from bench.experts import gpu_experts, gpu_peers


def test_every_kind_that_a_model_is_run_in_has_a_whole_peer() -> None:
    peers = gpu_peers.PEERS
    for held in gpu_experts.MODELS.values():
        for kind in held.kinds:
            able = [peer for peer in peers[kind].values() if held.shape.activation.name in peer.activations]
            assert any(peer.whole and peer.least == 1 for peer in able), (held.name, kind)


def test_the_aim_of_other_models_is_their_fastest_whole_peer() -> None:
    case = gpu_experts.Case("qwen3-235b", "fp8", (512,))
    ids = torch.tensor([[0, 3], [3, 7]], dtype=torch.int32)
    inputs = gpu_experts.Inputs(torch.zeros(2, 4096), ids, torch.ones(2, 2))
    times = {"whole": 100.04, "kernel": 90.0}
    beside = {"vLLM Triton": 120.0, "vLLM DeepGEMM": 96.0, gpu_peers.GEMMS_ONLY: 80.0}
    (found,) = gpu_experts.results(case, inputs, times, beside)
    assert (found.bench, found.ours, found.aim) == ("gpu_models", 100.0, 100.8)
    assert found.case == "qwen3-235b: fp8, 2 tokens x 2, 3 of 32 experts active, whole"
    (alone,) = gpu_experts.results(case, inputs, times, {})
    assert alone.aim is None


def test_the_first_model_has_the_aims_it_was_given() -> None:
    ids = torch.zeros(512, 2, dtype=torch.int32)
    inputs = gpu_experts.Inputs(torch.zeros(512, 7168), ids, torch.ones(512, 2))
    whole, kernel = gpu_experts.results(
        gpu_experts.Case("deepseek-v3", "bf16", (512,)), inputs, {"whole": 1300.0, "kernel": 1290.0}, {}
    )
    assert (whole.bench, whole.aim, kernel.aim) == ("gpu_experts", gpu_experts.AIMS["bf16"][512], None)
    assert gpu_experts.compile_tasks(gpu_experts.Case("deepseek-v3", "fp8", (1, 512)), False) == [
        (gpu_experts.Case("deepseek-v3", "fp8", (1, 512)), gpu_experts.OURS)
    ]
