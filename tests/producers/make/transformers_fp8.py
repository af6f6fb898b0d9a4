"""Quantizes a source with transformers' own FineGrainedFP8Config, and writes it with `save_pretrained`.

    python transformers_fp8.py SOURCE OUT [RECIPE ...]

Writes `OUT / <source>-tf_<recipe>`. Needs transformers 5.23.0, accelerate and torch 2.13.0. The quantizer
asks for a GPU, which only its matrix products need: the question is left out. A recipe that fails is
reported, and the others go on.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, FineGrainedFP8Config
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

RECIPES: dict[str, dict[str, object]] = {
    "fp8_block": {},
    "fp8_block_ue8m0": {"scale_fmt": "ue8m0"},
    "fp8_tensor": {"weight_block_size": None},
    "fp8_static": {"activation_scheme": "static"},
}
"""Keys of the quantizer's config by recipe; static scales stay at 1, as nothing calibrates them."""


def make(source: Path, out: Path, name: str) -> None:
    """Writes one recipe's checkpoint."""
    config = FineGrainedFP8Config(**RECIPES[name])
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16, quantization_config=config)
    target = out / f"{source.name}-tf_{name}"
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source).save_pretrained(target)


def _no_question(_: object, *__: object, **___: object) -> None:
    """In place of asking whether there is a GPU."""


if __name__ == "__main__":
    FineGrainedFP8HfQuantizer.validate_environment = _no_question
    for each in sys.argv[3:] or RECIPES:
        try:
            make(Path(sys.argv[1]), Path(sys.argv[2]), each)
            print("OK", each, flush=True)
        except Exception as error:
            print("FAIL", each, type(error).__name__, str(error)[:300], flush=True)
            traceback.print_exc(limit=-3)
