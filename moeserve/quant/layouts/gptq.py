"""GPTQ's tensors: `qweight` int32 packed along K, `qzeros` packed along N, `scales`, `g_idx`.

`qweight [ceil(K / 8), N]` (8 bits: K / 4), `qzeros [G, ceil(N / 8)]`, `scales [G, N]`, `g_idx [K]`. Version 1
stores zero points less one, version 2 as they are. Symmetric files have zero points too, all of them the
middle, and `g_idx` counts groups where there is no activation order: both follow from the format, and
`unpack` does not read them. Scales stay float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from moeserve.quant.format import WHOLE, Packed, Part
from moeserve.quant.layout import Rearrangement, TensorMove
from moeserve.quant.layouts.integers import GROUPED
from moeserve.quant.layouts.words import (
    Less,
    Nibbles,
    OneRow,
    Turned,
    Words,
    codes,
    repeated,
    zero_points_within,
)

NAMES = {"codes": "qweight", "scale": "scales", "zero": "qzeros", "order": "g_idx"}
ONES = {4: 0x11111111, 8: 0x01010101}
"""A word of codes that are 1, by bits."""


def _bits(part: Part) -> int:
    return 4 if part.dtype == torch.uint8 else 8


def _moves(less: int, part: Part, _: torch.Size) -> Sequence[TensorMove]:
    moves: dict[str, Sequence[TensorMove]] = {
        "codes": (*codes(_bits(part)), Turned()),
        "scale": (Turned(),),
        "zero": (Less(less), Turned(), Nibbles(), Words()),
        "order": (OneRow(),),
    }
    return moves[part.name]


def _constants(less: int, packed: Packed) -> dict[str, Tensor]:
    """`qzeros` of a symmetric format, and `g_idx` where groups are runs of columns."""
    form, (*lead, n, k) = packed.format, packed.shape
    names = {part.name for part in form.parts}
    code, scale = form.parts[:2]
    bits, groups = _bits(code), scale.shape_of(packed.shape)[-1]
    found = {}
    if "zero" not in names:
        middle = ((1 << (bits - 1)) - less) * ONES[bits]
        found["qzeros"] = repeated(middle, (*lead, groups, -(-n * bits // 32)), packed.parts[0])
    if "order" not in names:
        group = k if scale.columns == WHOLE else int(scale.columns)
        counted = torch.arange(k, dtype=torch.int32, device=packed.device) // max(group, 1)
        found["g_idx"] = counted.expand(*lead, k).contiguous()
    return found


def _version(name: str, less: int) -> Rearrangement:
    return Rearrangement(
        name,
        GROUPED,
        partial(_moves, less),
        NAMES,
        check=partial(zero_points_within, name, less),
        constants=partial(_constants, less),
    )


GPTQ, GPTQ_V2 = _version("gptq", 1), _version("gptq_v2", 0)


def zero_points(words: Tensor, rows: int, bits: int, less: int) -> Tensor:
    """The true zero points of `qzeros [..., G, ceil(rows bits / 32)]`: uint8 `[..., rows, G]`."""
    shape = (*words.shape[:-1], rows)
    one_each = torch.empty(shape, dtype=torch.uint8, device="meta")
    packed = torch.empty((*words.shape[:-1], -(-rows * bits // 8)), dtype=torch.uint8, device="meta")
    stored = Words().back(words, packed)
    if bits == 4:
        stored = Nibbles().back(stored, one_each)
    return Turned().back(Less(less).back(stored, one_each), one_each.mT)
