"""Sizes rounded up as each backend wants them, with codes and scales of zero; `unpack` crops.

A rule names multiples of H and of a rank's I. Gate and up are padded separately, each to the multiple. A
scale of several rows or of all stays; an added row or group has scale 0, so what is added is zero whatever
its codes mean. Where padding would lengthen a group of codes that have no zero code, the size is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

import torch
import torch.nn.functional as F
from torch import Size, Tensor

from moeserve.quant.format import WHOLE, Format, Packed, Part
from moeserve.quant.formats.fp8 import FP8_BLOCK, FP8_BLOCK_UE8M0, FP8_TENSOR
from moeserve.quant.formats.int4 import INT4, INT4_ASYMMETRIC
from moeserve.quant.formats.int4_fp8 import INT4_FP8
from moeserve.quant.formats.int8_grouped import INT8
from moeserve.quant.formats.mx import MXFP4, MXFP8
from moeserve.quant.formats.nvfp4 import NVFP4
from moeserve.quant.layout import must_divide, refused_format, taken

NO_ZERO_CODE = frozenset({*INT4.values(), *INT4_ASYMMETRIC.values()})
"""Formats in which a code of 0 is another value, but for a scale of 0."""


@dataclass(frozen=True)
class Rule:
    """What one backend rounds sizes up to: multiples of H and of I."""

    formats: frozenset[Format]
    hidden: int
    inner: int


_MXFP4 = frozenset({MXFP4})
_GROUPS = frozenset(form for form in NO_ZERO_CODE if form.parts[1].columns != WHOLE)

RULES: dict[str, Rule] = {
    "mxfp4_deep_gemm": Rule(_MXFP4, 128, 128),
    "mxfp4_marlin": Rule(_MXFP4, 256, 128),
    "mxfp4_trtllm": Rule(_MXFP4, 256, 256),
    "mxfp4_flashinfer_cutlass": Rule(_MXFP4, 128, 128),
    "mxfp4_rocm": Rule(_MXFP4, 256, 256),
    "mxfp4_cpu": Rule(_MXFP4, 32, 32),
    "mxfp4_others": Rule(_MXFP4, 1, 64),
    "fp8_tensor_flashinfer": Rule(frozenset({FP8_TENSOR}), 1, 16),
    "fp8_block_online": Rule(frozenset({FP8_BLOCK, FP8_BLOCK_UE8M0}), 128, 128),
    "nvfp4_trtllm": Rule(frozenset({NVFP4}), 256, 64),
    "marlin_int": Rule(_GROUPS | {*INT8.values()}, 128, 128),
    "int4_fp8_cutlass": Rule(frozenset({INT4_FP8}), 256, 256),
    "mxfp8": Rule(frozenset({MXFP8}), 32, 32),
}
"""Gated experts' rules by backend. Marlin wants I in multiples of max(64, group); 128 is one of each."""


@dataclass(frozen=True)
class Padded:
    """A matrix of `halves` equal bands of rows, each padded to a multiple of `rows`; columns to `columns`."""

    name: str
    formats: frozenset[Format]
    rows: int
    columns: int
    halves: int = 1

    def shape_of(self, shape: Size) -> Size:
        """The padded shape of a tensor `[..., N, K]`."""
        *lead, n, k = shape
        band = n // self.halves
        return Size((*lead, self.halves * (band + -band % self.rows), k + -k % self.columns))

    def refuses(self, packed: Packed) -> str | None:
        """Why `packed` cannot be padded, with the value, or None."""
        form, (*_, n, k) = packed.format, packed.shape
        if form not in self.formats:
            return refused_format(self, form)
        try:
            must_divide("rows", n, self.halves)
            for part in form.parts:
                if self.halves > 1 and part.rows not in (1, WHOLE):
                    must_divide("rows", n, self.halves * part.rows)
                if form in NO_ZERO_CODE and part.name == "scale":
                    must_divide("columns", k, int(part.columns))
                if part.columns != WHOLE and self.shape_of(packed.shape)[-1] != k:
                    must_divide("columns", k, Fraction(part.columns).numerator)
        except ValueError as error:
            return f"{self.name} of {form} {list(packed.shape)}: {error}"
        return None

    def pack(self, packed: Packed) -> dict[str, Tensor]:
        """The parts of the padded matrix by name. ValueError: a format or a size that cannot be padded."""
        if (reason := self.refuses(packed)) is not None:
            raise ValueError(reason)
        shape = self.shape_of(packed.shape)
        pairs = zip(packed.format.parts, packed.parts, strict=True)
        return {part.name: self._grown(part, tensor, shape) for part, tensor in pairs}

    def unpack(self, tensors: Mapping[str, Tensor], like: Packed) -> Packed:
        """The parts without the padding. ValueError: a tensor is missing or of another shape."""
        if (reason := self.refuses(like)) is not None:
            raise ValueError(reason)
        shape, parts = self.shape_of(like.shape), []
        for part, stored in zip(like.format.parts, like.parts, strict=True):
            expected = torch.empty(part.shape_of(shape), dtype=part.dtype, device="meta")
            found = taken(self, tensors, part.name, expected)
            if found.shape != stored.shape:
                bands = self._bands(part, found)
                rows = stored.shape[-2] // bands.shape[-3]
                found = bands[..., :rows, : stored.shape[-1]].reshape(stored.shape)
            parts.append(found)
        return Packed(like.format, like.shape, tuple(parts))

    def _grown(self, part: Part, stored: Tensor, shape: Size) -> Tensor:
        *_, n, k = part.shape_of(shape)
        if (n, k) == tuple(stored.shape[-2:]):
            return stored
        bands = self._bands(part, stored)
        bytes_ = bands.view(torch.uint8) if part.dtype.itemsize == 1 else bands
        by = (0, k - stored.shape[-1], 0, n // bands.shape[-3] - bands.shape[-2])
        return F.pad(bytes_, by).view(part.dtype).flatten(-3, -2)

    def _bands(self, part: Part, tensor: Tensor) -> Tensor:
        """`[..., n, k]` as `[..., halves, n / halves, k]`; one band where a row serves all."""
        *lead, n, k = tensor.shape
        bands = 1 if part.rows == WHOLE else self.halves
        return tensor.reshape(*lead, bands, n // bands, k)


def _both(name: str, rule: Rule) -> tuple[Padded, Padded]:
    return (
        Padded(f"padded_{name}_gate_up", rule.formats, rule.inner, rule.hidden, halves=2),
        Padded(f"padded_{name}_down", rule.formats, rule.hidden, rule.inner),
    )


ENTRIES = tuple(layout for name, rule in RULES.items() for layout in _both(name, rule))
