"""The table of how checkpoints store projections, `DIALECTS`, beside that of model families, `FAMILIES`.

The two are independent: a quantized model is a family and a dialect.
"""

from __future__ import annotations

from moeserve.checkpoints.dialects import (
    awq,
    compressed_tensors,
    deepseek_fp4,
    fp8_block,
    fp8_tensor,
    gptq,
    modelopt,
    mxfp4_blocks,
    plain,
    quark,
)
from moeserve.checkpoints.dialects.dialect import Dialect, Quantization
from moeserve.checkpoints.families import FAMILIES, ModelFamily, family_of
from moeserve.checkpoints.store import CheckpointError

DIALECTS: dict[str, Dialect] = {
    entry.name: entry
    for entry in (
        plain.ENTRY,
        fp8_block.ENTRY,
        fp8_tensor.ENTRY,
        compressed_tensors.ENTRY,
        modelopt.ENTRY,
        mxfp4_blocks.ENTRY,
        gptq.ENTRY,
        awq.ENTRY,
        deepseek_fp4.ENTRY,
        quark.ENTRY,
    )
}
"""The table of dialects by name; a new one is one file and one line here. Exactly one claims a config."""


def dialect_for(quantization: Quantization) -> Dialect:
    """Returns the dialect that claims a model's quantization config.

    Raises CheckpointError, with what is supported, where none does.
    """
    claiming = [entry for entry in DIALECTS.values() if entry.claims(quantization)]
    if len(claiming) == 1:
        return claiming[0]
    if claiming:
        names = ", ".join(entry.name for entry in claiming)
        raise CheckpointError(f"dialects {names} all claim the quantization config {quantization}")
    method = (quantization or {}).get("quant_method")
    supported = "; ".join(entry.reads for entry in DIALECTS.values())
    raise CheckpointError(
        f"quantization quant_method={method!r} is not supported as configured; supported: {supported}"
    )


__all__ = ["DIALECTS", "FAMILIES", "Dialect", "ModelFamily", "dialect_for", "family_of"]
