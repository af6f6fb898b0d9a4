"""The table of layouts: one file a family, one line here a layout or a family of them."""

from __future__ import annotations

from moeserve.quant.layout import Layout
from moeserve.quant.layouts import deep_gemm, gate_up, padding, trtllm, word_codes
from moeserve.quant.layouts.awq import AWQ
from moeserve.quant.layouts.block_major import BLOCK_MAJOR_K
from moeserve.quant.layouts.compressed_ints import COMPRESSED_INTS
from moeserve.quant.layouts.gptq import GPTQ, GPTQ_V2
from moeserve.quant.layouts.hopper_fp4 import HOPPER_FP4
from moeserve.quant.layouts.hopper_w4a8 import HOPPER_W4A8
from moeserve.quant.layouts.marlin import MARLIN
from moeserve.quant.layouts.marlin_fp4 import MARLIN_FP4
from moeserve.quant.layouts.panels import PANELS, PANELS_GATE_UP
from moeserve.quant.layouts.sm90_mixed import SM90_MIXED_MXFP4
from moeserve.quant.layouts.swizzle import SCALES_128X4

_ENTRIES: tuple[Layout, ...] = (
    *gate_up.ENTRIES,
    SCALES_128X4,
    *trtllm.ENTRIES,
    BLOCK_MAJOR_K,
    SM90_MIXED_MXFP4,
    *deep_gemm.ENTRIES,
    MARLIN,
    MARLIN_FP4,
    GPTQ,
    GPTQ_V2,
    AWQ,
    COMPRESSED_INTS,
    *padding.ENTRIES,
    PANELS,
    PANELS_GATE_UP,
    HOPPER_FP4,
    HOPPER_W4A8,
    *word_codes.ENTRIES,
)

LAYOUTS: dict[str, Layout] = {layout.name: layout for layout in _ENTRIES}
"""Every layout by name; a new one is one file and one line here, and its laws are tested the same day."""


def layout_named(name: str) -> Layout:
    """The layout called `name`. ValueError, with the names there are."""
    if name not in LAYOUTS:
        raise ValueError(f"unknown layout {name!r}; known: {', '.join(sorted(LAYOUTS))}")
    return LAYOUTS[name]
