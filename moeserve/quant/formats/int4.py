"""INT4: codes 0..15, two a byte, low nibble first, with a float32 scale a group along K.

Symmetric: value = (code - 8) x scale. With zero points (`asym`): value = (code - zero) x scale, zero being
the true one (GPTQ v1 stores it less one; GPTQ may have 16). `int4_channel` has one group a row. How a writer
takes the scale is named in `RANGES`; a format made with another rule is the same format.

Activation order (`act_order`): groups are not runs of columns. The part `order` holds each column's group,
the `g_idx` of the files; columns stay where the model has them, so activations need no permutation, and a
kernel that wants contiguous groups sorts by it (stable) in its own layout. Gate and up of an expert share
their inputs and hence one order. A matrix cut along K needs contiguous groups, so a loader that cuts `down`
sorts its columns by group, and the rows of gate and up with them, and is left with the plain format.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from moeserve.quant.bits import pack_nibbles, pick_pairs
from moeserve.quant.blocks import Blocks
from moeserve.quant.elements import table
from moeserve.quant.format import WHOLE, Format, Part, Parts
from moeserve.quant.formats.ordered import ORDER, each_column, with_order

MIDDLE = 8
AMAX_FLOOR = 1e-5

RANGES: dict[str, float] = {"full": 7.0, "wide": 7.5}
"""Divisors of amax in symmetric formats. full: -8 is unused (AWQ without zero points). wide: GPTQ and
compressed-tensors, where +amax saturates to 7; finer, and not idempotent."""

CODES = Part("codes", torch.uint8, 1, 2)


def _clamped(steps: Tensor, zero: int) -> Tensor:
    """Codes of integral steps; of NaN the code of zero, which a scale that is not finite decodes to NaN."""
    return steps.nan_to_num_(nan=float(zero)).clamp_(0, 15).to(torch.uint8)


def _encode_symmetric(blocks: Blocks, largest: float, x: Tensor) -> Parts:
    x = x.float()
    scale = blocks.amax(x).clamp_min(AMAX_FLOOR).div_(largest)
    return pack_nibbles(_clamped(blocks.divide(x, scale).round_().add_(MIDDLE), MIDDLE)), scale


def _encode_asymmetric(blocks: Blocks, x: Tensor) -> Parts:
    x = x.float()
    low, high = blocks.bounds(x)
    scale = high.sub_(low).clamp_min_(AMAX_FLOOR).div_(15)
    zero = (-low / scale).round_().nan_to_num_(nan=0.0)
    steps = blocks.subtract(blocks.divide(x, scale).round_(), -zero)
    return pack_nibbles(_clamped(steps, 0)), scale, zero.to(torch.uint8)


def _decode_symmetric(blocks: Blocks, parts: Parts, shape: torch.Size) -> Tensor:
    return blocks.multiply_(signed_values(parts[0], shape[-1]), parts[1])


def signed_values(codes: Tensor, columns: int) -> Tensor:
    """code - 8 of packed codes: float32 `[..., columns]`."""
    return pick_pairs(table("int4", codes.device), codes, columns)


def _decode_asymmetric(blocks: Blocks, parts: Parts, shape: torch.Size) -> Tensor:
    codes, scale, zero = parts
    offset = zero.float() - MIDDLE
    return blocks.multiply_(blocks.subtract(signed_values(codes, shape[-1]), offset), scale)


def _decode_ordered(parts: Parts, shape: torch.Size) -> Tensor:
    codes, *scales, order = parts
    if any(size == 0 for size in shape):
        return torch.zeros(shape, device=codes.device)
    scale, *zero = each_column(tuple(scales), order, shape)
    values = signed_values(codes, shape[-1])
    return (values - (zero[0] - MIDDLE) if zero else values) * scale


def int4(group: int, *, asymmetric: bool = False, act_order: bool = False, span: str | None = None) -> Format:
    """INT4 in groups of `group` columns (WHOLE: one a row): `int4_group128`, `int4_asym_channel`, ...

    `span` names the writer's rule of `RANGES` in symmetric formats ("full" unless given). ValueError: an
    unknown rule, a rule for zero points, a group that is neither positive nor WHOLE, or activation order of
    one group.
    """
    if group != WHOLE and group < 1:
        raise ValueError(f"group={group} must be positive, or {WHOLE} for one group a row")
    if act_order and group == WHOLE:
        raise ValueError("activation order needs groups; with one group a row it changes nothing")
    if span is not None and (asymmetric or span not in RANGES):
        raise ValueError(f"unknown rule span={span!r}; symmetric formats know {', '.join(RANGES)}")
    blocks = Blocks(1, group)
    name = f"int4{'_asym' if asymmetric else ''}_{'channel' if group == WHOLE else f'group{group}'}"
    parts = [CODES, Part("scale", torch.float32, 1, group)]
    encode: Callable[[Tensor], Parts] = partial(_encode_symmetric, blocks, RANGES[span or "full"])
    decode: Callable[[Parts, torch.Size], Tensor] = partial(_decode_symmetric, blocks)
    if asymmetric:
        parts.append(Part("zero", torch.uint8, 1, group))
        encode, decode = partial(_encode_asymmetric, blocks), partial(_decode_asymmetric, blocks)
    if act_order:
        name += "_act_order"
        parts.append(ORDER)
        encode, decode = partial(with_order, encode, group), _decode_ordered
    return Format(name, 4, tuple(parts), encode, decode)


GROUPS = (32, 64, 128)

INT4 = {group: int4(group) for group in (*GROUPS, WHOLE)}
INT4_ASYMMETRIC = {group: int4(group, asymmetric=True) for group in (*GROUPS, WHOLE)}
INT4_ACT_ORDER = {group: int4(group, act_order=True) for group in GROUPS}
INT4_ASYMMETRIC_ACT_ORDER = {group: int4(group, asymmetric=True, act_order=True) for group in GROUPS}
