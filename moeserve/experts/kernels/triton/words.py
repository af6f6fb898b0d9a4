"""Weights in words, as a tile of products reads them: codes as `word_codes.py` orders them, scales beside.

What constants and the largest scale of a row take away, one float32 a row gives back to the sum.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moeserve.experts.kernels.triton.stored import Stored
from moeserve.quant.elements import decode_e8m0, decode_fp8
from moeserve.quant.format import Packed
from moeserve.quant.layouts.word_codes import DEPTH, WORDS, code_bytes, pack_words

LARGEST = {torch.bfloat16: 127, torch.float32: 127, torch.float16: 15}
"""Exponent of the largest power of two in a dtype of products; a row's scales are held just below it."""

UP = {"int4": 133, "int8": 133, "e4m3": 120, "e2m1": 126, "e3m2": 124, "e2m3": 126}
"""Bits moved to bf16 are 2^-UP times the element."""

UP_FP16 = {"int4": 24, "int8": 24}


def holds(stored: Stored, dtype: torch.dtype) -> bool:
    """Whether products of `dtype` take a format from words; float32 stands for bf16 under the interpreter."""
    elements = UP_FP16 if dtype == torch.float16 else UP
    narrow = stored.zero is None or stored.zero.dtype.itemsize == 1  # zero points are codes themselves
    return dtype in LARGEST and narrow and WORDS.get(stored.element) in elements


def of_packed(stored: Stored, packed: Packed, dtype: torch.dtype) -> dict[str, Tensor]:
    """A stack of matrices for products of `dtype`: `codes [e, N, width]` int32 and `outer [e, N]` float32.

    Scales of blocks multiply sums and stay as they are stored. Other fine scales are `[e, groups, N]`,
    rounded to 16 bits; `zero` is as large, int16: a sign and the zero point, as words have integers.
    """
    if packed.shape[0] == 0:
        one = Packed(packed.format, packed.shape[1:], tuple(t.new_zeros(t.shape[1:]) for t in packed.parts))
        return {name: t.new_empty(0, *t.shape) for name, t in _matrix(stored, one, dtype).items()}
    slots = zip(*packed.parts, strict=True)  # one at a time: codes in bytes are several times as large
    made = [_matrix(stored, Packed(packed.format, packed.shape[1:], parts), dtype) for parts in slots]
    return {name: torch.stack([one[name] for one in made]) for name in made[0]}


def _matrix(stored: Stored, packed: Packed, dtype: torch.dtype) -> dict[str, Tensor]:
    """One of a stack of matrices, `[N, K]`."""
    part = {p.name: t for p, t in zip(packed.format.parts, packed.parts, strict=True)}
    element = WORDS[stored.element]
    codes = code_bytes(stored.element, packed.parts[0], packed.shape[1])
    groups = -(-packed.shape[1] // DEPTH) * DEPTH // stored.span if stored.span else 1
    made = {"codes": pack_words(element, codes)}
    outer = torch.ones(len(codes), dtype=torch.float64, device=codes.device)
    if stored.outer is not None:
        outer = outer * part[stored.outer.name].double()[:, 0]
    if element == "e4m3":  # a sum with a NaN in it is one, and no NaN comes out of moved bits
        outer = outer.masked_fill(((codes & 127) == 127).any(-1), torch.nan)
    largest, up = LARGEST[dtype], (UP_FP16 if dtype == torch.float16 else UP)[element]
    missing = max(up - largest, 0) + torch.zeros_like(outer)
    if stored.fine is not None and stored.blocks:
        made[stored.fine.name] = part[stored.fine.name]
    elif stored.fine is not None:
        values = _values(part[stored.fine.name])
        exponent = torch.frexp(values.nan_to_num(nan=0.0, posinf=0.0).abs().amax(-1)).exponent
        missing = up - largest + exponent.double()
        values = values * torch.exp2(largest - exponent.double())[:, None]
        made[stored.fine.name] = _by_group(
            values.to(torch.float16 if dtype == torch.float16 else torch.bfloat16), groups
        )
    if stored.zero is not None:
        bits = part["zero"].int() + (128 if element == "int8" else 0)
        made["zero"] = _by_group((bits - (1 << 15)).short(), groups)
    return made | {"outer": (outer * torch.exp2(missing)).float()}


def _values(scale: Tensor) -> Tensor:
    """Returns stored scales as float64 values."""
    if scale.dtype == torch.float32:
        return scale.double()
    return (decode_e8m0(scale) if scale.dtype == torch.uint8 else decode_fp8(scale)).double()


def _by_group(values: Tensor, groups: int) -> Tensor:
    """`values [N, G]` as `[groups, N]`, those that are missing 0."""
    return F.pad(values, (0, groups - values.shape[1])).T.contiguous()
