# mypy: ignore-errors
"""The choice of replicas on a GPU, as device functions: counts of choices, their split, each one's slot.

The counts are of two kinds: by rank, of choices whose expert has one slot, and by replicated expert. A split
`[X, N]` lives in registers. `address_kernels` launches them.
"""

import triton
import triton.language as tl


@triton.jit
def homes(ids, home, EXPERTS: tl.constexpr):
    """The only slot of each id's expert, or -1 - x of replicated expert x, or -2^30 where there is none."""
    return tl.load(home + ids, mask=(ids >= 0) & (ids < EXPERTS), other=-(1 << 30))


@triton.jit
def by_rank(place, lane, WIDTH: tl.constexpr, RANKS: tl.constexpr, N: tl.constexpr):
    """Choices of experts with one slot, of `homes` flat, by rank from `lane` on."""
    rank = (tl.maximum(place, 0) // WIDTH + RANKS - lane) % RANKS
    return tl.histogram(rank, N, mask=place >= 0)


@triton.jit
def by_replicated(place, mask, X: tl.constexpr):
    """Choices of replicated experts where `mask`."""
    there = mask & (place < 0) & (place >= -X)
    return tl.histogram(tl.where(there, -1 - place, 0), X, mask=there)


@triton.jit
def _transport(fixed, shared, holds, ROUNDS: tl.constexpr, MOMENTUM: tl.constexpr):
    """The rounds of `replicas.transport`: `[X, N]` float32, of `[N]`, `[X, 1]`, `[X, N]`."""
    holders = holds.to(tl.float32)
    wanted = tl.broadcast_to(shared.to(tl.float32), holds.shape)
    base = tl.broadcast_to(fixed.to(tl.float32)[None, :], holds.shape)
    step = (1.0 / tl.maximum(tl.sum(holders, 0), 1.0))[None, :]
    even = wanted * holders / tl.maximum(tl.sum(holders, 1), 1.0)[:, None]
    scale = 1.0 / tl.maximum(wanted, 1.0)
    split = even
    drift = tl.zeros_like(even)
    for _ in range(ROUNDS):
        loads = base + tl.sum(split, 0)[None, :]
        level = tl.sum(split * loads, 1)[:, None] * scale
        drift = MOMENTUM * drift - step * (loads - level)
        moved = tl.maximum(split + drift, 0.0) * holders
        total = tl.sum(moved, 1)[:, None]
        moved = tl.where(total > 0, moved * (wanted / tl.maximum(total, 1e-6)), even)
        drift = moved - split
        split = moved
    return split


@triton.jit
def _whole(split, shared, holds):
    """`split` in whole rows: sums over the ranks, rounded, so that the last one is `shared [X, 1]`."""
    quanta = tl.where(holds, (split * 256).to(tl.int32), 0)
    lost = shared * 256 - tl.sum(quanta, 1)[:, None]
    ends = tl.cumsum(quanta, 1) + lost
    return (tl.maximum(ends + 128, 0) >> 8) - (tl.maximum(ends - quanta + 128, 0) >> 8)


@triton.jit
def _levelled(split, fixed, holds, X: tl.constexpr, N: tl.constexpr, MOVES: tl.constexpr):
    """`split` after moves as in `replicas`: a load and its rank travel in one number."""
    rank = tl.arange(0, N)[None, :]
    number = tl.arange(0, X)[:, None]
    target = tl.where(holds, rank, 1 << 30)
    for _ in range(MOVES):
        loads = (fixed[None, :] + tl.sum(split, 0)[None, :]) * N
        full = tl.where(split > 0, loads + (N - 1 - rank), -1)
        empty = loads + target
        high = tl.max(full, 1)[:, None]
        low = tl.min(empty, 1)[:, None]
        gap = high // N - low // N
        offer = tl.where(gap >= 2, gap * X + number, -1)
        touched = (full == high) | (empty == low)
        best = tl.max(tl.where(touched, offer, -1), 0)[None, :]
        # in one sum the ranks that agree, of two, and the rows at the source
        found = tl.where(full == high, split, 0) + tl.where(touched & (best == offer), 1 << 20, 0)
        found = tl.sum(found, 1)[:, None]
        rows = tl.where((offer >= 0) & (found >> 20 == 2), tl.minimum(gap >> 1, found & (1 << 20) - 1), 0)
        split += tl.where(empty == low, rows, 0) - tl.where(full == high, rows, 0)
    return split


@triton.jit
def _waterfill(fixed, shared, holds, X: tl.constexpr, N: tl.constexpr):
    """`replicas.waterfill`, number by number: the place of a rank is counted, not sorted."""
    x = tl.arange(0, X)
    n = tl.arange(0, N)
    ahead = (shared[None, :] > shared[:, None]) | (
        (shared[None, :] == shared[:, None]) & (x[None, :] < x[:, None])
    )
    turn = tl.sum(ahead.to(tl.int32), 1)
    loads = fixed
    split = tl.zeros([X, N], tl.int32)
    used = tl.sum((shared > 0).to(tl.int32), 0)
    i = 0
    while i < used:
        rows = tl.sum(tl.where(turn == i, shared, 0), 0)
        mine = tl.broadcast_to((turn == i)[:, None], [X, N])
        held = tl.max((mine & holds).to(tl.int32), 0) > 0
        level = tl.where(held, loads, 1 << 24)
        above, other = level[:, None], level[None, :]
        depth = tl.sum(tl.maximum(above - other, 0), 1)
        before = (other < above) | ((other == above) & (n[None, :] < n[:, None]))
        place = tl.sum(before.to(tl.int32), 1)
        wet = depth <= rows
        count = tl.sum(wet.to(tl.int32), 0)
        filled = rows + tl.sum(tl.where(wet, level, 0), 0)
        poured = tl.where(wet, filled // count - level + (place < filled % count).to(tl.int32), 0)
        loads += poured
        split += tl.where(mine, tl.broadcast_to(poured[None, :], [X, N]), 0)
        i += 1
    return split


@triton.jit
def summed(parts, chunk, chunks, X: tl.constexpr, N: tl.constexpr):
    """Sums of `parts`: choices by rank, by replicated expert, and the latter in the chunks before `chunk`."""
    g = tl.arange(0, 16)
    fixed = tl.zeros([N], tl.int32)
    shared = tl.zeros([X], tl.int32)
    before = tl.zeros([X], tl.int32)
    start = 0
    while start < chunks:
        row = (start + g)[:, None]
        at = parts + row * (N + X)
        fixed += tl.sum(tl.load(at + tl.arange(0, N)[None, :], mask=row < chunks, other=0), 0)
        counts = tl.load(at + N + tl.arange(0, X)[None, :], mask=row < chunks, other=0)
        shared += tl.sum(counts, 0)
        before += tl.sum(tl.where(row < chunk, counts, 0), 0)
        start += 16
    return fixed, shared, before


@triton.jit
def split_over_ranks(
    fixed, shared, holds, X: tl.constexpr, N: tl.constexpr, SPLIT: tl.constexpr,
    ROUNDS: tl.constexpr, MOVES: tl.constexpr, MOMENTUM: tl.constexpr,
):  # fmt: skip
    """The split `[X, N]` int32 named SPLIT, of `fixed [N]` and `shared [X]` over what `holds [X, N]`."""
    if SPLIT == "lp":
        split = _transport(fixed, shared[:, None], holds, ROUNDS, MOMENTUM)
        split = _levelled(_whole(split, shared[:, None], holds), fixed, holds, X, N, MOVES)
    else:
        tl.static_assert(SPLIT == "waterfill", "a split without device code")
        split = _waterfill(fixed, shared, holds, X, N)
    return split


@triton.jit
def slots_in_turn(place, before, cells, ends, X: tl.constexpr, N: tl.constexpr):
    """Slots of `homes` flat, -1 for none, in the batch's order after `before [X]` choices of each expert.

    `ends [X, N]` are a split's sums over the ranks, in memory as `cells`.
    """
    several = (place < 0) & (place >= -X)
    x = tl.where(several, -1 - place, 0)
    index = tl.arange(0, place.shape[0])
    earlier = (x[None, :] == x[:, None]) & (index[None, :] < index[:, None]) & several[None, :]
    mine = x[:, None] == tl.arange(0, X)[None, :]
    nth = tl.sum(tl.where(mine, before[None, :], 0), 1) + tl.sum(earlier.to(tl.int32), 1)
    covered = tl.load(ends + x[:, None] * N + tl.arange(0, N)[None, :]) <= nth[:, None]
    rank = tl.minimum(tl.sum(covered.to(tl.int32), 1), N - 1)
    slot = tl.load(cells + x * N + rank, mask=several, other=-1)
    return tl.where(place >= 0, place, slot)
