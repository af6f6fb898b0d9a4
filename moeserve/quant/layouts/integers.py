"""The integer formats that are packed into words: which layouts of files and kernels take."""

from __future__ import annotations

from moeserve.quant.format import Format
from moeserve.quant.formats.int4 import INT4, INT4_ACT_ORDER, INT4_ASYMMETRIC, INT4_ASYMMETRIC_ACT_ORDER
from moeserve.quant.formats.int8_grouped import (
    INT8,
    INT8_ACT_ORDER,
    INT8_ASYMMETRIC,
    INT8_ASYMMETRIC_ACT_ORDER,
)

IN_RUNS: frozenset[Format] = frozenset({*INT4.values(), *INT4_ASYMMETRIC.values(), *INT8.values()})
"""Formats whose groups are runs of columns, as kernels take them."""
GROUPED: frozenset[Format] = IN_RUNS | {
    *INT4_ACT_ORDER.values(),
    *INT4_ASYMMETRIC_ACT_ORDER.values(),
    *INT8_ACT_ORDER.values(),
}
"""What GPTQ writes: zero points with 4 bits only."""
ALL_GROUPED: frozenset[Format] = GROUPED | {
    *INT8_ASYMMETRIC.values(),
    *INT8_ASYMMETRIC_ACT_ORDER.values(),
}
