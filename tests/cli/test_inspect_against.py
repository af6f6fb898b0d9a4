"""`moeserve inspect`: groups and excluded modules by the config; `--against`: errors by the bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint, rewrite
from quantized import PRODUCERS, write

from moeserve.checkpoints.checkpoint import Checkpoint
from moeserve.checkpoints.fidelity import layer_error
from moeserve.cli import main
from moeserve.cli.shown.inspect_excluded import brief, excluded_modules

SMALL = {"hidden": 64, "inner": 64, "experts": 3, "layers": 2}


@pytest.fixture
def reference(tmp_path: Path) -> Path:
    make_checkpoint("qwen3_moe", tmp_path / "reference", dtype=torch.bfloat16, **SMALL)
    return tmp_path / "reference"


def scaled(path: Path, factors: dict[str, float]) -> Path:
    """The same model with the tensors named in part by a key of `factors` larger by its value."""
    make_checkpoint("qwen3_moe", path, dtype=torch.bfloat16, **SMALL)
    rewrite(
        path,
        lambda tensors: {
            name: (tensor * (1 + sum(f for part, f in factors.items() if part in name))).to(tensor.dtype)
            for name, tensor in tensors.items()
        },
    )
    return path


def test_errors_are_those_of_each_layer_and_side(
    reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = scaled(
        tmp_path / "other",
        {"layers.0.mlp.experts.1.down": 0.5, "layers.1.mlp.experts.2.gate": 1.0},
    )
    assert main(["inspect", str(other), "--against", str(reference), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["against"]
    first, second = found["layers"]
    assert first["gate_up"] == {"mean": 0, "max": 0, "worst": 0}
    assert first["down"] == {
        "mean": pytest.approx(0.5 / 3, rel=0.01),
        "max": pytest.approx(0.5, rel=0.01),
        "worst": 1,
    }
    weights = Checkpoint(reference).experts(1, [2]).gate_up.dequantize()
    assert second["gate_up"]["max"] == pytest.approx(float(weights[:, :64].norm() / weights.norm()))
    assert second["gate_up"]["worst"] == 2
    assert found["max"] == second["gate_up"]["max"]
    assert found["mean"] == pytest.approx((first["down"]["mean"] + second["gate_up"]["mean"]) / 4)


def test_the_table_has_a_row_a_layer_and_one_of_all(
    reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "written"
    assert main(["quantize", str(reference), str(written), "--to", "mxfp4", "--quiet"]) == 0
    assert main(["inspect", str(written), "--against", str(reference)]) == 0
    lines = capsys.readouterr().out.splitlines()
    start = lines.index(f"relative error against {reference}")
    assert lines[start + 1].split() == [
        "layer",
        "gate_up",
        "mean",
        "max",
        "worst",
        "expert",
        "down",
        "mean",
        "max",
        "worst",
        "expert",
    ]
    rows = [line.split() for line in lines[start + 2 :]]
    assert [row[0] for row in rows] == ["0", "1", "all"]
    expected = layer_error(Checkpoint(written), Checkpoint(reference), 1)
    assert rows[1][1:3] == [f"{expected.gate_up.mean:.4g}", f"{expected.gate_up.max:.4g}"]
    assert 0.05 < expected.down.max < 0.15


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"experts": 4}, "experts 3, there 4"),
        ({"layers": 3}, "layers (0, 1), there (0, 1, 2)"),
        ({"hidden": 128}, "H 64, there 128"),
        ({"inner": 32}, "I 64, there 32"),
    ],
)
def test_another_model_is_named(
    other: dict[str, int], said: str, reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_checkpoint("qwen3_moe", tmp_path / "other", dtype=torch.bfloat16, **(SMALL | other))
    assert main(["inspect", str(reference), "--against", str(tmp_path / "other")]) == 2
    captured = capsys.readouterr()
    assert said in captured.err and captured.out == ""


def test_no_checkpoint_to_compare_with(reference: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(reference), "--against", str(reference / "nowhere")]) == 2
    assert "cannot read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("producer", "group", "excluded"),
    [
        ("ct FP8_BLOCK", "128x128", "lm_head, model.layers.0.mlp.gate, re:.*self_attn.*"),
        ("ct NVFP4", "1x16", "lm_head, model.layers.0.mlp.gate, re:.*self_attn.*"),
        ("ct FP8_DYNAMIC", "row", "lm_head, model.layers.0.mlp.gate, re:.*self_attn.*"),
        ("modelopt NVFP4 nested", "1x16", "lm_head"),
        ("gptq", "1x128", "none"),
    ],
)
def test_groups_and_excluded_modules_are_shown(
    producer: str, group: str, excluded: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, PRODUCERS[producer])
    assert main(["inspect", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"excluded      {excluded}" in lines
    header = next(line for line in lines if line.startswith("layers"))
    row = next(line for line in lines if line.startswith("0-1"))
    assert row[header.index("group") :].split()[0] == group


@pytest.mark.parametrize(
    ("quantization", "entries"),
    [
        (None, []),
        ({"modules_to_not_convert": ["a"], "ignored_layers": None}, ["a"]),
        ({"ignored_layers": ["a", "b"], "modules_to_not_convert": ["b", "c"]}, ["a", "b", "c"]),
        ({"quantization": {"exclude_modules": ["lm_head"]}}, ["lm_head"]),
        ({"exclude": ["re:.*gate$"]}, ["re:.*gate$"]),
        ({"dynamic": {"-:.*attn": {}, "+:.*mlp": {"bits": 8}}}, ["-:.*attn"]),
    ],
)
def test_excluded_modules_by_the_names_of_all_producers(
    quantization: dict[str, Any] | None, entries: list[str]
) -> None:
    assert excluded_modules(quantization) == entries


def test_excluded_modules_that_differ_in_numbers_are_one() -> None:
    gates = [f"model.layers.{layer}.mlp.gate" for layer in range(61)]
    assert (
        brief(["lm_head", *gates, "model.layers.0.x"])
        == "lm_head, model.layers.N.mlp.gate (61), model.layers.0.x"
    )
    assert brief([f"module{letter}" for letter in "abcdefghijklmnop"]).endswith("modulel, and 4 more")
