"""gpt-oss' MXFP4: stacked `_blocks` `[E, N, K/32, 16]` bytes and `_scales` `[E, N, K/32]`, experts only.

Gate and up rows are interleaved, as in the unquantized family; unlike there, nothing is transposed.
Activations stay in the model's dtype.
"""

from __future__ import annotations

import torch

from moeserve.checkpoints.dialects.dialect import Dialect, Quantization, Settings, Storage
from moeserve.checkpoints.dialects.fp8_block import skips
from moeserve.checkpoints.names import LayerNames
from moeserve.checkpoints.stored import StoredMatrix, StoredTensor
from moeserve.quant.format import Parts, Scheme
from moeserve.quant.formats.floats import FLOATS
from moeserve.quant.formats.mx import MXFP4

BYTES = (torch.uint8,)
BLOCKS = StoredTensor("blocks", BYTES, 1, 32, (("n", "k", 16),))
SCALES = StoredTensor("scales", BYTES, 1, 32, scale=True)


def _claims(quantization: Quantization) -> bool:
    return quantization is not None and quantization.get("quant_method") == "mxfp4"


def _parts(matrix: StoredMatrix) -> Parts:
    return matrix.read(BLOCKS).flatten(-2), matrix.read(SCALES)


def _storage(_: Settings, dtype: torch.dtype, __: LayerNames) -> Storage:
    return Storage(Scheme(MXFP4, FLOATS[dtype]), (BLOCKS, SCALES), _parts, turns=False)


ENTRY = Dialect(
    name="mxfp4_blocks",
    reads="quant_method mxfp4",
    claims=_claims,
    storage=_storage,
    skips=skips,
)
