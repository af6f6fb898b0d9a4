"""Codes in the order in which a tile of products reads them: 32-bit words for our portable kernel.

Pairs of codes, neighbours along K, come out of a word (of three words for six-bit codes) by a shift and a
mask, as two bf16 in one register: the bits of a small float moved to where bf16 has them, or an integer as it
is, which bf16 reads as so many times 2^-133. Of P pairs a word, four words side by side hold 8 P columns,
pair i of word c the columns 8 i + 2 c and the next: so a tensor core's threads hold an operand, and nothing
passes between them. Products of fp16 read integers likewise, as so many times 2^-24.

Codes `[N, K]` become int32 `[N, width]`, with columns of zeros up to a multiple of 256; signed integers are
counted from their lowest. Scales and zero points of groups become `[groups, N]`; scales of a whole row, of
blocks and of the matrix stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moeserve.quant.bits import pack_nibbles, pack_sextets, sextet_words, unpack_nibbles
from moeserve.quant.format import WHOLE, Format, Part
from moeserve.quant.formats import FORMATS, mx
from moeserve.quant.formats.int4_fp8 import INT4_FP8
from moeserve.quant.formats.nvfp4 import NVFP4, NVFP4_E4M3
from moeserve.quant.layout import Rearrangement, TensorMove, must_divide
from moeserve.quant.layouts.integers import ALL_GROUPED
from moeserve.quant.layouts.pieces import pieces

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

WORDS = {name: name for name in FIELDS} | {"signed_int4": "int4"}
"""How the elements that are held in words are held."""

SEXTETS = frozenset({"e3m2", "e2m3"})

ELEMENTS: dict[Format, str] = {
    mx.MXFP4: "e2m1",
    NVFP4: "e2m1",
    mx.MXFP6_E3M2: "e3m2",
    mx.MXFP6_E2M3: "e2m3",
    mx.MXINT8: "int8_64ths",
    INT4_FP8: "signed_int4",
    **{form: "int4" for form in ALL_GROUPED if form.bits == 4},
}
"""Elements whose dtype does not tell what they are: codes packed in bytes, and integers of 64ths."""

ELEMENT_OF = {
    torch.bfloat16: "float",
    torch.float16: "float",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e4m3fnuz: "e4m3fnuz",
    torch.float8_e5m2: "e5m2",
    torch.int8: "int8",
}


def element_of(form: Format) -> str | None:
    """What the codes of `form` are. None for float32, which is no code, and for bytes that no table names."""
    return ELEMENTS.get(form, ELEMENT_OF.get(form.dtype))


def pack_words(element: str, codes: Tensor) -> Tensor:
    """`codes [N, K]` uint8 -> words `[N, width]` int32, with columns of zeros up to a multiple of `DEPTH`."""
    fields = FIELDS[element]
    codes = F.pad(codes, (0, -codes.shape[1] % DEPTH))
    blocks = codes.view(len(codes), codes.shape[1] // (8 * len(fields)), len(fields), 4, 2)
    words = torch.zeros((*blocks.shape[:2], _planes(element), 4), dtype=torch.int32, device=codes.device)
    for i, pair in enumerate(fields):
        for side in (0, 1):
            code = blocks[:, :, i, :, side].int()
            for low, bits, place in pair:
                words[:, :, place // 16] |= (code >> low & (1 << bits) - 1) << (place % 16 + 16 * side)
    return words.flatten(1)


def unpack_words(element: str, words: Tensor, columns: int) -> Tensor:
    """The inverse of `pack_words`: uint8 `[N, columns]`."""
    fields, planes = FIELDS[element], _planes(element)
    held = words.view(len(words), words.shape[1] // (4 * planes), planes, 4)
    shape = (*held.shape[:2], len(fields), 4, 2)
    codes = torch.zeros(shape, dtype=torch.uint8, device=words.device)
    for i, pair in enumerate(fields):
        for side in (0, 1):
            for low, bits, place in pair:
                code = held[:, :, place // 16] >> (place % 16 + 16 * side) & (1 << bits) - 1
                codes[:, :, i, :, side] |= (code << low).to(torch.uint8)
    return codes.view(len(words), held.shape[1] * 8 * len(fields))[:, :columns]


def _planes(element: str) -> int:
    """Words that hold one row of pairs."""
    return 1 + max(place for pair in FIELDS[element] for _, _, place in pair) // 16


def code_bytes(element: str, stored: Tensor, columns: int) -> Tensor:
    """Codes `[N, columns]` uint8 of `stored` ones, integers counted from their lowest."""
    if element in SEXTETS:
        two = sextet_words(stored, columns)
        return torch.stack((two & 63, two >> 6), dim=-1).flatten(-2)[:, :columns].to(torch.uint8)
    if element in {"e4m3", "int8"}:
        codes = stored.view(torch.uint8)
        return codes ^ 128 if element == "int8" else codes
    nibbles = unpack_nibbles(stored, columns)
    return nibbles ^ 8 if element == "signed_int4" else nibbles


def stored_codes(element: str, codes: Tensor) -> Tensor:
    """The inverse of `code_bytes`, as bytes."""
    if element in SEXTETS:
        return pack_sextets(codes)
    if element in {"e4m3", "int8"}:
        return codes ^ 128 if element == "int8" else codes
    return pack_nibbles(codes ^ 8 if element == "signed_int4" else codes)


@dataclass(frozen=True)
class WordCodes:
    """Codes of an element along K = `columns`, `[..., N, *]`, as words `[..., N, width]`."""

    element: str
    columns: int

    def forward(self, stored: Tensor) -> Tensor:
        """The words. ValueError: six-bit codes that end within three bytes."""
        if self.element in SEXTETS:
            must_divide("columns", self.columns, 4)
        held = WORDS[self.element]
        groups = -(-self.columns // DEPTH) * DEPTH // (8 * len(FIELDS[held]))
        shape = (*stored.shape[:-1], groups * 4 * _planes(held))
        words = torch.empty(shape, dtype=torch.int32, device=stored.device)
        for matrix, rows in pieces(stored, 1):
            codes = code_bytes(self.element, stored[matrix][rows], self.columns)
            words[matrix][rows] = pack_words(held, codes)
        return words

    def back(self, moved: Tensor, like: Tensor) -> Tensor:
        """Returns the codes that the words hold."""
        found = torch.empty(like.shape, dtype=torch.uint8, device=moved.device)
        for matrix, rows in pieces(found, 1):
            codes = unpack_words(WORDS[self.element], moved[matrix][rows], self.columns)
            found[matrix][rows] = stored_codes(self.element, codes)
        return found.view(like.dtype)


@dataclass(frozen=True)
class ByGroup:
    """Numbers of groups `[..., N, G]` as `[..., G, N]`, with zeros to a multiple of `multiple` groups."""

    multiple: int

    def forward(self, stored: Tensor) -> Tensor:
        """Returns the scales with groups first, contiguous."""
        plain = stored.view(torch.uint8) if stored.dtype.itemsize == 1 else stored
        padded = F.pad(plain, (0, -plain.shape[-1] % self.multiple))
        return padded.mT.contiguous().view(stored.dtype)

    def back(self, moved: Tensor, like: Tensor) -> Tensor:
        """Rows first, without the zeros."""
        return moved[..., : like.shape[-1], :].mT.contiguous()


def _element(form: Format) -> str | None:
    """The element of a format that is held in words; None where it is not."""
    narrow = all(part.dtype.itemsize == 1 for part in form.parts if part.name == "zero")
    element = element_of(form)
    return element if element in WORDS and narrow and form != NVFP4_E4M3 else None


def _layout(element: str, formats: frozenset[Format]) -> Rearrangement:
    def moves(part: Part, shape: torch.Size) -> Sequence[TensorMove]:
        if part.name == "codes":
            return (WordCodes(element, shape[-1]),)
        if part.rows != 1 or (part.columns == WHOLE and part.name != "zero"):
            return ()
        return (ByGroup(1 if part.columns == WHOLE else DEPTH // int(part.columns)),)

    return Rearrangement(f"word_codes_{element}", formats, moves)


HELD = {form: element for form in FORMATS.values() if (element := _element(form)) is not None}
"""Formats that are held in words, and their elements."""

ENTRIES = tuple(
    _layout(element, frozenset(form for form, own in HELD.items() if own == element))
    for element in sorted(set(HELD.values()))
)
