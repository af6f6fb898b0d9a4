"""The table of number formats: one file a format, one line here."""

from moeserve.quant.format import Format
from moeserve.quant.formats.floats import BF16, FP16, FP32
from moeserve.quant.formats.fp8 import FP8_BLOCK, FP8_GROUP

FORMATS: dict[str, Format] = {f.name: f for f in (FP32, BF16, FP16, FP8_BLOCK, FP8_GROUP)}


def format_named(name: str) -> Format:
    """The format called `name`. Raises ValueError, with the names there are."""
    if name not in FORMATS:
        raise ValueError(f"unknown number format {name!r}; known: {', '.join(sorted(FORMATS))}")
    return FORMATS[name]
