"""Checkpoints of Qwen3-MoE's shape that hold nothing but experts, for benchmarks to serve."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


@dataclass(frozen=True)
class Qwen3Moe:
    """The sizes of a Qwen3-MoE model. What attention would need is not there, and not read."""

    hidden: int
    inner: int
    experts: int
    top_k: int
    layers: int

    def config(
        self, dtype: str = "bfloat16", quantization: Mapping[str, object] | None = None
    ) -> dict[str, object]:
        """The checkpoint's config.json. quantization: its `quantization_config`; None leaves the key out."""
        config: dict[str, object] = {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "dtype": dtype,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "moe_intermediate_size": self.inner,
            "num_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "num_hidden_layers": self.layers,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
        return config if quantization is None else config | {"quantization_config": dict(quantization)}

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """The shapes [N, K] of an expert's matrices, by `gate`, `up` and `down`."""
        wide = (self.inner, self.hidden)
        return {"gate": wide, "up": wide, "down": (self.hidden, self.inner)}

    def matrices(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """Names of all experts' weights and their shapes: by layer, expert and projection."""
        for layer in range(self.layers):
            for expert in range(self.experts):
                for name, shape in self.projections.items():
                    yield f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight", shape


def write_checkpoint(folder: Path, config: Mapping[str, object], tensors: Mapping[str, Tensor]) -> None:
    """Writes config.json, and all tensors into one file. The folder is there already."""
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(tensors), folder / "model.safetensors", {"format": "pt"})
