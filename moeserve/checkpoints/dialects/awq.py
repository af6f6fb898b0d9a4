"""AWQ (gemm): 4-bit integers packed along N in int32 words `[K, N / 8]`, interleaved, with zero points."""

from __future__ import annotations

import torch

from moeserve.checkpoints.dialects.dialect import Dialect, Quantization, Settings, Storage
from moeserve.checkpoints.dialects.forms import FLOAT_SCALES
from moeserve.checkpoints.dialects.words import unpacked
from moeserve.checkpoints.names import LayerNames
from moeserve.checkpoints.store import CheckpointError
from moeserve.checkpoints.stored import INPUT_MAJOR, StoredMatrix, StoredTensor
from moeserve.quant.format import Parts, Scheme
from moeserve.quant.formats.floats import FLOATS
from moeserve.quant.formats.int4 import INT4_ASYMMETRIC
from moeserve.quant.layouts.awq import AWQ

WORDS = (torch.int32,)
KEYS = {
    "bits": ("bits", "w_bit"),
    "group_size": ("group_size", "q_group_size"),
    "zero_point": ("zero_point",),
}


def _claims(quantization: Quantization) -> bool:
    if quantization is None:
        return False
    if quantization.get("quant_method") is None:
        return "zero_point" in quantization
    return bool(quantization["quant_method"] == "awq")


def _required(settings: Settings) -> tuple[int, int]:
    """Returns bits and group size. Raises CheckpointError for a missing key or an unsupported value."""
    found = {}
    for key, spellings in KEYS.items():
        values = [settings[name] for name in spellings if settings.get(name) is not None]
        if not values:
            raise CheckpointError(f"AWQ's config needs {' or '.join(spellings)}")
        found[key] = values[0]
    version = str(settings.get("version") or "gemm").lower()
    groups = ", ".join(map(str, INT4_ASYMMETRIC))
    for key, value, holds, accepted in (
        ("bits", found["bits"], found["bits"] == 4, "4"),
        ("version", version, version == "gemm", "'gemm'"),
        ("zero_point", found["zero_point"], found["zero_point"] is True, "True"),
        ("group_size", found["group_size"], found["group_size"] in INT4_ASYMMETRIC, groups),
    ):
        if not holds:
            raise CheckpointError(f"AWQ with {key}={value!r} is not supported, only {accepted}")
    return found["bits"], found["group_size"]


def _skips(settings: Settings, names: LayerNames) -> bool:
    """Whether the layer is listed; entries are parts of module names.

    Raises CheckpointError where some projections of a layer are listed and others are not.
    """
    listed = settings.get("modules_to_not_convert") or []
    if any(entry in f"{names.module}.experts" for entry in listed):
        return True
    kept = [module for module in names.modules() if any(entry in module for entry in listed)]
    if kept and len(kept) < len(names.modules()):
        raise CheckpointError(
            f"modules_to_not_convert leaves out {kept[0]}, but not all of {names.module}.experts"
        )
    return bool(kept)


def _storage(settings: Settings, dtype: torch.dtype, _: LayerNames) -> Storage:
    bits, group = _required(settings)
    each = 32 // bits
    codes = StoredTensor("qweight", WORDS, each, 1, INPUT_MAJOR)
    scale = StoredTensor("scales", FLOAT_SCALES, 1, group, INPUT_MAJOR, scale=True)
    zero = StoredTensor("qzeros", WORDS, each, group, INPUT_MAJOR)

    scheme = Scheme(INT4_ASYMMETRIC[group], FLOATS[dtype])

    def parts(matrix: StoredMatrix) -> Parts:
        found = {tensor.suffix: matrix.read(tensor).mT for tensor in (codes, zero)}
        found["scales"] = matrix.read(scale).float().mT
        return unpacked(AWQ, found, scheme.weights, matrix.size)

    return Storage(scheme, (codes, scale, zero), parts, turns=False)


ENTRY = Dialect(
    name="awq",
    reads="quant_method awq with 4 bits, version gemm and zero_point",
    claims=_claims,
    storage=_storage,
    skips=_skips,
)
