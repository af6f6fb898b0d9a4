# mypy: ignore-errors
"""Triton kernels that fill a GPU: one reads memory and computes as good as nothing, one reads none."""

import triton
import triton.language as tl

WARPS = 8
REGISTERS = 32  # of a thread: as many threads as a multiprocessor takes have room, eight programs
BLOCK = 4 * 32 * WARPS  # elements that a program asks for at a time: 16 bytes a thread
TIMES = 16  # that it does so: 64 KiB, some 15 us where the memory is at its rate
SHARE = BLOCK * TIMES  # elements of a program
THREADS = 32 * WARPS
PRODUCTS = 1600  # of a thread of a program that computes, eight of which are on a multiprocessor


@triton.jit
def read_share(memory, sums, BLOCK: tl.constexpr, TIMES: tl.constexpr):
    """Program i: the sum of its share."""
    mine = memory + tl.program_id(0) * BLOCK * TIMES
    at = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for time in range(TIMES):
        total += tl.load(mine + time * BLOCK + at, eviction_policy="evict_first")
    tl.store(sums + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def compute_share(sums, BLOCK: tl.constexpr, TIMES: tl.constexpr):
    """Program i: a chain of products and sums."""
    total = tl.arange(0, BLOCK).to(tl.float32)
    for _ in range(TIMES):
        total = total * 0.999 + 1.0
    tl.store(sums + tl.program_id(0), tl.sum(total, 0))


def read(memory, sums):
    """Reads float32 `memory [N]`, N a multiple of SHARE; `sums` has an element for each share or more."""
    read_share[(memory.numel() // SHARE,)](memory, sums, BLOCK, TIMES, num_warps=WARPS, maxnreg=REGISTERS)


def compute(shares, sums):
    """Computes as many shares of some 15 us; `sums` has an element for each or more."""
    compute_share[(shares,)](sums, THREADS, PRODUCTS, num_warps=WARPS, maxnreg=REGISTERS)
