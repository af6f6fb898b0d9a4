"""What our own Hopper kernels share: rows of a batch laid flat, and how so many of them are computed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moeserve.experts.batch import ExpertBatch, ExpertWeights
from moeserve.experts.kernel import Kernel, KernelSpec, Prepared
from moeserve.experts.kernels.tiles import few_tile_for, tile_for
from moeserve.quant.format import Packed
from moeserve.quant.formats.floats import BF16

if TYPE_CHECKING:
    from moeserve.experts.kernels.cuda.few import Form
    from moeserve.experts.kernels.triton.grouped import Step


def flat(tokens: Packed) -> Packed:
    """PADDED rows `[e, C, H]` as `[e * C, H]`, contiguous; RAGGED rows are so already."""
    rows, width = tokens.shape[:-1].numel(), tokens.shape[-1]
    parts = tuple(part.reshape(rows, part.shape[-1]).contiguous() for part in tokens.parts)
    return Packed(tokens.format, torch.Size((rows, width)), parts)


def step_for(kind: str, batch: ExpertBatch, tokens: Packed) -> Step:
    """The step of `batch` on weights of `kind`, with the tile measured for this device and so many rows."""
    from moeserve.experts.kernels.triton.grouped import Step

    device = torch.cuda.get_device_name(tokens.device)
    return Step(batch, tokens.shape[0], tile_for(device, kind, batch.rows_a_slot))


def few_form(kind: str, spec: KernelSpec, batch: ExpertBatch, tokens: Packed) -> Form | None:
    """How `few.cu` computes `batch` on weights of `kind`; None where it does not, or is slower."""
    from moeserve.experts.kernels.cuda import few

    shape, slots = spec.shape, batch.slots
    device = torch.cuda.get_device_name(tokens.device)
    tile = few_tile_for(device, kind, batch.rows_a_slot * slots, slots)
    if tile is None or not few.takes(shape, slots):
        return None
    return few.Form(
        kind,
        tile,
        bias=shape.bias,
        limited=shape.activation.limit is not None,
        out=spec.out_dtype,
        rounds=kind == "fp8" and tokens.format == BF16,
    )


def fused(spec: KernelSpec) -> bool:
    """Whether a first GEMM of our CUDA kernels computes the activation of `spec`."""
    from moeserve.experts.kernels.cuda.steps import FUSED_ACTIVATIONS

    return spec.shape.activation.name in FUSED_ACTIVATIONS


def in_panels(tensors: Mapping[str, Tensor]) -> Prepared:
    """Experts' canonical `tensors` with all codes in panels."""
    from moeserve.experts.kernels.cuda.panels import panels

    sides = {"gate_up.codes": 2, "down.codes": 1}
    return Prepared({n: panels(t, sides[n]) if n in sides else t.contiguous() for n, t in tensors.items()})


class BySize(ABC):
    """A kernel that is two on the same prepared weights: `few` for few rows a slot, its own for many."""

    def __init__(self, spec: KernelSpec, few: Kernel) -> None:
        self._spec, self._few = spec, few

    def prepare(self, weights: ExpertWeights) -> Prepared:
        """As the kernel for few rows holds them. ValueError: the weights do not fit the kernel's spec."""
        return self._few.prepare(weights)

    def apply(self, prepared: Prepared, batch: ExpertBatch) -> Tensor:
        """RAGGED -> `[Rmax, H]`, PADDED -> `[e, C, H]`; rows outside the segments are undefined."""
        rows = batch.tokens.shape[:-1].numel()
        if rows == 0 or batch.slots == 0 or not self._is_for(batch):
            return self._few.apply(prepared, batch)
        return self._apply(prepared, batch).view(batch.tokens.shape)

    @abstractmethod
    def _is_for(self, batch: ExpertBatch) -> bool:
        """Whether its own kernel takes `batch`."""

    @abstractmethod
    def _apply(self, prepared: Prepared, batch: ExpertBatch) -> Tensor:
        """`[R, H]`, PADDED rows flat; there are some, and slots."""
