# mypy: ignore-errors
"""The choice of replicas on a GPU: counts a batch's rows, splits them, gives each row its slot.

One launch: every program makes the whole split for itself, which costs no time beside the others and needs
no exchange, and then serves `SPAN * BLOCK` rows. More than `WHOLE` rows are counted in a launch before.
The counts are of two kinds: by rank, of rows whose expert has one slot, and by replicated expert. A split
`[X, N]` lives in registers. These kernels also run under Triton's interpreter.
"""

import torch
import triton
import triton.language as tl

from moeserve.experts.replicas import MOMENTUM

BLOCK = 64  # rows that get their slots at a time
SMALL, WHOLE = 1024, 4096  # rows that every program counts for itself
CHUNK = 1024  # rows a program counts, of more than WHOLE
ROUNDS, MOVES = 8, 4  # of `transport`; the torch path's 12 and 6 empty the fullest rank by 0.1 % at most
SPAN = 4  # blocks of a program, of more than WHOLE rows


@triton.jit
def _homes(experts, valid, home, index, rows, EXPERTS: tl.constexpr, TOP: tl.constexpr):
    """Of each row its expert's only slot, or -1 - x of replicated expert x, or -2^30 where there is none."""
    inside = index < rows
    expert = tl.load(experts + index, mask=inside, other=-1)
    known = inside & (expert >= 0) & (expert < EXPERTS)
    known = known & (tl.load(valid + index // TOP, mask=inside, other=0) != 0)
    return tl.load(home + expert, mask=known, other=-(1 << 30))


@triton.jit
def _by_rank(place, lane, WIDTH: tl.constexpr, RANKS: tl.constexpr, N: tl.constexpr):
    """Rows of experts with one slot, by rank from `lane` on."""
    rank = (tl.maximum(place, 0) // WIDTH + RANKS - lane) % RANKS
    return tl.histogram(rank, N, mask=place >= 0)


@triton.jit
def _by_replicated(place, mask, X: tl.constexpr):
    """Rows of replicated experts where `mask`."""
    there = mask & (place < 0) & (place >= -X)
    return tl.histogram(tl.where(there, -1 - place, 0), X, mask=there)


@triton.jit
def _transport(fixed, shared, holds, ROUNDS: tl.constexpr, MOMENTUM: tl.constexpr):
    """The rounds of `moeserve.experts.replicas.transport`: `[X, N]` float32, of `[N]`, `[X, 1]`, `[X, N]`."""
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
    """`split` after moves as in `moeserve.experts.replicas`: a load and its rank travel in one number."""
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
    """`moeserve.experts.replicas.waterfill`, number by number: the place of a rank is counted, not sorted."""
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


@triton.jit(do_not_specialize=["rows", "lane"], do_not_specialize_on_alignment=["experts", "valid"])
def count_rows(
    experts, valid, home, parts, rows, lane,
    EXPERTS: tl.constexpr, TOP: tl.constexpr, WIDTH: tl.constexpr, RANKS: tl.constexpr,
    X: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Writes `parts [chunks, N + X]` int32: rows of a chunk by rank, and by replicated expert."""
    at = tl.program_id(0) * (N + X)
    index = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    place = _homes(experts, valid, home, index, rows, EXPERTS, TOP)
    tl.store(parts + at + tl.arange(0, N), _by_rank(place, lane, WIDTH, RANKS, N))
    tl.store(parts + at + N + tl.arange(0, X), _by_replicated(place, place < 0, X))


@triton.jit
def _summed(parts, chunk, chunks, X: tl.constexpr, N: tl.constexpr):
    """Rows by rank, by replicated expert, and the latter in the chunks before `chunk`."""
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


@triton.jit(do_not_specialize=["rows", "lane", "chunks"], do_not_specialize_on_alignment=["experts", "valid"])
def assign_rows(
    experts, valid, home, cells, parts, ends, out, rows, lane, chunks,
    EXPERTS: tl.constexpr, TOP: tl.constexpr, WIDTH: tl.constexpr, RANKS: tl.constexpr,
    X: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr,
    SPLIT: tl.constexpr, ROUNDS: tl.constexpr, MOVES: tl.constexpr, MOMENTUM: tl.constexpr,
):  # fmt: skip
    """Writes slots of `SPAN * BLOCK` rows to `out`; CHUNK covers all rows if SPAN is 1; `ends` as `cells`."""
    first = tl.program_id(0) * SPAN * BLOCK
    chunk = first // CHUNK
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    place = _homes(experts, valid, home, index, rows, EXPERTS, TOP)
    before = _by_replicated(place, index < first, X)
    if SPAN > 1:
        fixed, shared, ahead = _summed(parts, chunk, chunks, X, N)
        before += ahead
    else:
        fixed = _by_rank(place, lane, WIDTH, RANKS, N)
        shared = before + _by_replicated(place, index >= first, X)
    n = tl.arange(0, N)
    held = tl.load(cells + tl.arange(0, X)[:, None] * N + n[None, :])
    if SPLIT == "lp":
        split = _transport(fixed, shared[:, None], held >= 0, ROUNDS, MOMENTUM)
        split = _levelled(_whole(split, shared[:, None], held >= 0), fixed, held >= 0, X, N, MOVES)
    else:
        tl.static_assert(SPLIT == "waterfill", "a split without device code")
        split = _waterfill(fixed, shared, held >= 0, X, N)
    tl.store(ends + tl.arange(0, X)[:, None] * N + n[None, :], tl.cumsum(split, 1))  # all write the same
    tl.debug_barrier()
    for block in range(SPAN):
        row = first + block * BLOCK + tl.arange(0, BLOCK)
        home_of = _homes(experts, valid, home, row, rows, EXPERTS, TOP)
        several = (home_of < 0) & (home_of >= -X)
        x = tl.where(several, -1 - home_of, 0)
        earlier = (x[None, :] == x[:, None]) & (row[None, :] < row[:, None]) & several[None, :]
        mine = x[:, None] == tl.arange(0, X)[None, :]
        nth = tl.sum(tl.where(mine, before[None, :], 0), 1) + tl.sum(earlier.to(tl.int32), 1)
        covered = tl.load(ends + x[:, None] * N + n[None, :]) <= nth[:, None]
        rank = tl.minimum(tl.sum(covered.to(tl.int32), 1), N - 1)
        slot = tl.load(cells + x * N + rank, mask=several, other=-1)
        tl.store(out + row, tl.where(home_of >= 0, home_of, slot), mask=row < rows)
        before += _by_replicated(home_of, several, X)


def assign(tables, layer, experts, valid):
    """Slots `[T, K]` int32 of `experts [T, K]`, by a `DeviceSplitter`; `valid [T]`, all of it contiguous."""
    rows, top = experts.numel(), experts.shape[1]
    out = torch.empty(experts.shape, dtype=torch.int32, device=experts.device)
    if not rows:
        return out
    home, cells = tables.home[layer], tables.cells[layer]
    x, n = cells.shape
    sizes = (tables.size.experts, top, tables.size.slots // tables.size.ranks, tables.size.ranks, x, n)
    ends = torch.empty_like(cells)
    chunk, span, chunks, parts = SMALL if rows <= SMALL else WHOLE, 1, 0, out
    if rows > WHOLE:
        chunk, span, chunks = CHUNK, SPAN, triton.cdiv(rows, CHUNK)
        parts = torch.empty((chunks, n + x), dtype=torch.int32, device=experts.device)
        count_rows[(chunks,)](experts, valid, home, parts, rows, tables.lane, *sizes, chunk, num_warps=4)
    assign_rows[(triton.cdiv(rows, BLOCK * span),)](
        experts, valid, home, cells, parts, ends, out, rows, tables.lane, chunks, *sizes, chunk, span, BLOCK,
        tables.split, ROUNDS, MOVES, MOMENTUM, num_warps=tables.warps,
    )  # fmt: skip
    return out
