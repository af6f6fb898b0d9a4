"""FP8 experts with a scale an output row and a token, on `torch.nn.functional.scaled_grouped_mm`.

torch has a CUTLASS kernel for it on sm90 and sm100: it takes the segments' ends from the device, scales each
row's sums in its epilogue, and answers in bf16. It adds no bias, so biases are added after it. A scale of the
whole matrix is that of every row of it, and a static scale that of every token of the slot. On sm90 the
tensor cores' sums are promoted to float32 on the way unless fast accumulation is asked for, which it is not.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from moeserve.experts.batch import ExpertBatch, ExpertWeights, Grouping
from moeserve.experts.kernel import KernelEntry, KernelSpec, Prepared
from moeserve.experts.kernels.support.library import LibraryStep, biases
from moeserve.experts.kernels.torch_reference import COMPUTED
from moeserve.quant.format import Packed, Scheme
from moeserve.quant.formats.floats import BF16
from moeserve.quant.formats.fp8 import FP8_CHANNEL, FP8_STATIC, FP8_TENSOR, FP8_TOKEN


class TorchScaledGroupedMM:
    """Two grouped GEMMs on E4M3 codes; between them the activation, rounded as the scheme says."""

    def __init__(self, spec: KernelSpec) -> None:
        self._spec = spec

    def prepare(self, weights: ExpertWeights) -> Prepared:
        """Codes `[e, N, K]`, and a float32 scale of each output row `[e, N]`.

        ValueError: the weights do not fit the kernel's spec.
        """
        fitted = self._spec.fit(weights)
        tensors = biases(fitted)
        for side, packed in (("gate_up", fitted.gate_up), ("down", fitted.down)):
            tensors |= {f"{side}.{name}": t for name, t in _by_rows(packed).items()}
        given = {"input_scale": fitted.input_scale, "inner_scale": fitted.inner_scale}
        return Prepared(tensors | {name: scale.clone() for name, scale in given.items() if scale is not None})

    def apply(self, prepared: Prepared, batch: ExpertBatch) -> Tensor:
        """RAGGED `[Rmax, H]` -> `[Rmax, H]`; rows outside the segments are undefined."""
        spec, weights, step = self._spec, prepared.per_slot, LibraryStep(batch)
        if step.empty:
            return torch.empty(batch.tokens.shape, dtype=spec.out_dtype, device=batch.tokens.device)
        form = spec.scheme.activations
        slots = step.slots(0) if spec.shape.bias else None
        between = self._gemm(step.rounded(form, weights.get("input_scale")), weights, "gate_up", batch)
        if slots is not None:
            between = between + weights["gate_up_bias"][slots]
        inner = step.activated(between, spec.shape, torch.float32)
        outputs = self._gemm(step.round(inner, form, weights.get("inner_scale")), weights, "down", batch)
        if slots is not None:
            outputs = outputs + weights["down_bias"][slots]
        return outputs.to(spec.out_dtype)

    @staticmethod
    def _gemm(
        rows: tuple[Tensor, Tensor], weights: Mapping[str, Tensor], side: str, batch: ExpertBatch
    ) -> Tensor:
        codes, scale = rows
        outputs: Tensor = F.scaled_grouped_mm(  # type: ignore[attr-defined]
            codes,
            weights[f"{side}.codes"].mT,
            scale_a=scale.flatten(),
            scale_recipe_a=F.ScalingType.RowWise,
            scale_b=weights[f"{side}.scale"],
            scale_recipe_b=F.ScalingType.RowWise,
            offs=batch.offsets[1:],
            output_dtype=torch.bfloat16,
        )
        return outputs


def _by_rows(packed: Packed) -> dict[str, Tensor]:
    """Codes, and the scale of each row of them."""
    codes, scale = packed.parts
    return {"codes": codes.contiguous(), "scale": scale.squeeze(-1).expand(codes.shape[:2]).contiguous()}


SCHEMES = frozenset(Scheme(w, a) for w in (FP8_CHANNEL, FP8_TENSOR) for a in (FP8_TOKEN, FP8_STATIC))

ENTRY = KernelEntry(
    name="torch_scaled_grouped_mm",
    build=TorchScaledGroupedMM,
    schemes=SCHEMES,
    e4m3_sums=SCHEMES,
    eats=frozenset({BF16, FP8_TOKEN}),
    groupings=frozenset({Grouping.RAGGED}),
    activations=COMPUTED,
    archs=frozenset({"sm90", "sm100", "sm103"}),
    multiple_of=(16, 16),
    bf16_sums=True,
    verified=("sm90",),
)
