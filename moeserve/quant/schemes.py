"""The table of schemes: which weights are computed with which activations, and the names of OCP MX.

Weight-only schemes stand with BF16 activations; a model in another plain float takes its own. A dynamic
per-tensor activation scale is served a token at a time: rows of one tensor meet rows of other callers here,
and an answer must not depend on them. The finer scale is never the worse one.
"""

from __future__ import annotations

from moeserve.quant.format import Format, Scheme
from moeserve.quant.formats.floats import BF16, FLOATS
from moeserve.quant.formats.fp8 import (
    FP8_BLOCK,
    FP8_BLOCK_UE8M0,
    FP8_CHANNEL,
    FP8_GROUP,
    FP8_GROUP64,
    FP8_GROUP_UE8M0,
    FP8_STATIC,
    FP8_TENSOR,
    FP8_TOKEN,
)
from moeserve.quant.formats.int4 import INT4, INT4_ACT_ORDER, INT4_ASYMMETRIC, INT4_ASYMMETRIC_ACT_ORDER
from moeserve.quant.formats.int4_fp8 import INT4_FP8
from moeserve.quant.formats.int8 import (
    INT8_CHANNEL,
    INT8_GROUP32,
    INT8_GROUP64,
    INT8_GROUP128,
    INT8_STATIC,
    INT8_TENSOR,
    INT8_TOKEN,
    INT8_TOKEN_ASYMMETRIC,
)
from moeserve.quant.formats.int8_grouped import INT8_ACT_ORDER, INT8_ASYMMETRIC, INT8_ASYMMETRIC_ACT_ORDER
from moeserve.quant.formats.mx import MXFP4, MXFP6_E2M3, MXFP6_E3M2, MXFP8, MXFP8_E5M2, MXINT8
from moeserve.quant.formats.nvfp4 import NVFP4, NVFP4_E4M3, NVFP4_STATIC

OCP_MX: dict[str, Scheme] = {
    "w_mxfp4": Scheme(MXFP4, BF16),
    "w_mxfp4_a_mxfp4": Scheme(MXFP4, MXFP4),
    "w_mxfp4_a_mxfp6_e3m2": Scheme(MXFP4, MXFP6_E3M2),
    "w_mxfp4_a_mxfp6_e2m3": Scheme(MXFP4, MXFP6_E2M3),
    "w_mxfp4_a_fp8": Scheme(MXFP4, FP8_STATIC),
    "w_mxfp6_e3m2": Scheme(MXFP6_E3M2, BF16),
    "w_mxfp6_e3m2_a_mxfp6_e3m2": Scheme(MXFP6_E3M2, MXFP6_E3M2),
    "w_mxfp6_e3m2_a_fp8": Scheme(MXFP6_E3M2, FP8_STATIC),
    "w_mxfp6_e2m3": Scheme(MXFP6_E2M3, BF16),
    "w_mxfp6_e2m3_a_mxfp6_e2m3": Scheme(MXFP6_E2M3, MXFP6_E2M3),
    "w_mxfp6_e2m3_a_fp8": Scheme(MXFP6_E2M3, FP8_STATIC),
}
"""The scheme strings of OCP MX checkpoints; any other pair with an MX member has no scheme."""

OCP_MX_DTYPES: dict[str, Format] = {
    "mxfp4": MXFP4,
    "mxfp6_e3m2": MXFP6_E3M2,
    "mxfp6_e2m3": MXFP6_E2M3,
    "mxfp8_e4m3": MXFP8,
    "mxfp8_e5m2": MXFP8_E5M2,
    "mxint8": MXINT8,
}
"""The names OCP MX has for elements; only the first three occur in scheme strings."""

_INT4 = [
    *INT4.values(),
    *INT4_ASYMMETRIC.values(),
    *INT4_ACT_ORDER.values(),
    *INT4_ASYMMETRIC_ACT_ORDER.values(),
]

WEIGHT_ONLY: tuple[Format, ...] = (
    FP8_TENSOR,
    FP8_CHANNEL,
    FP8_BLOCK,
    FP8_BLOCK_UE8M0,
    INT8_TENSOR,
    INT8_CHANNEL,
    INT8_GROUP32,
    INT8_GROUP64,
    INT8_GROUP128,
    *INT8_ASYMMETRIC.values(),
    *INT8_ACT_ORDER.values(),
    *INT8_ASYMMETRIC_ACT_ORDER.values(),
    *_INT4,
    MXFP4,
    MXFP6_E3M2,
    MXFP6_E2M3,
    MXFP8,
    NVFP4,
)
"""Weights that are computed with activations as they are."""

_PAIRS: tuple[tuple[Format, Format], ...] = (
    (FP8_TENSOR, FP8_STATIC),
    (FP8_TENSOR, FP8_TOKEN),
    (FP8_CHANNEL, FP8_TOKEN),
    (FP8_CHANNEL, FP8_STATIC),  # also per-tensor halves of gate_up that differ in scale, unrounded
    (FP8_BLOCK, FP8_GROUP),
    (FP8_BLOCK, FP8_GROUP64),
    (FP8_GROUP, FP8_GROUP),  # 128x128 blocks where gate and up do not fill theirs
    (FP8_BLOCK_UE8M0, FP8_GROUP_UE8M0),
    (INT8_TENSOR, INT8_STATIC),
    (INT8_TENSOR, INT8_TOKEN),
    (INT8_CHANNEL, INT8_TOKEN),
    (INT8_CHANNEL, INT8_TOKEN_ASYMMETRIC),
    (INT8_CHANNEL, INT8_STATIC),
    (INT8_GROUP128, INT8_GROUP128),
    *((form, activations) for form in INT4.values() for activations in (INT8_TOKEN, FP8_TOKEN)),
    (INT4_FP8, FP8_TOKEN),
    (MXFP4, MXFP8),
    (MXFP4, FP8_TOKEN),
    (MXFP4, FP8_GROUP),
    (MXFP8, MXFP8),
    (NVFP4, NVFP4_STATIC),
    (NVFP4, FP8_GROUP),
    (NVFP4_E4M3, FP8_GROUP),
)

SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        *(Scheme(form, form) for form in FLOATS.values()),
        *(Scheme(form, BF16) for form in WEIGHT_ONLY),
        *(Scheme(weights, activations) for weights, activations in _PAIRS),
        *OCP_MX.values(),
    )
}
"""Every scheme by its name: `fp8_block128 x fp8_group128`, `nvfp4 x nvfp4_static`, `mxfp4 x bf16`, ..."""


def scheme_named(name: str) -> Scheme:
    """The scheme called `name`, our name or an OCP MX string. ValueError, with the names there are."""
    known = SCHEMES | OCP_MX
    if name not in known and (reason := _no_ocp_mx(name)) is not None:
        raise ValueError(reason)
    if name not in known:
        raise ValueError(f"unknown scheme {name!r}; known: {', '.join(sorted(known))}")
    return known[name]


def _no_ocp_mx(name: str) -> str | None:
    """Why a string of two OCP MX dtypes names no scheme, or None where it is no such string."""
    weights, _, activations = name.removeprefix("w_").partition("_a_")
    members = {*OCP_MX_DTYPES, "fp8"}
    if not name.startswith("w_") or weights not in OCP_MX_DTYPES or activations not in {*members, ""}:
        return None
    return (
        f"{name} is no scheme: OCP MX weights {weights} do not run with activations "
        f"{activations or 'as they are'}; the pairs that do are {', '.join(OCP_MX)}"
    )
