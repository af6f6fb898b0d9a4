"""Codes in the order in which a tile of products reads them: `pack`, and what becomes of their scales.

A row of weights is words of 32 bits. Pairs of codes, neighbours along K, come out of a word (of three words
for six-bit codes) by a shift and a mask, as two bf16 in one register: the bits of a small float moved to
where bf16 has them, or an integer as it is, which bf16 reads as so many times 2^-133. Of P pairs a word, four
words side by side hold 8 P columns, pair i of word c the columns 8 i + 2 c and the next: so a tensor core's
threads hold an operand, and nothing passes between them. Products of fp16 read integers likewise, as so many
times 2^-24.

What constants and the largest scale of a row take away, one float32 a row gives back to the sum.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moeserve.experts.kernels.stored import Stored
from moeserve.quant.bits import sextet_words, unpack_nibbles
from moeserve.quant.elements import decode_e8m0, decode_fp8
from moeserve.quant.format import Packed

DEPTH = 256
"""Columns are padded to a multiple of this many."""

FIELDS: dict[str, tuple[tuple[tuple[int, int, int], ...], ...]] = {
    "int4": tuple(((0, 4, 4 * i),) for i in range(4)),
    "int8": tuple(((0, 8, 8 * i),) for i in range(2)),
    "e4m3": (((0, 7, 4), (7, 1, 15)), ((0, 4, 0), (4, 3, 12), (7, 1, 11))),
    "e2m1": (
        ((0, 3, 6), (3, 1, 15)),
        ((0, 3, 3), (3, 1, 12)),
        ((0, 3, 0), (3, 1, 9)),
        ((0, 2, 10), (2, 1, 13), (3, 1, 14)),
    ),
    "e3m2": (
        *(((0, 5, 16 * i + 5), (5, 1, 16 * i + 15)) for i in range(3)),
        *(((0, 5, 16 * i), (5, 1, 16 * i + 10)) for i in range(3)),
        ((1, 4, 11), (0, 1, 45), (5, 1, 46)),
        ((1, 4, 27), (0, 1, 43), (5, 1, 44)),
    ),
    "e2m3": (
        *(((0, 5, 16 * i + 4), (5, 1, 16 * i + 15)) for i in range(3)),
        *(((0, 5, 16 * i + 9), (5, 1, 16 * i + 14)) for i in range(3)),
        ((1, 4, 0), (0, 1, 35), (5, 1, 34)),
        ((1, 4, 16), (0, 1, 33), (5, 1, 32)),
    ),
}
"""Where the half word of each pair has a code's bits: (lowest bit, how many, place), 16 places a word."""

LARGEST = {torch.bfloat16: 127, torch.float32: 127, torch.float16: 15}
"""Exponent of the largest power of two in a dtype of products; a row's scales are held just below it."""

WORDS = {name: name for name in FIELDS} | {"signed_int4": "int4"}
"""How the elements that are held in words are held."""

UP = {"int4": 133, "int8": 133, "e4m3": 120, "e2m1": 126, "e3m2": 124, "e2m3": 126}
"""Bits moved to bf16 are 2^-UP times the element."""

UP_FP16 = {"int4": 24, "int8": 24}


def holds(stored: Stored, dtype: torch.dtype) -> bool:
    """Whether products of `dtype` take a format from words; float32 stands for bf16 under the interpreter."""
    elements = UP_FP16 if dtype == torch.float16 else UP
    narrow = stored.zero is None or stored.zero.dtype.itemsize == 1  # zero points are codes themselves
    return dtype in LARGEST and narrow and WORDS.get(stored.element) in elements


def pack(element: str, codes: Tensor) -> Tensor:
    """`codes [N, K]` uint8 -> words `[N, width]` int32, with columns of zeros up to a multiple of `DEPTH`."""
    fields = FIELDS[element]
    codes = F.pad(codes, (0, -codes.shape[1] % DEPTH))
    blocks = codes.view(len(codes), codes.shape[1] // (8 * len(fields)), len(fields), 4, 2)
    planes = 1 + max(place for pair in fields for _, _, place in pair) // 16
    words = torch.zeros((*blocks.shape[:2], planes, 4), dtype=torch.int32, device=codes.device)
    for i, pair in enumerate(fields):
        for side in (0, 1):
            code = blocks[:, :, i, :, side].int()
            for low, bits, place in pair:
                words[:, :, place // 16] |= (code >> low & (1 << bits) - 1) << (place % 16 + 16 * side)
    return words.flatten(1)


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
    codes = _codes(stored.element, packed.parts[0], packed.shape[1])
    groups = -(-packed.shape[1] // DEPTH) * DEPTH // stored.span if stored.span else 1
    made = {"codes": pack(element, codes)}
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


def _codes(element: str, codes: Tensor, columns: int) -> Tensor:
    """Codes `[N, columns]` uint8, integers counted from their lowest."""
    if element in {"e3m2", "e2m3"}:
        two = sextet_words(codes, columns)
        return torch.stack((two & 63, two >> 6), dim=-1).flatten(-2)[:, :columns].to(torch.uint8)
    if element in {"e4m3", "int8"}:
        codes = codes.view(torch.uint8)
        return codes ^ 128 if element == "int8" else codes
    nibbles = unpack_nibbles(codes, columns)
    return nibbles ^ 8 if element == "signed_int4" else nibbles


def _values(scale: Tensor) -> Tensor:
    """Scales as float64."""
    if scale.dtype == torch.float32:
        return scale.double()
    return (decode_e8m0(scale) if scale.dtype == torch.uint8 else decode_fp8(scale)).double()


def _by_group(values: Tensor, groups: int) -> Tensor:
    """`values [N, G]` as `[groups, N]`, those that are missing 0."""
    return F.pad(values, (0, groups - values.shape[1])).T.contiguous()
