"""Quantizes a source with NVIDIA's ModelOpt: every named config that it exports to Hugging Face files.

    python model_optimizer.py SOURCE OUT [CONFIG ...]

Writes `OUT / <source>-mo_<config>`, the config's name in lower case without `_CFG`. Needs nvidia-modelopt[hf]
0.47.0 (transformers 5.14.1) and torch 2.13.0. A config that fails is reported, and the others go on.
"""

from __future__ import annotations

import copy
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer

NAMED: Mapping[str, Any] = {
    name.removesuffix("_CFG").lower(): getattr(mtq, name) for name in dir(mtq) if name.endswith("_CFG")
}


def calibrate(model: torch.nn.Module) -> None:
    """Shows the model random tokens."""
    source = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _ in range(8):
            model(input_ids=torch.randint(5, 250, (8, 64), generator=source))


def make(source: Path, out: Path, name: str) -> None:
    """Writes one config's checkpoint."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).eval()
    model = mtq.quantize(model, copy.deepcopy(NAMED[name]), calibrate)
    target = out / f"{source.name}-mo_{name}"
    export_hf_checkpoint(model, export_dir=target)
    AutoTokenizer.from_pretrained(source).save_pretrained(target)


if __name__ == "__main__":
    for each in sys.argv[3:] or NAMED:
        try:
            make(Path(sys.argv[1]), Path(sys.argv[2]), each)
            print("OK", each, flush=True)
        except Exception as error:
            print("FAIL", each, type(error).__name__, str(error)[:300], flush=True)
            traceback.print_exc(limit=-3)
