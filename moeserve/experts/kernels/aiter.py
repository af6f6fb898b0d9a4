# mypy: disable-error-code="import-not-found"
"""Experts on AITER, AMD's kernels: bf16, FP8 and, on gfx950, MXFP4 weights and rows.

The package's `fused_moe` takes tokens with the experts they chose, and a mask of ones and zeros that says
which of all experts are here. Each row of a batch is handed over as a token with one expert, its slot, and
weight 1; a row outside the segments chooses one more expert, which the mask leaves out. Rows are rounded
inside. Weights lie in 16 x 16 tiles, made by the package's own converter. gfx94x knows E4M3 only as FNUZ:
same bits, half the value, so scales double. The calls are those of AITER 0.1.7.

`QUANT` are the package's methods by their numbers: 0 none, 2 a scale a token, 3 blocks of 32, 5 blocks of
128 x 128. Method 1, a scale a tensor, takes one static scale for all experts, and is not used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moeserve.experts.activation import Activation
from moeserve.experts.batch import ExpertBatch, ExpertWeights, Grouping
from moeserve.experts.kernel import KernelEntry, KernelSpec, Prepared
from moeserve.experts.kernels.support.library import LibraryStep
from moeserve.quant.format import Format, Packed, Scheme
from moeserve.quant.formats.floats import BF16
from moeserve.quant.formats.fp8 import FP8_BLOCK, FP8_CHANNEL, FP8_GROUP, FP8_TENSOR, FP8_TOKEN
from moeserve.quant.formats.mx import MXFP4

PLAIN = Scheme(BF16, BF16)
BLOCKS = Scheme(FP8_BLOCK, FP8_GROUP)
FP4 = Scheme(MXFP4, MXFP4)

QUANT = {
    PLAIN: "No",
    Scheme(FP8_CHANNEL, FP8_TOKEN): "per_Token",
    Scheme(FP8_TENSOR, FP8_TOKEN): "per_Token",
    BLOCKS: "per_128x128",
    FP4: "per_1x32",
}
"""Names in the package's `QuantType`."""

ACTIVATIONS = {"silu": "Silu", "gelu": "Gelu"}
"""Names in the package's `ActivationType`."""

FNUZ = ("gfx940", "gfx941", "gfx942")
NAN_BITS = 0x7F


def needs_fnuz(device: torch.device) -> bool:
    """Whether `device` has FNUZ alone of the kinds of E4M3."""
    if torch.version.hip is None or device.type != "cuda":
        return False
    return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0] in FNUZ


class Aiter:
    """One call for both GEMMs and the activation between them; answers in bf16."""

    def __init__(self, spec: KernelSpec) -> None:
        self._spec = spec

    def prepare(self, weights: ExpertWeights) -> Prepared:
        """Codes in the package's tiles; float32 scales a row, a block, or bytes a block of 32.

        ValueError: the weights do not fit the kernel's spec, or hold NaN, which FNUZ reads as a number.
        """
        fitted = self._spec.fit(weights)
        tensors: dict[str, Tensor] = {}
        for side, packed in (("gate_up", fitted.gate_up), ("down", fitted.down)):
            tensors |= {f"{side}.{name}": part for name, part in _pack(packed).items()}
        return Prepared(tensors)

    def apply(self, prepared: Prepared, batch: ExpertBatch) -> Tensor:
        """RAGGED -> `[Rmax, H]`, PADDED -> `[e, C, H]`; rows outside the segments are undefined."""
        from aiter import ActivationType, QuantType
        from aiter.fused_moe import fused_moe

        spec, weights, step = self._spec, prepared.per_slot, LibraryStep(batch)
        shape, slots = batch.tokens.shape, batch.slots
        if step.empty:
            return torch.empty(shape, dtype=spec.out_dtype, device=batch.tokens.device)
        rows = step.plain()
        here = torch.ones(slots + 1, dtype=torch.int32, device=rows.device)
        here[slots:] = 0
        outputs: Tensor = fused_moe(
            hidden_states=rows,
            w1=_marked(weights["gate_up.codes"]),
            w2=_marked(weights["down.codes"]),
            topk_weight=torch.ones((step.capacity, 1), device=rows.device),
            topk_ids=step.slots(slots)[:, None],
            expert_mask=here,
            activation=_member(ActivationType, ACTIVATIONS[spec.shape.activation.name]),
            quant_type=_member(QuantType, QUANT[spec.scheme]),
            w1_scale=weights.get("gate_up.scale"),
            w2_scale=weights.get("down.scale"),
        )
        return outputs.to(spec.out_dtype).view(shape)


def _member(enum: Any, name: str) -> Any:
    """A member of an enum that C++ code defines."""
    return enum.__members__[name]


def _marked(codes: Tensor) -> Tensor:
    """`codes` with the mark that tells the package of its tiles; four-bit ones in torch's dtype for pairs."""
    viewed = codes.view(torch.float4_e2m1fn_x2) if codes.dtype == torch.uint8 else codes.view(codes.dtype)
    viewed.is_shuffled = True  # type: ignore[attr-defined]
    return viewed


def _pack(packed: Packed) -> dict[str, Tensor]:
    from aiter.ops.shuffle import shuffle_weight

    codes, *scales = packed.parts
    if codes.dtype == torch.float8_e4m3fn and needs_fnuz(codes.device):
        codes, scales = _as_fnuz(packed.format, codes), [scale * 2 for scale in scales]
    tiles = shuffle_weight(codes.contiguous(), layout=(16, 16)) if codes.numel() else codes
    named = {"codes": tiles.contiguous()}
    if not scales:
        return named
    return named | {"scale": _scale(packed.format, scales[0], codes.shape[1])}


def _scale(form: Format, scale: Tensor, rows: int) -> Tensor:
    """Scales as the package's methods read them: a row's as `[e, N, 1]`, blocks of 32 in its own order."""
    if form == FP8_TENSOR:
        return scale.expand(-1, rows, -1).contiguous()
    if form != MXFP4:
        return scale.contiguous()
    from aiter.utility.fp4_utils import e8m0_shuffle

    per_slot = [e8m0_shuffle(one) for one in scale]
    return torch.stack(per_slot) if per_slot else scale.contiguous()


def _as_fnuz(form: Format, codes: Tensor) -> Tensor:
    """Returns the same bits as E4M3FNUZ; -0 becomes 0. ValueError: a NaN code, which would read as 240."""
    bits = codes.view(torch.uint8)
    if bool((bits & NAN_BITS == NAN_BITS).any()):
        raise ValueError(f"{form} codes hold NaN (0x7F or 0xFF), which E4M3FNUZ would read as 240")
    return bits.masked_fill(bits == 0x80, 0).view(torch.float8_e4m3fnuz)


GFX942 = frozenset(QUANT) - {FP4}

ENTRY = KernelEntry(
    name="aiter",
    build=Aiter,
    schemes=frozenset(QUANT),
    fewer_schemes={"gfx942": GFX942},
    bf16_answers=True,
    eats=frozenset({BF16}),
    groupings=frozenset(Grouping),
    activations=frozenset(ACTIVATIONS),
    fewer_activations={BLOCKS: frozenset({"silu"}), FP4: frozenset({"silu"})},
    settings={scheme: frozenset(Activation(name) for name in ACTIVATIONS) for scheme in QUANT},
    unbiased=frozenset(QUANT),
    archs=frozenset({"gfx942", "gfx950"}),
    modules=frozenset({"aiter"}),
    multiple_of=(256, 256),
    looser={scheme: (128, 128) for scheme in QUANT if scheme != FP4},
)
