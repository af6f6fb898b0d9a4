# mypy: ignore-errors
"""The sums behind `slot_checksum` on a GPU: one pass over the words of many tensors, beside running steps."""

import torch
import triton
import triton.language as tl

PROGRAMS = 8  # of a tensor; a step keeps most of the GPU
BLOCK = 4096
ALIGNED = 16  # bytes, so that a thread loads four words at once


@triton.jit
def _word_sums(table, totals, factor, BLOCK: tl.constexpr):
    """`table [tensors, 2]` int64: address and number of 32-bit words."""
    tensor = tl.program_id(0)
    words = tl.multiple_of(tl.load(table + 2 * tensor).to(tl.pointer_type(tl.int32)), 16)
    count = tl.load(table + 2 * tensor + 1)
    at = tl.program_id(1).to(tl.int64) * BLOCK
    lanes = tl.arange(0, BLOCK)
    of_lane = lanes.to(tl.int64) * factor + 1
    sums = tl.zeros([BLOCK], tl.int64)
    while at < count:
        word = tl.load(words + at + lanes, mask=lanes < count - at, other=0).to(tl.int64)
        sums += word * (at * factor + of_lane)
        at += tl.num_programs(1).to(tl.int64) * BLOCK
    tl.atomic_add(totals + tensor, tl.sum(sums, 0), sem="relaxed")


def sum_words(tensors, factor):
    """Sum of words[i] * (i * factor + 1), modulo 2^64, of each tensor (int32, one CUDA device): ints."""
    tensors = [t if t.data_ptr() % ALIGNED == 0 else t.clone() for t in tensors]
    rows = [[tensor.data_ptr(), tensor.numel()] for tensor in tensors]
    device = tensors[0].device
    table = torch.tensor(rows, dtype=torch.int64).pin_memory().to(device, non_blocking=True)
    totals = torch.zeros(len(rows), dtype=torch.int64, device=device)
    _word_sums[(len(rows), PROGRAMS)](table, totals, factor, BLOCK=BLOCK, num_warps=8)
    return totals.cpu().tolist()
