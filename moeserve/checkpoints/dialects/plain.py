"""Unquantized checkpoints: one tensor a projection, in the model's dtype or cast to it."""

from __future__ import annotations

import torch

from moeserve.checkpoints.dialects.dialect import Dialect, Quantization, Settings, Storage
from moeserve.checkpoints.names import LayerNames
from moeserve.checkpoints.store import CheckpointError
from moeserve.checkpoints.stored import StoredTensor
from moeserve.quant.format import Scheme
from moeserve.quant.formats.floats import FLOATS


def _claims(quantization: Quantization) -> bool:
    return quantization is None


def plain_storage(_: Settings, dtype: torch.dtype, __: LayerNames) -> Storage:
    """Returns the storage of weights and activations in the model's `dtype`; other floats are cast to it."""
    if dtype not in FLOATS:
        raise CheckpointError(f"unquantized experts must be {', '.join(map(str, FLOATS))}, found {dtype}")
    others = (other for other in FLOATS if other != dtype)
    return Storage(Scheme(FLOATS[dtype], FLOATS[dtype]), (StoredTensor("weight", (dtype, *others)),))


ENTRY = Dialect("plain", "no quantization_config", _claims, plain_storage)
