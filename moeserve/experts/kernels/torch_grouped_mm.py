"""Plain-float experts on `torch.nn.functional.grouped_mm`: one call a GEMM for all slots; the CPU's default.

On sm90 and sm100 torch has one kernel for bf16 that takes the segments' ends from the device. Other GPUs
and dtypes get a loop inside torch that reads them on the host, which the token path forbids, so the entry
leaves them out. On a CPU torch loops over the segments in C++: MKL for float32, oneDNN for bf16 and fp16
(AVX512-BF16 where there is). Measured on two cores of an AMD EPYC with AVX512-BF16, 16 experts of 2048 x
1536 with 1, 4 and 64 rows each: weights `[e, N, K]` transposed by stride are as fast as a Python loop of
`torch.mm` or `linear` into one output, and up to 40 % faster than weights copied to `[e, K, N]`. So the
prepared layout is the canonical one, and no weight is copied.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moeserve.experts.batch import ExpertBatch, ExpertWeights, Grouping
from moeserve.experts.kernel import KernelEntry, KernelSpec, Prepared
from moeserve.experts.kernels.torch_reference import COMPUTED, ROW_WISE
from moeserve.quant.format import Scheme
from moeserve.quant.formats.floats import BF16, FLOATS

STRIDE_BYTES = 16
"""torch takes rows whose stride is a multiple of this, so H and I must be multiples of 8 two-byte floats."""


class TorchGroupedMM:
    """Two grouped GEMMs that accumulate in float32; between them the activation in float32."""

    def __init__(self, spec: KernelSpec) -> None:
        self._spec = spec
        self._dtype = spec.scheme.weights.dtype

    def prepare(self, weights: ExpertWeights) -> Prepared:
        """`gate_up [e, 2I, H]` and `down [e, H, I]` in the scheme's dtype, and float32 biases if any.

        ValueError: the weights do not fit the kernel's spec.
        """
        return Prepared(
            {
                name.removesuffix(".codes"): t.contiguous()
                for name, t in self._spec.fit(weights).tensors().items()
            }
        )

    def apply(self, prepared: Prepared, batch: ExpertBatch) -> Tensor:
        """RAGGED `[Rmax, H]` -> `[Rmax, H]`; rows outside the segments are undefined."""
        weights = prepared.per_slot
        x = (
            batch.tokens.parts[0]
            if batch.tokens.format == self._spec.scheme.activations
            else batch.tokens.dequantize()
        )
        if batch.slots == 0 or x.shape[0] == 0:
            return torch.empty(x.shape, dtype=self._spec.out_dtype, device=x.device)
        ends = batch.offsets[1:]
        between = F.grouped_mm(x.to(self._dtype), weights["gate_up"].mT, offs=ends)
        if self._spec.shape.bias:
            slots = _slot_of_rows(batch)
            between = between + weights["gate_up_bias"][slots]
        inner = self._spec.shape.activation.apply(between).to(self._dtype)
        outputs = F.grouped_mm(inner, weights["down"].mT, offs=ends)
        if self._spec.shape.bias:
            outputs = outputs + weights["down_bias"][slots]
        return outputs.to(self._spec.out_dtype)


def _slot_of_rows(batch: ExpertBatch) -> Tensor:
    """Each row's slot `[Rmax]` int64, found on the device; rows after the last segment get the last slot."""
    rows = torch.arange(batch.tokens.shape[0], dtype=batch.offsets.dtype, device=batch.offsets.device)
    return torch.searchsorted(batch.offsets[1:], rows, right=True).clamp_(max=batch.slots - 1)


PLAIN = frozenset(Scheme(form, form) for form in FLOATS.values())
GPUS = frozenset({"sm90", "sm100", "sm103"})

ENTRY = KernelEntry(
    name="torch_grouped_mm",
    build=TorchGroupedMM,
    schemes=PLAIN,
    fewer_schemes={arch: frozenset({Scheme(BF16, BF16)}) for arch in GPUS},
    eats=ROW_WISE,
    groupings=frozenset({Grouping.RAGGED}),
    activations=COMPUTED,
    archs=GPUS | {"cpu"},
    multiple_of=(STRIDE_BYTES // 2, STRIDE_BYTES // 2),
    verified=("cpu", "sm90"),
)
