"""The table of number formats: one file a family, one line here a format."""

from moeserve.quant.format import Format
from moeserve.quant.formats import floats, fp8, int4, int4_fp8, int8, int8_grouped, mx, nvfp4
from moeserve.quant.formats.floats import BF16, FP16, FP32
from moeserve.quant.formats.fp8 import FP8_BLOCK, FP8_GROUP

FORMATS: dict[str, Format] = {
    form.name: form
    for form in (
        FP32,
        BF16,
        FP16,
        fp8.FP8_TENSOR,
        fp8.FP8_CHANNEL,
        fp8.FP8_TOKEN,
        fp8.FP8_BLOCK,
        fp8.FP8_GROUP,
        fp8.FP8_GROUP64,
        fp8.FP8_BLOCK_UE8M0,
        fp8.FP8_GROUP_UE8M0,
        fp8.FP8_E5M2,
        fp8.FP8_E4M3FNUZ,
        int8.INT8_TENSOR,
        int8.INT8_CHANNEL,
        int8.INT8_TOKEN,
        int8.INT8_TOKEN_ASYMMETRIC,
        int8.INT8_GROUP32,
        int8.INT8_GROUP64,
        int8.INT8_GROUP128,
        *int8_grouped.INT8_ASYMMETRIC.values(),
        *int8_grouped.INT8_ACT_ORDER.values(),
        *int8_grouped.INT8_ASYMMETRIC_ACT_ORDER.values(),
        *int4.INT4.values(),
        *int4.INT4_ASYMMETRIC.values(),
        *int4.INT4_ACT_ORDER.values(),
        *int4.INT4_ASYMMETRIC_ACT_ORDER.values(),
        int4_fp8.INT4_FP8,
        mx.MXFP4,
        mx.MXFP6_E3M2,
        mx.MXFP6_E2M3,
        mx.MXFP8,
        mx.MXFP8_E5M2,
        mx.MXINT8,
        nvfp4.NVFP4,
        nvfp4.NVFP4_E4M3,
    )
}
"""Every format that stores its own scales, by name."""

WIRES: dict[str, Format] = {
    form.name: form
    for form in (
        FP32,
        BF16,
        FP16,
        fp8.FP8_TOKEN,
        fp8.FP8_GROUP,
        fp8.FP8_GROUP_UE8M0,
        int8.INT8_TOKEN,
        int8.INT8_TOKEN_ASYMMETRIC,
        mx.MXFP4,
        mx.MXFP6_E3M2,
        mx.MXFP6_E2M3,
        mx.MXFP8,
    )
}
"""Formats that activations travel in, by name: row-wise all of them. The other row-wise ones hold weights."""

STATIC: dict[str, Format] = {
    form.name: form for form in (fp8.FP8_STATIC, int8.INT8_STATIC, nvfp4.NVFP4_STATIC)
}
"""Activation formats whose scale is a constant of the checkpoint: no wire until `given` binds it."""

__all__ = [
    "BF16",
    "FORMATS",
    "FP8_BLOCK",
    "FP8_GROUP",
    "FP16",
    "FP32",
    "STATIC",
    "WIRES",
    "floats",
    "format_named",
]


def format_named(name: str) -> Format:
    """The format called `name`. Raises ValueError, with the names there are."""
    if name not in FORMATS:
        raise ValueError(f"unknown number format {name!r}; known: {', '.join(sorted(FORMATS))}")
    return FORMATS[name]
