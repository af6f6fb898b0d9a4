"""What our own Hopper kernels share: flat rows of a batch, and steps with the tiles measured for so many."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moeserve.experts.batch import ExpertBatch, ExpertWeights
from moeserve.experts.kernel import KernelSpec, Prepared
from moeserve.experts.kernels.tiles import few_tile_for, tile_for
from moeserve.quant.format import Packed
from moeserve.quant.formats.floats import BF16
from moeserve.quant.layouts.panels import PANELS, PANELS_GATE_UP

if TYPE_CHECKING:
    from moeserve.experts.kernels.triton.grouped import GroupedStep, GroupedWeights

FORM = PANELS.name
"""The prepared form of FP8 and bf16 weights whose codes lie in panels, scales and biases as they are."""


def flat(tokens: Packed) -> Packed:
    """PADDED rows `[e, C, H]` as `[e * C, H]`, contiguous; RAGGED rows are so already."""
    rows, width = tokens.shape[:-1].numel(), tokens.shape[-1]
    parts = tuple(part.reshape(rows, part.shape[-1]).contiguous() for part in tokens.parts)
    return Packed(tokens.format, torch.Size((rows, width)), parts)


def as_bf16(tokens: Packed) -> Tensor:
    """The rows in bf16 `[R, H]`."""
    return tokens.parts[0] if tokens.format == BF16 else tokens.dequantize().bfloat16()


def step_for(kind: str, batch: ExpertBatch, tokens: Packed) -> GroupedStep:
    """The step of `batch` on weights of `kind`, with the tile measured for this device and so many rows."""
    from moeserve.experts.kernels.triton.grouped import GroupedStep

    device = torch.cuda.get_device_name(tokens.device)
    return GroupedStep(batch, tokens.shape[0], tile_for(device, kind, batch.rows_a_slot))


def few_step(spec: KernelSpec, batch: ExpertBatch, tokens: Packed, sides: Sequence[GroupedWeights]) -> Tensor:
    """`[R, H]`: the whole step by `few.cu`, on gate and up `sides[0]` and down `sides[1]`.

    ValueError: the rank has more slots than the kernel lists.
    """
    from moeserve.experts.kernels.cuda import few

    check_slots(batch, few.MOST_SLOTS)
    kind, shape = sides[0].kind, spec.shape
    device = torch.cuda.get_device_name(tokens.device)
    form = few.FewForm(
        kind,
        few_tile_for(device, kind, batch.rows_a_slot * batch.slots),
        bias=shape.bias,
        limited=shape.activation.limit is not None,
        out=spec.out_dtype,
        rounds=kind == "fp8" and tokens.format == BF16,
    )
    scaled = kind == "fp8" and tokens.format != BF16
    rows = (tokens.parts[0], tokens.parts[1]) if scaled else (as_bf16(tokens), None)
    return few.step(form, rows, batch, sides, shape)


def check_slots(batch: ExpertBatch, most: int) -> None:
    """ValueError where a rank has more slots than a kernel of one launch lists."""
    if batch.slots > most:
        raise ValueError(f"the rank has {batch.slots} slots; a kernel of one launch lists {most} at most")


class HopperKernel(ABC):
    """A kernel of ours: it computes flat rows, and only where there are rows and slots."""

    def __init__(self, spec: KernelSpec) -> None:
        self._spec = spec

    @abstractmethod
    def prepare(self, weights: ExpertWeights) -> Prepared:
        """The weights in the kernel's form. ValueError: they do not fit the kernel's spec."""

    def apply(self, prepared: Prepared, batch: ExpertBatch) -> Tensor:
        """RAGGED -> `[Rmax, H]`, PADDED -> `[e, C, H]`; rows outside the segments are undefined."""
        tokens = flat(batch.tokens)
        if batch.slots == 0 or tokens.shape[0] == 0:
            return torch.empty(batch.tokens.shape, dtype=self._spec.out_dtype, device=tokens.device)
        return self._rows(prepared.per_slot, batch, tokens).view(batch.tokens.shape)

    @abstractmethod
    def _rows(self, slots: Mapping[str, Tensor], batch: ExpertBatch, tokens: Packed) -> Tensor:
        """`[R, H]` of the spec's output dtype, by `tokens [R, H]` and the prepared tensors of all slots."""


class PanelKernel(HopperKernel):
    """A kernel on FP8 or bf16 weights whose codes lie in panels."""

    def prepare(self, weights: ExpertWeights) -> Prepared:
        """Codes in panels, canonical scales, float32 biases. ValueError: the weights do not fit the spec."""
        fitted = self._spec.fit(weights)
        sides = {
            f"{side}.{name}": tensor
            for side, layout, packed in (
                ("gate_up", PANELS_GATE_UP, fitted.gate_up),
                ("down", PANELS, fitted.down),
            )
            for name, tensor in layout.pack(packed).items()
        }
        return Prepared({name: t.contiguous() for name, t in (fitted.tensors() | sides).items()})

    def _sides(self, kind: str, slots: Mapping[str, Tensor]) -> list[GroupedWeights]:
        """Gate and up, and down, as `few.cu` reads them."""
        from moeserve.experts.kernels.triton.grouped import GroupedWeights

        shape = self._spec.shape
        return [
            GroupedWeights(
                kind, slots[f"{side}.codes"], slots.get(f"{side}.scale"), None, slots.get(f"{side}_bias"), n
            )
            for side, n in (("gate_up", shape.gate_up_rows), ("down", shape.hidden))
        ]
