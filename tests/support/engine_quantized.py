"""Checkpoints with quantized experts for real engines, and what they must answer."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from checkpoints import rewrite
from engine_models import (
    NUDGE,
    Rounding,
    apart,
    bound_by_codes,
    bound_by_float32,
    by_transformers,
    prompts,
)
from engine_runs import NEW_TOKENS, REQUESTS, Run, answered, answered_behind
from in_process import InProcess
from torch import Tensor

from moeserve.checkpoints.checkpoint import Checkpoint
from moeserve.cli import main


def write_quantized(source: Path, to: Path, form: str) -> None:
    """Writes `source` with its experts in `form`, as `moeserve quantize` does, and its tokenizer."""
    assert main(["quantize", str(source), str(to), "--to", form, "--quiet"]) == 0
    for extra in ("tokenizer.json", "tokenizer_config.json"):
        if not (to / extra).exists():
            shutil.copy(source / extra, to / extra)


def write_decoded(source: Path, quantized: Path, to: Path) -> None:
    """Copies `source` with the numbers that the experts of `quantized` mean, in float32."""
    checkpoint = Checkpoint(quantized)
    own: dict[str, Tensor] = {}
    for layer in checkpoint.layers:
        held = checkpoint.experts(layer, range(checkpoint.num_experts))
        gate_up, down = held.gate_up.dequantize(), held.down.dequantize()
        for expert in range(checkpoint.num_experts):
            stem = f"model.layers.{layer}.mlp.experts.{expert}"
            gate, up = gate_up[expert].chunk(2)
            own |= {f"{stem}.gate_proj.weight": gate, f"{stem}.up_proj.weight": up}
            own[f"{stem}.down_proj.weight"] = down[expert]
    shutil.copytree(source, to)

    def replaced(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        assert own.keys() <= tensors.keys()
        return tensors | {name: tensor.float().clone() for name, tensor in own.items()}

    rewrite(to, replaced)


def assert_as_what_they_mean(
    run: Run, options: dict[str, Any], source: Path, folder: Path, form: str
) -> None:
    """Asserts that an engine in bf16 behind a service of `source` with its experts in `form` answers as the
    engine alone, in float32, on what the weights mean.

    How far bf16 brings the engine alone from that bounds how far it may be. The check must notice what it is
    for: weights that are not quantized are beyond the bound. folder: where checkpoints are written to.
    """
    write_quantized(source, folder / form, form)
    write_decoded(source, folder / form, folder / "decoded")
    alone = answered(run, folder / "decoded", None, options=options)["rounds"][0]
    exact = answered(run, folder / "decoded", None, options=options | {"dtype": "float32"})["rounds"][0]
    found = answered_behind(run, folder / form, options=options)["rounds"][0]
    bound, right = bound_by_float32(apart(alone, exact)), apart(found, exact)
    unquantized = apart(by_transformers(source, prompts(REQUESTS), NEW_TOKENS), exact)
    print(
        f"{form}: {right.most:.2g} ({right.mean:.2g}), bound {bound.most:.2g} ({bound.mean:.2g}), "
        f"not quantized {unquantized.most:.2g} ({unquantized.mean:.2g})"
    )
    assert right.within(bound), right
    assert not unquantized.within(bound), "what the format does to weights would not be seen"


def assert_as_with_rounding(found: dict[str, Any], source: Path, quantized: Path) -> None:
    """Asserts that an engine's answers are those of transformers whose experts round as `quantized` says.

    The check must notice what it is for: experts that do not round activations are beyond its bound.
    """
    asked = prompts(REQUESTS)
    expected, nudged = (
        by_transformers(source, asked, NEW_TOKENS, Rounding(quantized, nudge=nudge)) for nudge in (0.0, NUDGE)
    )
    bound = bound_by_codes(apart(nudged, expected))
    told = apart(found["rounds"][0], expected)
    plain = apart(by_transformers(source, asked, NEW_TOKENS, InProcess(quantized)), expected)
    print(
        f"{quantized.name}: {told.most:.2g} ({told.mean:.2g}), bound {bound.most:.2g} ({bound.mean:.2g}), "
        f"without rounding {plain.most:.2g} ({plain.mean:.2g}), ties {told.ties}"
    )
    assert told.within(bound), told
    assert not plain.within(bound), plain
