"""Quantizes a source with AMD Quark: OCP MX, FP8 and INT8, in its own files or as `quant_method` fp8.

    python amd_quark.py SOURCE OUT [RECIPE ...]

Writes `OUT / <source>-qk_<recipe>`. Needs amd-quark 0.13, torch 2.13.0 and transformers 5.17.0. A recipe that
fails is reported, and the others go on.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

import torch
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors
from quark.torch.utils.llm.model_preparation import preprocess_for_quantization
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

RECIPES: dict[str, tuple[str, str]] = {
    "mxfp4": ("mxfp4", "quark"),
    "mxfp6_e3m2": ("mxfp6_e3m2", "quark"),
    "mxfp6_e2m3": ("mxfp6_e2m3", "quark"),
    "fp8_file": ("fp8", "fp8"),
    "fp8": ("fp8", "quark"),
    "ptpc_fp8": ("ptpc_fp8", "quark"),
    "mxfp4_fp8": ("mxfp4_fp8", "quark"),
    "mxfp4_mxfp6_e2m3": ("mxfp4_mxfp6_e2m3", "quark"),
    "int8": ("int8", "quark"),
    "int4_fp8": ("int4_fp8", "quark"),
}
"""Scheme and export mode of each recipe."""


def make(source: Path, out: Path, name: str) -> None:
    """Writes one recipe's checkpoint."""
    scheme, mode = RECIPES[name]
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).eval()
    preprocess_for_quantization(model)  # else stacked experts stay as they are
    config = LLMTemplate.get(model.config.model_type).get_config(scheme=scheme)
    tokens = torch.randint(5, 250, (8, 64), generator=torch.Generator().manual_seed(0))
    quantizer = ModelQuantizer(config)
    model = quantizer.freeze(quantizer.quantize_model(model, DataLoader(tokens, batch_size=1)))
    target = out / f"{source.name}-qk_{name}"
    with torch.no_grad():
        export_safetensors(model, target, custom_mode=mode)
    AutoTokenizer.from_pretrained(source).save_pretrained(target)


if __name__ == "__main__":
    for each in sys.argv[3:] or RECIPES:
        try:
            make(Path(sys.argv[1]), Path(sys.argv[2]), each)
            print("OK", each, flush=True)
        except Exception as error:
            print("FAIL", each, type(error).__name__, str(error)[:300], flush=True)
            traceback.print_exc(limit=-3)
