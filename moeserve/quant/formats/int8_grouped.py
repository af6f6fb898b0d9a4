"""INT8 weights as files of packed words have them: with zero points (`asym`), and with activation order.

Zero points: value = (code - zero) x scale, both int8, with scale = (max - min) / 255 over a range that holds
zero. Activation order: as in `moeserve.quant.formats.int4`, the part `order` has each column's group and
columns stay where the model has them.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from moeserve.quant.blocks import Blocks
from moeserve.quant.format import WHOLE, Format, Part, Parts
from moeserve.quant.formats.int8 import AMAX_FLOOR, CODES, INT8_CHANNEL, codes_of, int8_group
from moeserve.quant.formats.ordered import ORDER, each_column, with_order

STEPS = 255


def _encode_asymmetric(blocks: Blocks, x: Tensor) -> Parts:
    x = x.float()
    low, high = blocks.bounds(x)
    scale = high.sub_(low).clamp_min_(AMAX_FLOOR).div_(STEPS)
    zero = (-128 - low / scale).round_().nan_to_num_(nan=0.0).clamp_(-128, 127)
    steps = blocks.subtract(blocks.divide(x, scale).round_(), -zero)
    return codes_of(steps, "half_even"), scale, zero.to(torch.int8)


def _decode_asymmetric(blocks: Blocks, parts: Parts, shape: torch.Size) -> Tensor:
    codes, scale, zero = parts
    return blocks.multiply_(blocks.subtract(codes.float(), zero.float()), scale)


def _decode_ordered(parts: Parts, shape: torch.Size) -> Tensor:
    codes, *scales, order = parts
    if any(size == 0 for size in shape):
        return torch.zeros(shape, device=codes.device)
    scale, *zero = each_column(tuple(scales), order, shape)
    values = codes.float()
    return (values - zero[0] if zero else values) * scale


def int8_asymmetric(group: int) -> Format:
    """A scale and a zero point a group of `group` columns (WHOLE: one a row). ValueError: no such group."""
    if group != WHOLE and group < 1:
        raise ValueError(f"group={group} must be positive, or {WHOLE} for one group a row")
    blocks = Blocks(1, group)
    name = f"int8_asym_{'channel' if group == WHOLE else f'group{group}'}"
    parts = (CODES, Part("scale", torch.float32, 1, group), Part("zero", torch.int8, 1, group))
    return Format(name, 8, parts, partial(_encode_asymmetric, blocks), partial(_decode_asymmetric, blocks))


def in_act_order(plain: Format, group: int) -> Format:
    """`plain`, INT8 in groups of `group` columns, with activation order."""
    encode = partial(with_order, plain.encode, group)
    return Format(f"{plain.name}_act_order", 8, (*plain.parts, ORDER), encode, _decode_ordered)


GROUPS = (32, 64, 128)

INT8 = {group: int8_group(group) for group in GROUPS} | {WHOLE: INT8_CHANNEL}
INT8_ASYMMETRIC = {group: int8_asymmetric(group) for group in (*GROUPS, WHOLE)}
INT8_ACT_ORDER = {group: in_act_order(INT8[group], group) for group in GROUPS}
INT8_ASYMMETRIC_ACT_ORDER = {group: in_act_order(INT8_ASYMMETRIC[group], group) for group in GROUPS}
