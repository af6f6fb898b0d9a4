"""Reads integers that are packed into words, by the layout of their file."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Size, Tensor

from moeserve.quant.format import Format, Parts
from moeserve.quant.layout import Layout


def unpacked(layout: Layout, tensors: Mapping[str, Tensor], form: Format, size: Size) -> Parts:
    """Unpacks the tensors of `layout` into the parts of a matrix of `form` and `size`."""
    return layout.unpack(tensors, form.empty(size, "meta")).parts
