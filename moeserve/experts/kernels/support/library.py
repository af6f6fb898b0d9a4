"""What entries for libraries share: which slot a row belongs to, rows rounded, and the activation between.

On a GPU with Triton the device code of our portable kernel rounds and activates, elsewhere the formats' own
formulas do; either way nothing is read on the host.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from moeserve.experts.batch import ExpertBatch, ExpertShape, ExpertWeights
from moeserve.experts.kernels.support.hopper import flat
from moeserve.experts.kernels.triton.stored import ROUNDINGS
from moeserve.quant.elements import encode_fp8
from moeserve.quant.format import Format, Packed
from moeserve.quant.formats.floats import FLOATS
from moeserve.quant.formats.fp8 import FP8_GROUP, FP8_GROUP_UE8M0, FP8_STATIC, FP8_TOKEN
from moeserve.quant.formats.nvfp4 import NVFP4_STATIC, nvfp4_given
from moeserve.quant.layouts import layout_named
from moeserve.quant.layouts.padding import RULES, Padded

if TYPE_CHECKING:
    from moeserve.experts.kernels.triton.dequant_step import DequantStep

ON_DEVICE = frozenset({FP8_TOKEN, FP8_STATIC, FP8_GROUP, FP8_GROUP_UE8M0})
"""Formats whose codes and float32 scales our device code writes."""


@dataclass(frozen=True)
class LibraryStep:
    """One batch on its way through a library's calls; PADDED rows `[e, C, H]` are flat, `[e * C, H]`."""

    batch: ExpertBatch

    @cached_property
    def tokens(self) -> Packed:
        """The batch's rows, flat and contiguous."""
        return flat(self.batch.tokens)

    @property
    def capacity(self) -> int:
        """R: rows of the batch, defined or not."""
        return self.tokens.shape[0]

    @property
    def empty(self) -> bool:
        """Whether there is nothing to compute."""
        return self.capacity == 0 or self.batch.slots == 0

    def slots(self, outside: int) -> Tensor:
        """Each row's slot, int32 `[R]`, found on the device; `outside` where a row belongs to none."""
        offsets, counts = self.batch.offsets, self.batch.counts
        rows = torch.arange(self.capacity, dtype=offsets.dtype, device=offsets.device)
        slot = torch.searchsorted(offsets[1:], rows, right=True)
        known = slot.clamp(max=self.batch.slots - 1)
        inside = (slot < self.batch.slots) & (rows - offsets[known] < counts[known])
        return torch.where(inside, slot, outside).int()

    def segments(self, outside: int) -> Tensor:
        """Returns `slots`, but rows that fill a segment up to its alignment have its slot too."""
        offsets = self.batch.offsets
        rows = torch.arange(self.capacity, dtype=offsets.dtype, device=offsets.device)
        slot = torch.searchsorted(offsets[1:], rows, right=True)
        return torch.where(slot < self.batch.slots, slot, outside).int()

    def plain(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """The rows as plain floats `[R, H]` of `dtype`."""
        tokens = self.tokens
        values = tokens.parts[0] if tokens.format in FLOATS.values() else tokens.dequantize()
        return values.to(dtype).contiguous()

    def rounded(self, form: Format, given: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The rows' codes and scales in an activation format; those that travelled in it as they came.

        `given [e]`: each slot's scale of a static format.
        """
        if self.tokens.format == form:
            codes, scale = self.tokens.parts
            return codes, scale
        return self.round(_floats(self.tokens), form, given)

    def round(self, x: Tensor, form: Format, given: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Codes and scales of `x [R, K]` in an activation format; FP8_STATIC has scales `[R, 1]`."""
        if self._step is not None and form in ON_DEVICE:
            rounded = self._step.round(x.contiguous(), ROUNDINGS[form], given, torch.float8_e4m3fn)
            assert rounded.scale is not None
            return rounded.values, rounded.scale
        if form == FP8_STATIC and given is not None:
            scale = given[self.slots(0)][:, None]
            return encode_fp8(x.float() * scale.reciprocal()), scale
        if form == NVFP4_STATIC and given is not None:
            x = x.float() * given[self.slots(0)][:, None].reciprocal()
            form = nvfp4_given(torch.ones((), device=x.device))
        codes, scale = form.quantize(x).parts
        return codes, scale

    def activated(self, between: Tensor, shape: ExpertShape, dtype: torch.dtype) -> Tensor:
        """The activation of `between [R, 2I]`, `[R, I]` if not gated: `[R, I]` of `dtype`."""
        if self._step is not None:
            return self._step.activate(between.contiguous(), shape, dtype)
        return shape.activation.apply(between).to(dtype)

    @cached_property
    def _step(self) -> DequantStep | None:
        if self.tokens.device.type != "cuda" or not _has_triton():
            return None
        from moeserve.experts.kernels.triton.dequant_step import DequantStep, cut_for

        return DequantStep(self.batch, self.capacity, cut_for(self.batch.rows_a_slot))


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _floats(tokens: Packed) -> Tensor:
    return tokens.parts[0] if tokens.format in FLOATS.values() else tokens.dequantize().contiguous()


def laid_out(packed: Packed, *layouts: str) -> dict[str, Tensor]:
    """The parts of `packed` after these layouts, one after the other; those before the last move rows only.

    ValueError: a format or a size that a layout does not take.
    """
    form = packed.format
    tensors = dict(zip((part.name for part in form.parts), packed.parts, strict=True))
    for name in layouts:
        moved = Packed(form, packed.shape, tuple(tensors[part.name] for part in form.parts))
        tensors = layout_named(name).pack(moved)
    return tensors


def rounded_up(shape: ExpertShape, rule: str) -> ExpertShape:
    """The sizes that a rule of `padding.RULES` rounds an expert's up to."""
    by = RULES[rule]
    return replace(
        shape, hidden=-(-shape.hidden // by.hidden) * by.hidden, inner=-(-shape.inner // by.inner) * by.inner
    )


def padded(weights: ExpertWeights, rule: str) -> ExpertWeights:
    """Gated weights of the sizes of `rounded_up`: added codes, scales and biases are zero."""
    gate_up, down = (
        _padded(side, f"padded_{rule}_{name}")
        for name, side in (("gate_up", weights.gate_up), ("down", weights.down))
    )
    more_inner, more_hidden = down.shape[-1] - weights.inner, gate_up.shape[-1] - weights.hidden
    gate_up_bias, down_bias = weights.gate_up_bias, weights.down_bias
    if gate_up_bias is not None:
        halves = gate_up_bias.view(len(gate_up_bias), 2, weights.inner)
        gate_up_bias = F.pad(halves, (0, more_inner)).flatten(1)
    if down_bias is not None:
        down_bias = F.pad(down_bias, (0, more_hidden))
    return replace(weights, gate_up=gate_up, down=down, gate_up_bias=gate_up_bias, down_bias=down_bias)


def _padded(packed: Packed, name: str) -> Packed:
    layout = layout_named(name)
    assert isinstance(layout, Padded)
    parts = layout.pack(packed)
    ordered = tuple(parts[part.name] for part in packed.format.parts)
    return Packed(packed.format, layout.shape_of(packed.shape), ordered)


def biases(weights: ExpertWeights) -> dict[str, Tensor]:
    """The weights' biases by name, if any: `gate_up_bias [e, 2I]` and `down_bias [e, H]`, float32."""
    named = {"gate_up_bias": weights.gate_up_bias, "down_bias": weights.down_bias}
    return {name: bias.contiguous() for name, bias in named.items() if bias is not None}
