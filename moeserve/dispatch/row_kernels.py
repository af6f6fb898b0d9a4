# mypy: ignore-errors
"""Grouping arrived rows by slot and weighing them home on a GPU: a launch a step, and no host in between.

What `permute` does with sorts and gathers elsewhere; both give the same bits. These kernels also run under
Triton's interpreter.
"""

import torch
import triton
import triton.language as tl

from moeserve.device.overlap_kernels import begin, behind

FEW_CHOICES, CHOICES = 256, 2048  # that a program looks through at a time
COLUMNS = 1024  # of a program that copies or sums


@triton.jit(do_not_specialize=["choices"])
def count_slots(slots, counts, choices, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr):
    """Program e: how often slot e is chosen."""
    begin(OVERLAPS)
    own = tl.zeros([BLOCK], tl.int32)
    start = 0
    while start < choices:
        at = start + tl.arange(0, BLOCK)
        own += (tl.load(slots + at, mask=at < choices, other=-1) == tl.program_id(0)).to(tl.int32)
        start += BLOCK
    tl.store(counts + tl.program_id(0), tl.sum(own, 0))


@triton.jit(do_not_specialize=["choices"])
def place_choices(
    slots, counts, offsets, places, choices, spare,
    E: tl.constexpr, EP: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Program e: where each choice of slot e goes, in order; program E: those that are of no slot here."""
    begin(OVERLAPS)
    slot = tl.program_id(0)
    index = tl.arange(0, EP)
    count = tl.load(counts + index, mask=index < E, other=0)
    room = (count + ALIGN - 1) // ALIGN * ALIGN
    first = tl.sum(tl.where(index < slot, room, 0), 0)
    tl.store(offsets + slot, first)
    nowhere = slot == E
    if nowhere | (tl.sum(tl.where(index == slot, count, 0), 0) > 0):
        start = 0
        while start < choices:
            at = start + tl.arange(0, BLOCK)
            chosen = tl.load(slots + at, mask=at < choices, other=1 << 30)
            if nowhere:
                tl.store(places + at, tl.full([BLOCK], 0, tl.int64) + spare, mask=chosen < 0)
            else:
                mine = (chosen == slot).to(tl.int32)
                tl.store(places + at, (first + tl.cumsum(mine, 0) - mine).to(tl.int64), mask=mine > 0)
                first += tl.sum(mine, 0)
            start += BLOCK


@triton.jit(do_not_specialize=["spare"])
def copy_rows(
    rows, places, out, width, stride, spare, K: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr
):
    """Program (row, block of words): the row to each of its places."""
    begin(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = word < width
    values = tl.load(rows + row * stride + word, mask=there)
    for k in tl.static_range(K):
        place = tl.load(places + row * K + k)
        tl.store(out + place * width + word, values, mask=there & (place != spare))


@triton.jit(do_not_specialize=["spare"])
def sum_rows(
    outputs, places, weights, out, width, spare, K: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr
):
    """Program (row, block of columns): the weighted sum of the row's choices, in their order, in float32."""
    begin(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(K):
        place = tl.load(places + row * K + k)
        here = (column < width) & (place != spare)
        value = tl.load(outputs + place * width + column, mask=here, other=0.0).to(tl.float32)
        total += tl.where(here, value * tl.load(weights + row * K + k), 0.0)
    tl.store(out + row * width + column, total.to(out.dtype.element_ty), mask=column < width)


def block_of(choices):
    """Choices that a program looks through at a time: two widths, since each is compiled by itself."""
    return FEW_CHOICES if choices <= FEW_CHOICES else CHOICES


def place(slots, experts, row_align, capacity):
    """Counts `[e]`, offsets `[e + 1]` int32 and places `[R, K]` int64 of `slots [R, K]` int32, contiguous."""
    choices, device = slots.numel(), slots.device
    counts = torch.empty(experts, dtype=torch.int32, device=device)
    offsets = torch.empty(experts + 1, dtype=torch.int32, device=device)
    places = torch.empty(slots.shape, dtype=torch.int64, device=device)
    block = block_of(choices)
    count_slots[(experts,)](slots, counts, choices, block, **behind(device))
    place_choices[(experts + 1,)](
        slots, counts, offsets, places, choices, capacity - 1, experts, triton.next_power_of_2(experts),
        row_align, block, **behind(device),
    )  # fmt: skip
    return counts, offsets, places


def spread(words, places, capacity):
    """Rows of `words [R, C]`, of any integer dtype and row stride, at their places: `[capacity, C]`."""
    rows, width = words.shape
    out = torch.empty((capacity, width), dtype=words.dtype, device=words.device)
    block = min(COLUMNS, triton.next_power_of_2(width))
    copy_rows[(rows, triton.cdiv(width, block))](
        words, places, out, width, words.stride(0), capacity - 1, places.shape[1], block,
        **behind(words.device),
    )  # fmt: skip
    return out


def weigh(outputs, places, weights, dtype):
    """The weighted sums `[R, H]` of `outputs [capacity, H]`, contiguous."""
    (rows, top), width = places.shape, outputs.shape[1]
    out = torch.empty((rows, width), dtype=dtype, device=outputs.device)
    block = min(COLUMNS, triton.next_power_of_2(width))
    sum_rows[(rows, triton.cdiv(width, block))](
        outputs, places, weights, out, width, outputs.shape[0] - 1, top, block,
        **behind(outputs.device),
    )  # fmt: skip
    return out
