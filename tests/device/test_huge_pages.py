"""Tensors in huge pages: what they are, how long they live, and what the kernel says of their pages."""

from __future__ import annotations

import gc
import mmap
import re
from pathlib import Path

import pytest
import torch

from moeserve.device.huge_pages import HUGE_PAGE, empty_in_huge_pages

ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def huge_bytes(address: int) -> int:
    """Bytes in huge pages of the mapping that `address` lies in."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no mapping at {address:#x}")


@pytest.mark.skipif(
    not ENABLED.exists() or "[never]" in ENABLED.read_text(), reason="this kernel gives no huge pages"
)
def test_the_kernel_gives_huge_pages_for_what_is_written() -> None:
    made = empty_in_huge_pages((6, 1 << 20), torch.uint8)
    made.fill_(1)
    assert huge_bytes(made.data_ptr()) >= 2 * HUGE_PAGE


def resident() -> int:
    """Bytes of this process's memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_it_takes_no_more_memory_than_it_has() -> None:
    size, before = HUGE_PAGE + 4096, resident()
    made = [empty_in_huge_pages((size,), torch.uint8) for _ in range(32)]
    for one in made:
        one.fill_(1)
    assert resident() - before < 32 * size + (8 << 20)


def test_it_begins_with_a_huge_page_holds_zeros_and_takes_what_is_written() -> None:
    made = empty_in_huge_pages((3, 512, 1024), torch.float32)
    assert (made.shape, made.dtype, made.is_contiguous()) == ((3, 512, 1024), torch.float32, True)
    assert made.data_ptr() % HUGE_PAGE == 0 and not made.any()
    made[2] = 1.5
    row = made[2, 511]
    del made
    gc.collect()
    assert row.sum() == 1.5 * 1024, "a view keeps the memory"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32, torch.uint8, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(0, 8), (2, 8), (3, HUGE_PAGE)])
def test_every_size_and_dtype_is_a_tensor_like_any_other(shape: tuple[int, int], dtype: torch.dtype) -> None:
    made = empty_in_huge_pages(shape, dtype)
    assert made.shape == shape and made.dtype == dtype
    made.copy_(torch.ones(shape).to(dtype))
    assert torch.equal(made.to(torch.float32), torch.ones(shape))


def test_a_system_without_huge_pages_has_plain_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    assert empty_in_huge_pages((2, HUGE_PAGE), torch.uint8).shape == (2, HUGE_PAGE)


def test_memory_that_the_host_has_not_is_refused_with_its_bytes_and_what_takes_less() -> None:
    """The kernel said "Cannot allocate memory", and no rank said of what."""
    with pytest.raises(MemoryError, match=r"no memory for 262144\.0 GiB of experts .*redundant_experts"):
        empty_in_huge_pages((1 << 18, 1 << 30), torch.uint8)  # more than there are addresses
