"""Writes a gpt-oss source as MXFP4 blocks with the converter that NVIDIA publishes beside ModelOpt.

    python modelopt_gpt_oss.py EXAMPLE SOURCE OUT

EXAMPLE is the folder examples/gpt-oss of github.com/NVIDIA/Model-Optimizer, whose
`convert_oai_mxfp4_weight_only.py` does the work; nothing of it is shipped here. Writes
`OUT / <source>-mo_blocks`. Needs nvidia-modelopt[hf] 0.47.0 (transformers 5.14.1), peft and torch 2.13.0.
What else the folder's own modules import is for training, so its `utils` is left out.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def converter(example: Path) -> ModuleType:
    """The converter, without its neighbour that asks a hub for the method of a base model."""
    stand_in = ModuleType("utils")
    stand_in.get_original_huggingface_quant_method = None
    sys.modules["utils"] = stand_in
    sys.path.insert(0, str(example))
    return importlib.import_module("convert_oai_mxfp4_weight_only")


if __name__ == "__main__":
    script, source, out = map(Path, sys.argv[1:4])
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(source)
    converter(script).convert_and_save(model, tokenizer, str(out / f"{source.name}-mo_blocks"))
    print("OK", source.name)
