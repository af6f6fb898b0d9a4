# mypy: ignore-errors
"""A lane's way to slots in one launch on a GPU: its gate chooses, or repeats fold; replicas, and load.

Every program makes the whole split for itself, which costs no time beside the others and needs no exchange,
and then serves some rows. More choices than `WHOLE` has are counted in a launch before; where no expert can
have a replica nothing is split. These kernels also run under Triton's interpreter.
"""

import torch
import triton
import triton.language as tl

from moeserve.device.overlap_kernels import begin, behind
from moeserve.experts.routing.choice_kernels import (
    chosen,
    constants,
    counted,
    ids_of,
    merged,
    numbers,
    row_of,
    warps,
)
from moeserve.experts.routing.replica_kernels import (
    by_rank,
    by_replicated,
    homes,
    slots_in_turn,
    split_over_ranks,
    summed,
)
from moeserve.experts.routing.replicas import MOMENTUM

WHOLE = ((128, 16, 4), (1024, 16, 4), (4096, 32, 8))
"""Up to so many choices every program counts all; how many it gives their slots, and its warps at least."""

BLOCK = 64  # choices that get their slots at a time, of more or where nothing is split
CHUNK = 1024  # choices a program counts, of more
ROUNDS, MOVES = 8, 4  # of `transport`; the torch path's 12 and 6 empty the fullest rank by 0.1 % at most
SPAN = 4  # blocks of a program, of more choices


@triton.jit(do_not_specialize=["rows", "lane"], do_not_specialize_on_alignment=["experts", "valid"])
def count_rows(
    experts, valid, home, parts, rows, lane,
    EXPERTS: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, WIDTH: tl.constexpr, RANKS: tl.constexpr,
    X: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr, FOLDS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Writes `parts [chunks, N + X]` int32: choices of a chunk by rank, and by replicated expert."""
    begin(OVERLAPS)
    at = tl.program_id(0) * (N + X)
    row = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    ids = ids_of(experts, valid, row, rows, K, KP, FOLDS)
    place = tl.reshape(homes(ids, home, EXPERTS), (CHUNK * KP,))
    tl.store(parts + at + tl.arange(0, N), by_rank(place, lane, WIDTH, RANKS, N))
    tl.store(parts + at + N + tl.arange(0, X), by_replicated(place, place < 0, X))


@triton.jit
def _split_batch(
    experts, valid, home, cells, parts, ends, first, rows, lane, chunks,
    EXPERTS: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, WIDTH: tl.constexpr, RANKS: tl.constexpr,
    X: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr, FOLDS: tl.constexpr, WHOLE: tl.constexpr,
    SPLIT: tl.constexpr, ROUNDS: tl.constexpr, MOVES: tl.constexpr, MOMENTUM: tl.constexpr,
):  # fmt: skip
    """Choices `[X]` of each replicated expert before row `first`; what ends the split's shares to `ends`.

    WHOLE: CHUNK covers all rows; else `parts` are the counts of all chunks.
    """
    chunk = first // CHUNK
    ids = ids_of(experts, valid, chunk * CHUNK + tl.arange(0, CHUNK), rows, K, KP, FOLDS)
    place = tl.reshape(homes(ids, home, EXPERTS), (CHUNK * KP,))
    ahead = tl.arange(0, CHUNK * KP) < (first - chunk * CHUNK) * KP
    before = by_replicated(place, ahead, X)
    if WHOLE:
        fixed = by_rank(place, lane, WIDTH, RANKS, N)
        shared = before + by_replicated(place, ahead == 0, X)
    else:
        fixed, shared, earlier = summed(parts, chunk, chunks, X, N)
        before += earlier
    cell = tl.arange(0, X)[:, None] * N + tl.arange(0, N)[None, :]
    holds = tl.load(cells + cell) >= 0
    split = split_over_ranks(fixed, shared, holds, X, N, SPLIT, ROUNDS, MOVES, MOMENTUM)
    tl.store(ends + cell, tl.cumsum(split, 1))  # all write the same
    tl.debug_barrier()
    return before


@triton.jit(
    do_not_specialize=["rows", "lane", "chunks"],
    do_not_specialize_on_alignment=["experts", "weights", "valid", "by_expert", "by_slot"],
)
def address_rows(
    experts, weights, valid, home, cells, parts, ends, slots, folded, by_expert, by_slot, rows, lane, chunks,
    EXPERTS: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, WIDTH: tl.constexpr, RANKS: tl.constexpr,
    X: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr, FOLDS: tl.constexpr, SPAN: tl.constexpr,
    BLOCK: tl.constexpr, SPLIT: tl.constexpr, ROUNDS: tl.constexpr, MOVES: tl.constexpr,
    MOMENTUM: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Writes slots of `SPAN * BLOCK` rows; CHUNK covers all rows if SPAN is 1; `ends` as `cells`.

    FOLDS: repeats of a row fold, with their `weights`, into `folded`. Counts where `by_expert` is given.
    """
    begin(OVERLAPS)
    first = tl.program_id(0) * SPAN * BLOCK
    before = 0
    if X > 0:
        before = _split_batch(
            experts, valid, home, cells, parts, ends, first, rows, lane, chunks, EXPERTS, K, KP, WIDTH, RANKS,
            X, N, CHUNK, FOLDS, SPAN == 1, SPLIT, ROUNDS, MOVES, MOMENTUM,
        )  # fmt: skip
    for block in range(SPAN):
        row = first + block * BLOCK + tl.arange(0, BLOCK)
        inside = (row < rows)[:, None] & (tl.arange(0, KP) < K)[None, :]
        at = row.to(tl.int64)[:, None] * K + tl.arange(0, KP)[None, :]
        if FOLDS:
            ids, total = merged(experts, weights, valid, row, rows, K, KP)
            tl.store(folded + at, total, mask=inside)
        else:
            ids = ids_of(experts, valid, row, rows, K, KP, FOLDS)
        place = homes(ids, home, EXPERTS)
        slot = tl.maximum(place, -1)
        if X > 0:
            flat = tl.reshape(place, (BLOCK * KP,))
            slot = tl.reshape(slots_in_turn(flat, before, cells, ends, X, N), (BLOCK, KP))
            before += by_replicated(flat, flat < 0, X)
        tl.store(slots + at, slot, mask=inside)
        if by_expert is not None:
            counted(by_expert, ids, slot >= 0)
            counted(by_slot, slot, slot >= 0)


@triton.jit(do_not_specialize_on_alignment=["valid", "by_expert", "by_slot"])
def route_rows(
    logits, bias, scaling, highest, valid, home, slots, weights, by_expert, by_slot,
    E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, GROUPS: tl.constexpr,
    KEPT: tl.constexpr, BIASED: tl.constexpr, SCORING: tl.constexpr, WEIGHING: tl.constexpr,
    EPSILON: tl.constexpr, ROUND: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Program t: what the gate chooses for row t, in experts' only slots, counted."""
    begin(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    real = tl.load(valid + row) != 0
    ids, weight = chosen(
        row_of(logits, row, E, EP), bias, scaling, highest, logits.dtype.element_ty, E, EP, K, KP, GROUPS,
        KEPT, BIASED, SCORING, WEIGHING, EPSILON, ROUND,
    )  # fmt: skip
    place = tl.arange(0, KP)
    there = (place < K) & real
    slot = tl.maximum(homes(tl.where(there, ids, -1), home, E), -1)
    tl.store(slots + row * K + place, slot, mask=place < K)
    tl.store(weights + row * K + place, tl.where(there, weight, 0.0), mask=place < K)
    counted(by_expert, ids, there)
    counted(by_slot, slot, there)


def route(gate, tables, layer, given, counts):
    """Slots `[T, K]` int32 and weights `[T, K]` float32 by `gate` and a `DeviceSplitter` that splits nothing.

    `given`: logits `[T, E]` and valid `[T]` bool, contiguous. `counts` as of `address`, never None.
    """
    logits, valid = given
    shape = (len(logits), gate.top_k)
    slots = torch.empty(shape, dtype=torch.int32, device=logits.device)
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    if len(logits):
        route_rows[(len(logits),)](
            logits, *numbers(gate, logits), valid, tables.home[layer], slots, weights, *counts,
            *constants(gate), num_warps=warps(gate), **behind(logits.device),
        )  # fmt: skip
    return slots, weights


def address(tables, layer, choices, counts):
    """Slots `[T, K]` int32 of `choices`, and their weights float32, by a `DeviceSplitter`.

    `choices`: experts `[T, K]` int, weights `[T, K]` float32 and valid `[T]` bool, contiguous; without
    weights (None) repeats stay, and the second is None. `counts`: int64 tables by expert and by slot, or two
    Nones.
    """
    experts, weights, valid = choices
    rows, top = experts.shape
    out = torch.empty(experts.shape, dtype=torch.int32, device=experts.device)
    folded = None if weights is None else torch.empty_like(out, dtype=torch.float32)
    if not experts.numel():
        return out, folded
    home, cells = tables.home[layer], tables.cells[layer]
    x, n = cells.shape
    wide = triton.next_power_of_2(top)
    sizes = (tables.size.experts, top, wide, tables.size.slots // tables.size.ranks, tables.size.ranks, x, n)
    ends = torch.empty_like(cells)
    whole = next((row for row in WHOLE if rows * wide <= row[0]), None) if x else None
    *choices_of, least = whole or (CHUNK, BLOCK, 1)
    chunk, block = (max(1, number // wide) for number in choices_of)
    chunks, span, parts = triton.cdiv(rows, chunk), 1, None
    if x and whole is None:
        span = SPAN
        parts = torch.empty((chunks, n + x), dtype=torch.int32, device=experts.device)
        count_rows[(chunks,)](
            experts, valid, home, parts, rows, tables.lane, *sizes, chunk, weights is not None, num_warps=4,
            **behind(experts.device),
        )  # fmt: skip
    address_rows[(triton.cdiv(rows, block * span),)](
        experts, weights, valid, home, cells, parts, ends, out, folded, *counts, rows, tables.lane, chunks,
        *sizes, chunk, weights is not None, span, block, tables.split, ROUNDS, MOVES, MOMENTUM,
        num_warps=max(least, tables.warps), **behind(experts.device),
    )  # fmt: skip
    return out, folded
