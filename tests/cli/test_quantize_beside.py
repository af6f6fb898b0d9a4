"""`moeserve quantize`: what stands beside the served experts is copied, decoded, or refused by its name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint, quantize_fp8_block, rewrite
from safetensors.torch import load_file
from torch import Tensor

from moeserve.cli import main
from moeserve.quant.formats.fp8 import FP8_BLOCK

WEIGHT = "model.layers.0.self_attn.q_proj.weight"
SCALE = f"{WEIGHT}_scale_inv"
STACKED = "model.layers.7.mlp.experts.gate_up_proj"  # beyond the depth: of a layer that predicts tokens
Tensors = dict[str, Tensor]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkpoint with experts in FP8 blocks, and with a matrix of its attention in them."""
    path = tmp_path / "source"
    sizes = {"hidden": 256, "inner": 128, "experts": 2, "layers": 1}
    make_checkpoint("qwen3_moe", path, dtype=torch.bfloat16, **sizes)
    quantize_fp8_block(path)
    codes, scale = FP8_BLOCK.quantize(load_file(path / "model.safetensors")[WEIGHT].float()).parts
    rewrite(path, lambda tensors: tensors | {WEIGHT: codes, SCALE: scale})
    return path


def written(source: Path, to: Path) -> Tensors:
    assert main(["quantize", str(source), str(to), "--to", "mxfp4", "--quiet"]) == 0
    (file,) = to.glob("*.safetensors")
    return load_file(file)


def stacked_fp8(_: Tensors) -> Tensors:
    parts = [FP8_BLOCK.quantize(matrix).parts for matrix in torch.randn(2, 256, 256)]
    codes, scales = (torch.stack(tensors) for tensors in zip(*parts, strict=True))
    return {STACKED: codes, f"{STACKED}_scale_inv": scales}


def packed(_: Tensors) -> Tensors:
    stem = "model.layers.0.self_attn.k_proj"
    return {
        f"{stem}.weight_packed": torch.zeros(8, 8, dtype=torch.int32),
        f"{stem}.weight_scale": torch.ones(8),
    }


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (stacked_fp8, f"quantizes more than its experts, as {STACKED}_scale_inv;"),
        (packed, "quantizes more than its experts, as model.layers.0.self_attn.k_proj.weight_"),
        (
            lambda t: {f"{WEIGHT}_scale_2": torch.ones(1)},
            f"quantizes more than its experts, as {WEIGHT}_scale_2",
        ),
        (
            lambda t: {SCALE: torch.tensor(1.0)},
            f"tensor {SCALE} must be F32 or BF16 or F8_E8M0 [2, 2], found F32 []",
        ),
        (
            lambda t: {SCALE: t[SCALE][:1]},
            f"tensor {SCALE} must be F32 or BF16 or F8_E8M0 [2, 2], found F32 [1, 2]",
        ),
        (
            lambda t: {SCALE: t[SCALE].int()},
            f"tensor {SCALE} must be F32 or BF16 or F8_E8M0 [2, 2], found I32",
        ),
        (lambda t: {WEIGHT: t[WEIGHT].bfloat16()}, f"tensor {WEIGHT} must be F8_E4M3 [256, 256], found BF16"),
        (
            lambda t: {SCALE: t[SCALE] * torch.nan},
            f"scale {SCALE} must be finite and not negative, found nan",
        ),
        (lambda t: {SCALE: -t[SCALE]}, f"scale {SCALE} must be finite and not negative, found -"),
    ],
)
def test_fp8_that_is_not_decoded_is_refused_by_its_name(
    change: Callable[[Tensors], Tensors],
    said: str,
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rewrite(source, lambda tensors: tensors | change(tensors))
    assert main(["quantize", str(source), str(tmp_path / "written"), "--to", "mxfp4", "--quiet"]) == 2
    assert said in capsys.readouterr().err
    assert not list((tmp_path / "written").glob("*.safetensors"))


def test_what_is_only_called_a_scale_is_copied(source: Path, tmp_path: Path) -> None:
    """Names of DeepSeek-V4, Gemma 4, Inkling and Zaya: parameters of modules that nobody quantized."""
    names = (
        "model.layers.0.hc_attn_scale",
        "model.hc_head_scale",
        "model.layers.0.mlp.gate.per_expert_scale",
        "model.layers.0.mlp.gate.global_scale",
        "model.layers.0.self_attn.q_clip.scale",
        "model.layers.0.input_hidden_states_scale",
    )
    added = {name: torch.full((3,), float(place)) for place, name in enumerate(names)}
    rewrite(source, lambda tensors: tensors | added)
    found = written(source, tmp_path / "written")
    assert all(torch.equal(found[name], tensor) for name, tensor in added.items())
    assert found[WEIGHT].dtype == torch.bfloat16 and SCALE not in found


def test_chat_templates_are_copied_and_other_folders_are_not(source: Path, tmp_path: Path) -> None:
    for folder in ("additional_chat_templates", "original"):
        (source / folder).mkdir()
        (source / folder / "tool_use.jinja").write_text("{{ messages }}")
    written(source, tmp_path / "written")
    copied = tmp_path / "written" / "additional_chat_templates" / "tool_use.jinja"
    assert copied.read_text() == "{{ messages }}"
    assert not (tmp_path / "written" / "original").exists()
