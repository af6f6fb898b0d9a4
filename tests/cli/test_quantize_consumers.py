"""What `moeserve quantize` writes is read by those whose format it is: compressed-tensors, transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoints import experts_of, make_checkpoint
from safetensors.torch import load_file
from torch import Tensor

from moeserve.checkpoints.checkpoint import Checkpoint
from moeserve.checkpoints.writing.targets import TARGETS
from moeserve.cli import main

compressed_tensors = pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")

MISREAD = {
    "fp8_block": "multiplies codes with block scales as they are, and fails",
    "nvfp4": "leaves out the global scale of experts, and does not say so",
    "mxfp8": "fails as for fp8_block",
    "int8": "knows integer experts only as packed ones, and fails",
    "int4_asym": "knows no zero points of experts, and fails",
}
"""What transformers 5.23 makes of experts in these formats, llm-compressor's own files included."""

SIDES = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}


def written(form: str, family: str, path: Path) -> Path:
    sizes = {"hidden": 128, "inner": 128, "experts": 2, "layers": 1}
    make_checkpoint(family, path / "source", dtype=torch.bfloat16, **sizes)
    assert main(["quantize", str(path / "source"), str(path / "written"), "--to", form, "--quiet"]) == 0
    return path / "written"


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("form", TARGETS)
def test_compressed_tensors_decodes_the_same_values(form: str, family: str, tmp_path: Path) -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    path = written(form, family, tmp_path)
    checkpoint = Checkpoint(path)
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    (scheme,) = QuantizationConfig.model_validate(config).config_groups.values()
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    modules: dict[str, dict[str, Tensor]] = {}
    for name, tensor in load_file(next(path.glob("*.safetensors"))).items():
        module, _, suffix = name.rpartition(".")
        if ".experts." in module:
            modules.setdefault(module, {})[suffix] = tensor
    assert len(modules) == 6
    for module, stored in modules.items():
        expert, side = int(module.split(".")[-2]), SIDES[module.split(".")[-1]]
        weights = checkpoint.experts(0, [expert])
        gate, up = weights.gate_up.dequantize()[0].chunk(2)
        ours = {"gate": gate, "up": up, "down": weights.down.dequantize()[0]}[side]
        if stored["weight_scale"].dtype == torch.bfloat16:  # else it would round the product to bfloat16
            stored["weight_scale"] = stored["weight_scale"].float()
        theirs = compressor.decompress(stored, scheme)["weight"]
        assert torch.equal(ours.to(theirs.dtype), theirs)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("form", sorted(TARGETS.keys() - MISREAD.keys()))
def test_transformers_computes_with_the_same_experts(form: str, family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    path = written(form, family, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    weights = Checkpoint(path).experts(0, range(2))
    for theirs, ours in zip(experts_of(model, 0), (weights.gate_up, weights.down), strict=True):
        assert torch.equal(theirs, ours.dequantize().bfloat16())
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "source", dtype=torch.bfloat16).eval()
    for place, ours in zip(experts_of(reference, 0), (weights.gate_up, weights.down), strict=True):
        place.copy_(ours.dequantize())
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, reference(tokens).logits)
