"""Grouping rows by expert and summing them home with Triton: what a dispatcher does on one rank."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moeserve.experts.batch import ExpertBatch, Grouping
from moeserve.quant.format import Format, Packed
from moeserve.quant.formats.fp8 import FP8_GROUP


@triton.jit
def place_kernel(ids, counts, offsets, places, P, B: tl.constexpr, STARTS: tl.constexpr):
    """Program e: where the pairs of expert e go, in order of arrival; STARTS: offsets are there already."""
    e = tl.program_id(0)
    before, own = 0, 0
    for at in range(0, P, B):
        i = tl.load(ids + at + tl.arange(0, B), mask=at + tl.arange(0, B) < P, other=1 << 30)
        before += tl.sum((i < e).to(tl.int32))
        own += tl.sum((i == e).to(tl.int32))
    tl.store(counts + e, own)
    if STARTS:
        before = tl.load(offsets + e)
    else:
        tl.store(offsets + e, before)
        if e == tl.num_programs(0) - 1:
            tl.store(offsets + e + 1, before + own)
    if own > 0:
        for at in range(0, P, B):
            p = at + tl.arange(0, B)
            mine = (tl.load(ids + p, mask=p < P, other=1 << 30) == e).to(tl.int32)
            tl.store(places + p, before + tl.cumsum(mine, 0) - mine, mask=mine > 0)
            before += tl.sum(mine)


@triton.jit
def _place(ids, places, P, pair, B: tl.constexpr, KNOWN: tl.constexpr):
    """Returns the place of `pair` among B >= P: behind all of lower experts and earlier ones of its own."""
    if KNOWN:
        place = tl.load(places + pair)
    else:
        p = tl.arange(0, B)
        i, own = tl.load(ids + p, mask=p < P, other=1 << 30), tl.load(ids + pair)
        place = tl.sum(((i < own) | ((i == own) & (p < pair))).to(tl.int32))
        tl.store(places + pair, place)
    return place.to(tl.int64)


@triton.jit
def _spread(x, ids, places, out, scale, t, block, P, H, c: tl.constexpr):
    """Copies a token's columns, G groups of 128 from `block` G, rounded to E4M3 if asked, to its K places."""
    G: tl.constexpr = c[1]
    g = block * G + tl.arange(0, G)
    columns = g[:, None] * 128 + tl.arange(0, 128)[None, :]
    mask = columns < H
    v = tl.load(x + t.to(tl.int64) * H + columns, mask=mask, other=0.0)
    if c[2]:
        f = v.to(tl.float32)
        s = tl.maximum(tl.max(tl.abs(f), 1), 1e-10) / 448.0
        v = tl.minimum(tl.maximum(f / s[:, None], -448.0), 448.0).to(tl.float8e4nv)
    for k in tl.static_range(c[0]):
        row = _place(ids, places, P, t * c[0] + k, c[3], c[4])
        tl.store(out + row * H + columns, v, mask=mask)
        if c[2]:
            tl.store(scale + row * (H // 128) + g, s, mask=g < H // 128)


@triton.jit
def spread_kernel(x, places, out, scale, P, H, K: tl.constexpr, G: tl.constexpr, FP8: tl.constexpr):
    """Program (token, block of G groups of 128): `_spread` to known places."""
    c: tl.constexpr = (K, G, FP8, 1, True)
    _spread(x, places, places, out, scale, tl.program_id(0), tl.program_id(1), P, H, c)


@triton.jit
def group_kernel(
    x, ids, counts, offsets, places, out, scale, E, P, H,
    K: tl.constexpr, G: tl.constexpr, FP8: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Groups at most B pairs in one launch: programs (e < E, 0) count, (E + token, block) are `_spread`."""
    e = tl.program_id(0)
    if e < E:
        if tl.program_id(1) == 0:
            i = tl.load(ids + tl.arange(0, B), mask=tl.arange(0, B) < P, other=1 << 30)
            before, own = tl.sum((i < e).to(tl.int32)), tl.sum((i == e).to(tl.int32))
            tl.store(counts + e, own)
            tl.store(offsets + e, before)
            if e == E - 1:
                tl.store(offsets + E, before + own)
    else:
        c: tl.constexpr = (K, G, FP8, B, False)
        _spread(x, ids, places, out, scale, e - E, tl.program_id(1), P, H, c)


@triton.jit
def home_kernel(y, places, weights, out, H, K: tl.constexpr, B: tl.constexpr):
    """Program (token, B columns): the weighted sum of its K rows."""
    t = tl.program_id(0)
    c = tl.program_id(1) * B + tl.arange(0, B)
    total = tl.zeros([B], tl.float32)
    for k in tl.static_range(K):
        row = tl.load(places + t * K + k).to(tl.int64)
        v = tl.load(y + row * H + c, mask=c < H, other=0.0).to(tl.float32)
        total += v * tl.load(weights + t * K + k)
    tl.store(out + t.to(tl.int64) * H + c, total.to(out.dtype.element_ty), mask=c < H)


FEW_PAIRS = 256
"""Most (token, expert) pairs that are placed and spread in one launch: each program looks at all of them."""

MOST_AT_ONCE = 32768
"""Pairs that one program holds at once."""


def group(x: Tensor, ids: Tensor, experts: int, wire: Format, align: int = 1) -> tuple[ExpertBatch, Tensor]:
    """`x [T, H]` bf16, `ids [T, K]` int32 -> the RAGGED batch of T * K rows, and each pair's row.

    Segments start at multiples of `align`, for which there is room.
    """
    (tokens, width), top_k = x.shape, ids.shape[1]
    pairs = ids.numel()
    counts, offsets = (torch.empty(experts + i, dtype=torch.int32, device=x.device) for i in (0, 1))
    if align > 1:
        offsets[:1].zero_()
        number = torch.arange(experts, dtype=torch.int32, device=x.device)
        found = (ids.view(1, -1) == number[:, None]).sum(1, dtype=torch.int32)
        torch.cumsum((found + align - 1) // align * align, 0, dtype=torch.int32, out=offsets[1:])
    places = torch.empty(pairs, dtype=torch.int32, device=x.device)
    room = pairs if align == 1 else -(-(pairs + min(pairs, experts) * (align - 1)) // align) * align
    packed = wire.empty((room, width), x.device)
    parts = packed.parts if len(packed.parts) == 2 else (packed.parts[0], x)
    how, across = {"K": top_k, "G": 8, "FP8": wire == FP8_GROUP}, triton.cdiv(width, 1024)
    block = min(MOST_AT_ONCE, triton.next_power_of_2(pairs))
    if pairs <= FEW_PAIRS and align == 1:
        given = (x, ids, counts, offsets, places, *parts, experts, pairs, width)
        group_kernel[(experts + tokens, across)](*given, **how, B=block)
    else:
        warps = max(4, min(32, block // 256))
        place_kernel[(experts,)](
            ids, counts, offsets, places, pairs, B=block, STARTS=align > 1, num_warps=warps
        )
        spread_kernel[(tokens, across)](x, places, *parts, pairs, width, **how)
    return ExpertBatch(Packed(wire, packed.shape, packed.parts), Grouping.RAGGED, counts, offsets), places


def home(y: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of each token's rows, `[T, H]` in the dtype of `y`."""
    tokens, top_k = weights.shape
    out = torch.empty((tokens, y.shape[1]), dtype=y.dtype, device=y.device)
    home_kernel[(tokens, triton.cdiv(y.shape[1], 1024))](y, places, weights, out, y.shape[1], K=top_k, B=1024)
    return out
