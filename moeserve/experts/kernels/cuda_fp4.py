"""Our own Hopper kernel for four-bit weights, NVFP4 and MXFP4, in steps of any size, with bf16 products.

With many rows a slot the tensor cores are the limit, and `cuda/prefill_codes.py` decodes codes for up to
256 rows at once, shares rows over a cluster and activates in the first GEMM; with fewer, reading weights is:
`cuda/decode_codes.py` computes a step of some rows a slot in one launch, and `triton_fp4` the others.
Weights are the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from moeserve.device.nvrtc import NEEDED_MODULE
from moeserve.experts.batch import ExpertBatch, Grouping
from moeserve.experts.kernel import KernelEntry, KernelSpec, Prepared
from moeserve.experts.kernels.hopper import BySize, few_form, flat
from moeserve.experts.kernels.torch_reference import COMPUTED
from moeserve.experts.kernels.triton_fp4 import TritonFp4
from moeserve.quant.format import Packed, Scheme
from moeserve.quant.formats.floats import BF16
from moeserve.quant.formats.fp8 import FP8_GROUP
from moeserve.quant.formats.mx import MXFP4
from moeserve.quant.formats.nvfp4 import NVFP4

if TYPE_CHECKING:
    from moeserve.experts.kernels.cuda import decode_codes

MANY_ROWS = 128
"""Rows a slot from which on the kernel for many is the faster one on an H200."""

SOME_ROWS = 20.0
"""Rows a slot up to which the kernel for some is; 0 leaves it out."""

FEW_ROWS = 12
"""Rows of a step up to which `cuda/few.py`, where it takes the step, is the faster one of the two."""

ROUNDED = Scheme(NVFP4, FP8_GROUP)
"""Rows are rounded to E4M3 as the scheme says, inner rows from float32, and their codes multiplied in bf16,
which has them all; the scale of each 128 of a row multiplies sums.
"""

INNER_MULTIPLE = 64
"""What the inner size must be a multiple of for gate and up columns to meet in one tile."""


class CudaFp4(BySize):
    """Two grouped GEMMs in bf16, exact for these weights: a code times its block's scale has six bits."""

    def __init__(self, spec: KernelSpec) -> None:
        super().__init__(spec, TritonFp4(spec))

    def _is_for(self, batch: ExpertBatch) -> bool:
        from moeserve.experts.kernels.cuda.steps import FUSED_ACTIVATIONS

        shape = self._spec.shape
        fits = shape.activation.name in FUSED_ACTIVATIONS and shape.inner % INNER_MULTIPLE == 0
        many = self._spec.scheme == ROUNDED or batch.rows_a_slot >= MANY_ROWS
        return fits and (many or self._some(batch) is not None)

    def _some(self, batch: ExpertBatch) -> decode_codes.Form | None:
        """How the kernel for some rows a slot computes `batch`; None where another one is faster."""
        from moeserve.experts.kernels.cuda import decode_codes

        spec = self._spec
        if spec.scheme == ROUNDED or batch.rows_a_slot > SOME_ROWS:
            return None
        is_few = batch.rows_a_slot * batch.slots <= FEW_ROWS
        if is_few and few_form("fp4", spec, batch, batch.tokens) is not None:
            return None
        return decode_codes.form_for(spec, batch)

    def _apply(self, prepared: Prepared, batch: ExpertBatch) -> Tensor:
        from moeserve.experts.kernels.cuda import decode_codes, prefill_codes

        spec, slot, tokens = self._spec, prepared.per_slot, flat(batch.tokens)
        if (form := self._some(batch)) is not None:
            sides = [prefill_codes.weights_of(slot, side) for side in ("gate_up", "down")]
            return decode_codes.step(form, _bf16(tokens), batch, sides, spec.shape)
        gate_up, down = (prefill_codes.weights_of(slot, side) for side in ("gate_up", "down"))
        is_rounded = spec.scheme == ROUNDED
        plan = prefill_codes.plan_for("scaled" if is_rounded else "bf16", batch)
        step = prefill_codes.CodesStep(batch, tokens.shape[0], plan)
        if not is_rounded:
            x = prefill_codes.Rows(_bf16(tokens))
        elif tokens.format == FP8_GROUP:
            x = step.rows(*tokens.parts)
        else:
            x = step.round(tokens.parts[0])
        inner = step.gate_up(x, gate_up, spec.shape.activation, spec.shape.inner)
        return step.down(inner, down, spec.shape.hidden, spec.out_dtype)


def _bf16(tokens: Packed) -> Tensor:
    from moeserve.experts.kernels.cuda import rounded

    return tokens.parts[0] if tokens.format == BF16 else rounded.widen(*tokens.parts)


ENTRY = KernelEntry(
    name="cuda_fp4",
    build=CudaFp4,
    schemes=frozenset({Scheme(NVFP4, BF16), Scheme(MXFP4, BF16), ROUNDED}),
    eats=frozenset({BF16, FP8_GROUP}),
    groupings=frozenset(Grouping),
    activations=COMPUTED,
    archs=frozenset({"sm90"}),
    modules=frozenset({"triton", NEEDED_MODULE}),
    multiple_of=(32, 64),
    looser={Scheme(NVFP4, BF16): (32, 32), Scheme(MXFP4, BF16): (32, 32)},
    fewer_activations={ROUNDED: frozenset({"silu", "swigluoai", "swigluoai_uninterleave"})},
    verified=("sm90",),
)
