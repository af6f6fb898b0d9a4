# mypy: ignore-errors
"""A Triton kernel that reads memory, and as good as nothing else."""

import triton
import triton.language as tl

BLOCK = 8192  # elements that a program asks for at a time


@triton.jit(do_not_specialize=["count", "share"])
def read_share(memory, sums, count, share, BLOCK: tl.constexpr):
    """Program i: the sum of its share."""
    first = tl.program_id(0) * share
    last = tl.minimum(first + share, count)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(first, last, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(memory + at, mask=at < last, other=0.0, eviction_policy="evict_first")
    tl.store(sums + tl.program_id(0), tl.sum(total, 0))


def read(memory, sums):
    """Reads float32 `memory [N]` by as many programs as `sums` has elements."""
    count, programs = memory.numel(), sums.numel()
    share = triton.cdiv(triton.cdiv(count, programs), 4) * 4
    read_share[(programs,)](memory, sums, count, share, BLOCK, num_warps=8)
