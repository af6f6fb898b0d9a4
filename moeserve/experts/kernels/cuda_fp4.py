"""Our own Hopper kernels for four-bit weights, NVFP4 and MXFP4, in CUDA C++, with bf16 products.

They are exact for these weights: a code times its block's scale has six bits. A step of few rows is one
launch of `cuda/few.cu`, one of some rows a slot one launch of `cuda/decode_codes.cu`. With many rows a slot
the tensor cores are the limit: `cuda/prefill_codes.cu` decodes codes for up to 256 rows at once, shares rows
over a cluster and activates in the first GEMM. Between some and many stands `triton_fp4`, on those weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from torch import Tensor

from moeserve.device.nvrtc import NEEDED_MODULE
from moeserve.experts.batch import ExpertBatch, Grouping
from moeserve.experts.kernel import KernelEntry, KernelFamily
from moeserve.experts.kernels.cuda import decode_codes, few
from moeserve.experts.kernels.cuda.steps import FUSED_ACTIVATIONS
from moeserve.experts.kernels.support.hopper import check_slots, few_step
from moeserve.experts.kernels.tiles import kernel_ranges
from moeserve.experts.kernels.triton_fp4 import FORM, Fp4Kernel
from moeserve.quant.format import Packed, Scheme
from moeserve.quant.formats.floats import BF16
from moeserve.quant.formats.fp8 import FP8_GROUP
from moeserve.quant.formats.mx import MXFP4
from moeserve.quant.formats.nvfp4 import NVFP4

ROUNDED = Scheme(NVFP4, FP8_GROUP)
"""Rows are rounded to E4M3 as the scheme says, inner rows from float32, and their codes multiplied in bf16,
which has them all; the scale of each 128 of a row multiplies sums.
"""

FAMILY = KernelFamily("cuda_fp4", partial(kernel_ranges, "cuda_fp4"))


class CudaFp4Few(Fp4Kernel):
    """The whole step in one launch; slots without rows cost nothing."""

    def _rows(self, slots: Mapping[str, Tensor], batch: ExpertBatch, tokens: Packed) -> Tensor:
        return few_step(self._spec, batch, tokens, self._sides(slots))


class CudaFp4Some(Fp4Kernel):
    """The whole step in one launch, which reads weights once for up to 24 rows of a slot."""

    def _rows(self, slots: Mapping[str, Tensor], batch: ExpertBatch, tokens: Packed) -> Tensor:
        from moeserve.experts.kernels.cuda.prefill_codes import weights_of

        check_slots(batch, decode_codes.MOST_SLOTS)
        sides = [weights_of(slots, side) for side in ("gate_up", "down")]
        form = decode_codes.form_for(self._spec, batch)
        return decode_codes.step(form, _widened(tokens), batch, sides, self._spec.shape)


class CudaFp4Many(Fp4Kernel):
    """Two grouped GEMMs that decode a tile's codes once for up to 256 rows of a slot."""

    def _rows(self, slots: Mapping[str, Tensor], batch: ExpertBatch, tokens: Packed) -> Tensor:
        from moeserve.experts.kernels.cuda import prefill_codes

        spec, is_rounded = self._spec, self._spec.scheme == ROUNDED
        gate_up, down = (prefill_codes.weights_of(slots, side) for side in ("gate_up", "down"))
        plan = prefill_codes.plan_for("scaled" if is_rounded else "bf16", batch)
        step = prefill_codes.CodesStep(batch, tokens.shape[0], plan)
        if not is_rounded:
            x = prefill_codes.PrefillCodesRows(_widened(tokens))
        elif tokens.format == FP8_GROUP:
            x = step.rows(*tokens.parts)
        else:
            x = step.round(tokens.parts[0])
        inner = step.gate_up(x, gate_up, spec.shape.activation, spec.shape.inner)
        return step.down(inner, down, spec.shape.hidden, spec.out_dtype)


def _widened(tokens: Packed) -> Tensor:
    """The rows in bf16 `[R, H]`, by a kernel of ours."""
    from moeserve.experts.kernels.cuda import rounded

    return tokens.parts[0] if tokens.format == BF16 else rounded.widen(*tokens.parts)


PLAIN = frozenset({Scheme(NVFP4, BF16), Scheme(MXFP4, BF16)})

MANY = KernelEntry(
    name="cuda_fp4_many",
    build=CudaFp4Many,
    schemes=PLAIN | {ROUNDED},
    eats=frozenset({BF16, FP8_GROUP}),
    groupings=frozenset(Grouping),
    activations=FUSED_ACTIVATIONS,
    archs=frozenset({"sm90"}),
    modules=frozenset({"triton", NEEDED_MODULE}),
    multiple_of=(32, decode_codes.INNER_MULTIPLE),
    apart=True,
    verified=("sm90",),
    form=FORM,
    family=FAMILY,
)
SOME = replace(
    MANY, name="cuda_fp4_some", build=CudaFp4Some, schemes=PLAIN, most_slots=decode_codes.MOST_SLOTS
)
FEW = replace(
    MANY,
    name="cuda_fp4_few",
    build=CudaFp4Few,
    schemes=PLAIN,
    multiple_of=(32, few.INNER_MULTIPLE),
    most_slots=few.MOST_SLOTS,
)
ENTRIES = (FEW, SOME, MANY)
