"""What the portable kernel must know of a format: how weights are stored, how rows are rounded to it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moeserve.quant.format import WHOLE, Format, Part
from moeserve.quant.formats import fp8, int8, mx
from moeserve.quant.formats.nvfp4 import NVFP4_STATIC
from moeserve.quant.layouts.word_codes import element_of

INTEGERS = frozenset({"int8", "int4", "signed_int4"})
SUMMED = 128
"""Scales of this many columns, or a multiple, multiply sums; finer ones multiply the elements."""


@dataclass(frozen=True)
class Stored:
    """How a format's parts make a weight: (element - zero) x fine scale x outer scale."""

    element: str
    fine: Part | None = None  # a scale of some columns
    outer: Part | None = None  # float32, of an output row or of the matrix
    zero: Part | None = None
    ordered: bool = False
    exact: bool = False  # scales multiply sums where they can: elements times scales lose bits in products

    @classmethod
    def of(cls, form: Format, *, exact: bool = False) -> Stored:
        """Returns how the kernels read what `form` stores. ValueError: no table names its codes' element."""
        element = element_of(form)
        if element is None:
            raise ValueError(f"{form} codes have no element; name it in ELEMENTS of layouts/word_codes.py")
        parts = {part.name: part for part in form.parts[1:]}
        zero, order = parts.pop("zero", None), parts.pop("order", None)
        fine = next((part for part in parts.values() if part.columns != WHOLE), None)
        outer = next((part for part in parts.values() if part.columns == WHOLE), None)
        return cls(element, fine, outer, zero, order is not None, exact)

    @property
    def span(self) -> int:
        """Columns that share a fine scale; 0 where there is none."""
        return 0 if self.fine is None else int(self.fine.columns)

    @property
    def blocks(self) -> bool:
        """Whether fine scales multiply sums of words too: those of several rows; float32 if `exact`."""
        if self.fine is None:
            return False
        return self.fine.rows > 1 or (self.exact and self.sums_only and self.fine.dtype == torch.float32)

    @property
    def sums_only(self) -> bool:
        """Whether elements multiply as they are: every scale multiplies a sum, and there is no zero point."""
        return self.zero is None and not self.ordered and self.span % SUMMED == 0


@dataclass(frozen=True)
class Rounding:
    """How rows are rounded to an activation format; `rule` names a branch of the device code."""

    element: str
    rule: str
    span: int = 0  # columns that share a scale; 0: the whole row

    @property
    def x_span(self) -> int:
        """Columns of the rounded values that share a scale kept beside them: 0 all, -1 there is none."""
        if self.rule == "nvfp4":
            return 0  # the constant; block scales are in the values
        return -1 if self.rule in {"even", "ceil"} else self.span


ROUNDINGS: dict[Format, Rounding] = {
    fp8.FP8_STATIC: Rounding("e4m3", "static"),
    fp8.FP8_TOKEN: Rounding("e4m3", "amax"),
    fp8.FP8_GROUP: Rounding("e4m3", "amax", 128),
    fp8.FP8_GROUP64: Rounding("e4m3", "amax", 64),
    fp8.FP8_GROUP_UE8M0: Rounding("e4m3", "power_of_two", 128),
    int8.INT8_STATIC: Rounding("int8", "static"),
    int8.INT8_TOKEN: Rounding("int8", "amax"),
    int8.INT8_TOKEN_ASYMMETRIC: Rounding("int8", "range"),
    int8.INT8_GROUP128: Rounding("int8", "amax", 128),
    mx.MXFP4: Rounding("e2m1", "even", 32),
    mx.MXFP6_E3M2: Rounding("e3m2", "even", 32),
    mx.MXFP6_E2M3: Rounding("e2m3", "even", 32),
    mx.MXFP8: Rounding("e4m3", "ceil", 32),
    NVFP4_STATIC: Rounding("e2m1", "nvfp4", 16),
}
"""Every activation format the device rounds to, by the rule its format writes with unless told otherwise."""


def product_dtype(weights: Stored, activations: Format, fp8_products: frozenset[str]) -> torch.dtype:
    """What the kernel multiplies in: int8 and, among `fp8_products`, E4M3 where codes can stay codes.

    Else bf16, or fp16 where rows are fp16 and weights are plain or integers: the scales of small floats may
    leave fp16's range.
    """
    rounding = ROUNDINGS.get(activations)
    if rounding is None:
        half = activations.dtype == torch.float16 and weights.element in INTEGERS | {"float"}
        return torch.float16 if half else torch.bfloat16
    eight_bits = rounding.x_span >= 0 and rounding.rule != "range"  # a code less its zero point needs nine
    codes_alone = weights.sums_only and eight_bits
    if codes_alone and rounding.element == "int8" and weights.element in INTEGERS:
        return torch.int8
    if codes_alone and rounding.element == weights.element and weights.element in fp8_products:
        return torch.float8_e4m3fn
    return torch.bfloat16
