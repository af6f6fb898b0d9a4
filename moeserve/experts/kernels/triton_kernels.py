# mypy: disable-error-code="import-not-found"
"""MXFP4 weights and bf16 rows on the package triton_kernels, which comes with Triton's own sources.

Its `matmul_ogs` reads the slots' row counts on the device. The weights' layout is the package's own choice
for the GPU, so its converter makes it; gate rows stay above up rows, as the activation between the two GEMMs
is ours and has all its parameters. Written for the package of Triton 3.5 and 3.6; of sm80 to sm103 it runs
natively on sm100 and decodes to bf16 before. Batches are RAGGED: its other form computes every padded row.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from moeserve.experts.batch import ExpertBatch, ExpertWeights, Grouping
from moeserve.experts.kernel import KernelEntry, KernelSpec, Prepared
from moeserve.experts.kernels.support.library import LibraryStep, biases
from moeserve.experts.kernels.torch_reference import COMPUTED
from moeserve.quant.format import Packed, Scheme
from moeserve.quant.formats.floats import BF16
from moeserve.quant.formats.mx import MXFP4

K_AXIS = 1
"""Of a slot's operand `[e, K, N]`, the axis that scales run along."""

SCALE_WARPS = 8
"""Warps that the package's Hopper layout of scales is made for."""

TILED = 5
"""Dimensions of scales in the package's Blackwell layout."""


class TritonKernels:
    """Two grouped GEMMs that decode weights on the way; between them the activation, rounded to bf16."""

    def __init__(self, spec: KernelSpec) -> None:
        self._spec = spec

    def prepare(self, weights: ExpertWeights) -> Prepared:
        """Codes and scales in the package's layout for this GPU, stored so that slots come first.

        ValueError: the weights do not fit the kernel's spec.
        """
        fitted = self._spec.fit(weights)
        tensors = biases(fitted)
        for side, packed in (("gate_up", fitted.gate_up), ("down", fitted.down)):
            tensors |= {f"{side}.{name}": t for name, t in _pack(packed).items()}
        return Prepared(tensors)

    def apply(self, prepared: Prepared, batch: ExpertBatch) -> Tensor:
        """RAGGED `[Rmax, H]` -> `[Rmax, H]`; rows outside the segments are undefined."""
        spec, weights, step = self._spec, prepared.per_slot, LibraryStep(batch)
        if step.empty:
            return torch.empty(batch.tokens.shape, dtype=spec.out_dtype, device=batch.tokens.device)
        _persistent_on_blackwell(step.tokens.device)
        routing = _routing(step)
        gate_up, down = (spec.shape.gate_up_rows, spec.shape.hidden), (spec.shape.hidden, spec.shape.inner)
        between = _gemm(step.plain(), weights, "gate_up", gate_up, routing)
        inner = step.activated(between, spec.shape, torch.bfloat16)
        return _gemm(inner, weights, "down", down, routing).to(spec.out_dtype)


def _layouts(shape: tuple[int, int, int]) -> tuple[Any, Any]:
    """The package's layouts of codes and of scales for `[e, N, K]` weights on this GPU."""
    from triton_kernels.tensor_details import layout

    e, n, k = shape
    codes, options = layout.make_default_matmul_mxfp4_w_layout(mx_axis=K_AXIS)
    scales, scale_options = layout.make_default_matmul_mxfp4_w_scale_layout(
        mx_axis=K_AXIS, num_warps=SCALE_WARPS
    )
    return codes([e, k // 2, n], **options), scales([e, k // 32, n], **scale_options)


def _pack(packed: Packed) -> dict[str, Tensor]:
    """Codes and scales swizzled, then turned or cut so that they are contiguous with the slots first."""
    e, n, k = packed.shape
    if e == 0:  # tiles of no slot tell nothing of their number
        one = packed.format.quantize(torch.zeros((1, n, k), device=packed.device))
        return {name: part[:0] for name, part in _pack(one).items()}
    codes, scale = packed.parts
    to_codes, to_scale = _layouts((e, n, k))
    return {
        "codes": to_codes.swizzle_data(codes.mT).mT.contiguous(),
        "scale": _slots_first(to_scale.swizzle_data(scale.mT), e),
    }


def _slots_first(scale: Tensor, e: int) -> Tensor:
    """Scales `[e, G, N]` as `[e, N, G]`; tiles of all slots, `[1, e tiles, ...]`, as `[e, tiles, ...]`."""
    if scale.ndim == TILED:
        return scale.reshape(e, -1, *scale.shape[2:])
    return scale.mT.contiguous()


def _as_swizzled(scale: Tensor) -> Tensor:
    """The inverse of `_slots_first`, a view."""
    return scale.view(1, -1, *scale.shape[2:]) if scale.ndim == TILED else scale.mT


@cache
def _persistent_on_blackwell(device: torch.device) -> None:
    """Tells the package to take its persistent kernel, the only one that multiplies its Blackwell layout."""
    if (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device)[0] >= 10
    ):
        from triton_kernels.matmul_ogs_details.opt_flags import update_opt_flags_constraints

        update_opt_flags_constraints({"is_persistent": True, "epilogue_subtile": 1})


def _routing(step: LibraryStep) -> Any:
    from triton_kernels.matmul_ogs import RoutingData
    from triton_kernels.tensor import make_ragged_tensor_metadata

    counts = step.batch.counts
    metadata = make_ragged_tensor_metadata(counts, step.capacity)
    return RoutingData(None, counts, n_expts_tot=step.batch.slots, n_expts_act=1, expt_data=metadata)


def _gemm(x: Tensor, weights: Mapping[str, Tensor], side: str, size: tuple[int, int], routing: Any) -> Tensor:
    """`[R, N]` bf16: each row times the weights of its slot, plus the bias."""
    from triton_kernels.matmul_ogs import FlexCtx, PrecisionConfig, matmul_ogs
    from triton_kernels.tensor import FP4, Storage
    from triton_kernels.tensor import Tensor as Operand

    (n, k), codes, scale = size, weights[f"{side}.codes"], weights[f"{side}.scale"]
    of_codes, of_scale = _layouts((codes.shape[0], n, k))
    e = codes.shape[0]
    operand = Operand(Storage(codes.mT, of_codes), dtype=FP4, shape=[e, k, n])
    scales = Operand(Storage(_as_swizzled(scale), of_scale), dtype=torch.uint8, shape=[e, k // 32, n])
    config = PrecisionConfig(weight_scale=scales, flex_ctx=FlexCtx(), out_dtype=torch.bfloat16)
    bias = weights.get(f"{side}_bias")
    outputs: Tensor = matmul_ogs(x, operand, bias, routing, precision_config=config)
    return outputs


ENTRY = KernelEntry(
    name="triton_kernels",
    build=TritonKernels,
    schemes=frozenset({Scheme(MXFP4, BF16)}),
    eats=frozenset({BF16}),
    groupings=frozenset({Grouping.RAGGED}),
    activations=COMPUTED,
    archs=frozenset({"sm90", "sm100", "sm103", "gfx942", "gfx950"}),
    modules=frozenset({"triton_kernels"}),
    multiple_of=(64, 64),
    bf16_sums=True,
    verified=("sm90",),
)
