"""Quantizes a source with GPTQModel: GPTQ in both formats and orders, and AWQ.

    GPTQMODEL_CPU_WORKERS=2 python gptq_model.py SOURCE OUT [RECIPE ...]

Writes `OUT / <source>-gm_<recipe>`. Needs gptqmodel 7.7.0 and torch. A recipe that fails is reported, and the
others go on.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from gptqmodel import GPTQModel, QuantizeConfig

RECIPES: dict[str, dict[str, Any]] = {
    "g128": {"bits": 4, "group_size": 128},
    "g32": {"bits": 4, "group_size": 32},
    "g64_order": {"bits": 4, "group_size": 64, "desc_act": True, "act_group_aware": False},
    "g32_aware": {"bits": 4, "group_size": 32, "desc_act": False, "act_group_aware": True},
    "channel": {"bits": 4, "group_size": -1},
    "g32_asym": {"bits": 4, "group_size": 32, "sym": False},
    "g32_asym_order": {"bits": 4, "group_size": 32, "sym": False, "desc_act": True, "act_group_aware": False},
    "g32_v2": {"bits": 4, "group_size": 32, "format": "gptq_v2"},
    "g32_v2_asym": {"bits": 4, "group_size": 32, "sym": False, "format": "gptq_v2"},
    "b8": {"bits": 8, "group_size": 128},
    "b8_g32": {"bits": 8, "group_size": 32},
    "b8_channel": {"bits": 8, "group_size": -1},
    "b8_order": {"bits": 8, "group_size": 32, "desc_act": True, "act_group_aware": False},
    "b8_asym": {"bits": 8, "group_size": 32, "sym": False},
    "b3": {"bits": 3, "group_size": 32},
    "g16": {"bits": 4, "group_size": 16},
    "dynamic": {"bits": 4, "group_size": 32, "dynamic": {"-:.*layers\\.0\\..*": {}}},
    "awq": {"bits": 4, "group_size": 128, "method": "awq", "format": "gemm", "sym": False},
    "awq_g32": {"bits": 4, "group_size": 32, "method": "awq", "format": "gemm", "sym": False},
    "awq_gemv": {"bits": 4, "group_size": 32, "method": "awq", "format": "gemv", "sym": False},
}
"""Keys of QuantizeConfig by recipe."""


def make(source: Path, out: Path, name: str) -> None:
    """Writes one recipe's checkpoint."""
    torch.manual_seed(0)
    tokens = torch.Generator().manual_seed(0)
    rows = [torch.randint(5, 250, (128,), generator=tokens).tolist() for _ in range(64)]
    model = GPTQModel.load(str(source), QuantizeConfig(device="cpu", pack_impl="original", **RECIPES[name]))
    model.quantize([{"input_ids": row, "attention_mask": [1] * len(row)} for row in rows], batch_size=4)
    model.save(str(out / f"{source.name}-gm_{name}"))


if __name__ == "__main__":
    for each in sys.argv[3:] or RECIPES:
        try:
            make(Path(sys.argv[1]), Path(sys.argv[2]), each)
            print("OK", each, flush=True)
        except Exception as error:
            print("FAIL", each, type(error).__name__, str(error)[:300], flush=True)
            traceback.print_exc(limit=-3)
