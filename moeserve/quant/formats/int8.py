"""INT8: two's complement codes with float32 scales: one a tensor, a row, or a group along K.

value = code x scale. How a quotient becomes an integer differs between producers and kernels and is named in
`ROUNDINGS`; a format made with another rule is the same format. Weights scale by amax / 127 here, and by
amax / 127.5 as compressed-tensors writes them, where -128 occurs. NaN, which integers lack, gives its block
a NaN scale. An all-zero block takes the floor as its scale.

Asymmetric activations (`int8_token_asym`, "azp"): value = (code - zero) x scale, with scale = (max - min) /
255 and zero = round(-128 - min / scale), an int32, since the range need not hold 0. A row of one value, whose
range is nothing, takes amax x 2^-22 as its scale: the value is then a whole number of steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from moeserve.quant.blocks import Blocks
from moeserve.quant.format import WHOLE, Format, Part, Parts
from moeserve.quant.static import static_format, there

AMAX_FLOOR = 1e-10


def half_away(x: Tensor) -> Tensor:
    """Rounds to nearest, halves away from zero, as exact float32: 2.5 -> 3."""
    below_half = 0.5 - 2**-25  # with 0.5 itself, the float32 next below a half would round up
    return x.sign().mul_(below_half).add_(x).trunc_()


ROUNDINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "half_even": torch.round,
    "half_away": half_away,
    "truncate": torch.trunc,
}
"""half_even: weights, CUDA activations. half_away: Triton per-token. truncate: vLLM's activation groups."""

LARGEST = {"full": 127.0, "wide": 127.5}
"""Divisors of amax: full leaves -128 unused; wide (compressed-tensors) uses it and saturates +amax."""


def codes_of(quotient: Tensor, rounding: str) -> Tensor:
    """INT8 codes, saturated to -128..127; 0 for NaN."""
    return ROUNDINGS[rounding](quotient).nan_to_num_(nan=0.0).clamp_(-128, 127).to(torch.int8)


def _encode(blocks: Blocks, rounding: str, largest: float, x: Tensor) -> Parts:
    x = x.float()
    scale = blocks.amax(x).clamp_min(AMAX_FLOOR).div_(largest)
    return codes_of(blocks.divide(x, scale), rounding), scale


def _decode(blocks: Blocks, parts: Parts, shape: torch.Size) -> Tensor:
    return blocks.multiply_(parts[0].float(), parts[1])


CODES = Part("codes", torch.int8, 1, 1)


def _int8(name: str, blocks: Blocks, rounding: str, span: str) -> Format:
    for rule, table in ((rounding, ROUNDINGS), (span, LARGEST)):
        if rule not in table:
            raise ValueError(f"unknown rule {rule!r} of {name}; known: {', '.join(table)}")
    parts = (CODES, Part("scale", torch.float32, blocks.rows, blocks.columns))
    encode = partial(_encode, blocks, rounding, LARGEST[span])
    return Format(name, 8, parts, encode, partial(_decode, blocks))


def int8_channel(rounding: str = "half_even", span: str = "full") -> Format:
    """Weights with a scale an output row. ValueError: an unknown rule."""
    return _int8("int8_channel", Blocks(1, WHOLE), rounding, span)


def int8_token(rounding: str = "half_away") -> Format:
    """Activations with a scale a token, rounded as the fused MoE kernels do. ValueError: an unknown rule."""
    return _int8("int8_token", Blocks(1, WHOLE), rounding, "full")


def int8_group(group: int, rounding: str = "half_even", span: str = "full") -> Format:
    """A scale a group of `group` columns. ValueError: an unknown rule or a group that is not positive."""
    if group < 1:
        raise ValueError(f"group={group} must be positive; one scale a row is int8_channel")
    return _int8(f"int8_group{group}", Blocks(1, group), rounding, span)


NARROWEST = 2.0**-22
"""Smallest scale of a row with a zero point, in its amax: code and zero stay exact in float32."""


def _encode_asymmetric(x: Tensor) -> Parts:
    x = x.float()
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    narrow = torch.maximum(low.abs(), high.abs()).clamp_min(AMAX_FLOOR).mul_(NARROWEST)
    scale = torch.maximum((high - low).div_(255), narrow)
    zero = (-128 - low / scale).round_().nan_to_num_(nan=0.0)
    steps = (x / scale).round_().add_(zero)
    return codes_of(steps, "half_even"), scale, zero.to(torch.int32)


def _decode_asymmetric(parts: Parts, shape: torch.Size) -> Tensor:
    codes, scale, zero = parts
    return (codes.float() - zero.float()).mul_(scale)


INT8_TENSOR = _int8("int8_tensor", Blocks(WHOLE, WHOLE), "half_even", "full")
INT8_CHANNEL, INT8_TOKEN = int8_channel(), int8_token()
INT8_TOKEN_ASYMMETRIC = Format(
    "int8_token_asym",
    8,
    (CODES, Part("scale", torch.float32, 1, WHOLE), Part("zero", torch.int32, 1, WHOLE)),
    _encode_asymmetric,
    _decode_asymmetric,
)
"""Activations with a scale and a zero point a token."""
INT8_GROUP32, INT8_GROUP64, INT8_GROUP128 = int8_group(32), int8_group(64), int8_group(128)


def _encode_given(scale: Tensor, x: Tensor) -> Parts:
    return (codes_of(x.float() / there(scale, x.device), "half_even"),)


def _decode_given(scale: Tensor, parts: Parts, shape: torch.Size) -> Tensor:
    return parts[0].float() * there(scale, parts[0].device)


def int8_given(scale: Tensor) -> Format:
    """Activations with the checkpoint's one scale (float32, one value). NaN becomes 0."""
    scale = scale.float().reshape(())
    return replace(INT8_STATIC, encode=partial(_encode_given, scale), decode=partial(_decode_given, scale))


INT8_STATIC = static_format("int8_static", 8, (CODES,), int8_given)
