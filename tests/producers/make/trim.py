"""Cuts producers' checkpoints to test data: experts and routers only, every config file as it was written.

    python trim.py MADE SOURCES

MADE and SOURCES are the folders that the other scripts here wrote to. Writes `<dialect>-<name>/` above this
folder for each of `SHIPPED`, and `errors.json`: how far each is from its source, by
`bench/numbers/formulas.py`.
"""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

HERE = Path(__file__).resolve().parent.parent
ROOT = HERE.parent.parent
CONFIGS = ("config.json", "hf_quant_config.json", "quantize_config.json")

SHIPPED: dict[str, str] = {
    "plain-mixtral": "mixtral",
    "plain-qwen3": "square",
    "plain-gpt_oss": "gptoss",
    "plain-uneven": "uneven",
    "compressed_tensors-fp8": "mixtral-ct_fp8",
    "compressed_tensors-fp8_block": "square-ct_fp8_block",
    "compressed_tensors-fp8_edges": "uneven-ct_fp8_block",
    "compressed_tensors-int8": "mixtral-ct_w8a8",
    "compressed_tensors-int8_zeros": "square-ct_w8a16_asym",
    "compressed_tensors-int4_zeros": "mixtral-ct_w4a16_g32_asym",
    "compressed_tensors-w4afp8": "square-ct_w4afp8",
    "compressed_tensors-nvfp4": "mixtral-ct_nvfp4",
    "compressed_tensors-mxfp4": "mixtral-ct_mxfp4",
    "modelopt-fp8": "square-mo_fp8_default",
    "modelopt-fp8_one_block": "square-mo_fp8_2d_blockwise_weight_only",
    "modelopt-nvfp4": "square-mo_nvfp4_default",
    "modelopt-mxfp4": "square-mo_mxfp4_default",
    "gptq-order": "square-gm_g64_order",
    "gptq-order_8_bits": "square-gm_b8_order",
    "gptq-v2_zeros": "square-gm_g32_v2_asym",
    "awq-gemm": "square-gm_awq_g32",
    "fp8_block-beside": "square-tf_fp8_block",
    "mxfp4_blocks-gpt_oss": "gptoss-mo_blocks",
    "quark-mxfp4": "square-qk_mxfp4",
    "quark-mxfp6": "square-qk_mxfp6_e3m2",
    "fp8_tensor-static": "square-qk_fp8_file",
}
"""Folder of test data -> checkpoint that a producer wrote; the part before the first dash is the dialect."""


def trim(made: Path, target: Path) -> None:
    """Writes the experts and routers of `made`, and its configs."""
    target.mkdir(exist_ok=True)
    tensors = {}
    for file in sorted(made.glob("*.safetensors")):
        found = load_file(file)
        tensors |= {
            n: t for n, t in found.items() if ".experts." in n or n.endswith(("gate.weight", "router.weight"))
        }
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    for name in CONFIGS:
        if (made / name).is_file():
            shutil.copyfile(made / name, target / name)


def error(target: Path, source: Path) -> dict[str, Any]:
    """Relative error of every matrix against the source's, norm over norm: the mean and the largest."""
    formulas = importlib.import_module("bench.numbers.formulas")
    found = []
    for ours, truth in zip(formulas.experts(target), formulas.experts(source), strict=True):
        for values, true in ((ours.gate_up, truth.gate_up), (ours.down, truth.down)):
            found.append(((values - true).norm() / true.norm()).item())
    return {"source": source.name, "mean": round(sum(found) / len(found), 6), "max": round(max(found), 6)}


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    folders = [Path(argument) for argument in sys.argv[1:]]
    plain = {made: name for name, made in SHIPPED.items() if name.startswith("plain-")}
    errors = {}
    for name, made in SHIPPED.items():
        trim(next(folder / made for folder in folders if (folder / made).is_dir()), HERE / name)
    for name, made in SHIPPED.items():
        errors[name] = error(HERE / name, HERE / plain[made.split("-")[0]])
        print(name, errors[name])
    (HERE / "errors.json").write_text(json.dumps(errors, indent=1) + "\n")
