"""Integers packed into words, read by the layout that their file is in."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Size, Tensor

from moeserve.quant.format import Format, Parts
from moeserve.quant.layout import Layout


def unpacked(layout: Layout, tensors: Mapping[str, Tensor], form: Format, size: Size) -> Parts:
    """The parts of a matrix of `form` and `size` from what `layout` makes of one."""
    return layout.unpack(tensors, form.empty(size, "meta")).parts
