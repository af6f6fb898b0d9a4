"""Short copies in one launch: what is compiled, and on a GPU what is copied."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch

from moeserve.device.nvrtc import NEEDED_MODULE, compiled
from moeserve.runtime.rank.transfers import engines as engines_module
from moeserve.runtime.rank.transfers.engines import Engines
from moeserve.runtime.rank.transfers.segments import MOST_PIECES, TABLES, Segments, program

GPU = pytest.mark.gpu(1)


@pytest.mark.skipif(importlib.util.find_spec("cuda") is None, reason=f"{NEEDED_MODULE} is not installed")
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_the_kernel_is_compiled(arch: str) -> None:
    made = program()
    assert compiled(made.source, arch, made.options)


@pytest.mark.parametrize(
    ("copy", "fits"),
    [((0, 16, 32), True), ((8, 16, 32), False), ((0, 8, 32), False), ((0, 16, 33), False), ((0, 0, 0), True)],
)
def test_pieces_are_of_whole_words(copy: tuple[int, int, int], *, fits: bool) -> None:
    assert Segments.fits(copy) is fits


@GPU
@pytest.mark.parametrize("odd", [0, 2], ids=["whole words", "some not"])
@pytest.mark.parametrize("pieces", [2, 7, MOST_PIECES, MOST_PIECES + 9])
def test_pieces_come_there_and_home(pieces: int, odd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of other sizes each, to other places, and again and again over the same tables."""
    monkeypatch.setattr(engines_module, "MOST_TOGETHER_BYTES", 1 << 30)
    torch.cuda.init()
    with torch.cuda.device(0):
        torch.zeros(1, device="cuda")
        engines = Engines("cuda:0")
        assert engines._segments is not None, "the kernel cannot be had here"
        random = np.random.default_rng(0)
        sizes = 16 * random.integers(1, 5000, pieces)
        sizes[0] += odd
        ends = np.cumsum(-(-sizes // 16) * 16 + 48)
        whole = int(ends[-1])
        host, back = (torch.zeros(whole, dtype=torch.uint8, pin_memory=True) for _ in range(2))
        device = torch.zeros(whole, dtype=torch.uint8, device="cuda")
        host.copy_(torch.from_numpy(random.integers(0, 256, whole, dtype=np.uint8)))
        firsts = [int(end - 48 - -(-size // 16) * 16) for end, size in zip(ends, sizes, strict=True)]
        there, home = ([], [])
        for first, size in zip(firsts, sizes.tolist(), strict=True):
            there.append((device.data_ptr() + first, host.data_ptr() + first, size))
            home.append((back.data_ptr() + first, device.data_ptr() + first, size))
        wanted = torch.zeros(whole, dtype=torch.uint8)
        for first, size in zip(firsts, sizes.tolist(), strict=True):
            wanted[first : first + size] = host[first : first + size]
        for _ in range(TABLES // 2 + 3):
            device.zero_()
            back.zero_()
            engines.copy_together(there)
            engines.copy_together(home)
            torch.cuda.synchronize()
            assert torch.equal(device.cpu(), wanted), "nothing beside the pieces, and all of them"
            assert torch.equal(back, wanted)


@GPU
def test_few_or_large_copies_are_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.zeros(1, device="cuda")
    engines = Engines("cuda:0")
    assert engines._segments is not None
    launched: list[int] = []
    monkeypatch.setattr(engines._segments, "copy", lambda copies, stream: launched.append(len(copies)))
    host = torch.zeros(1 << 22, dtype=torch.uint8, pin_memory=True)
    device = torch.zeros(1 << 22, dtype=torch.uint8, device="cuda")
    a_copy = device.data_ptr(), host.data_ptr(), 1 << 20
    engines.copy_together([a_copy])
    engines.copy_together([a_copy] * 5)
    torch.cuda.synchronize()
    assert not launched
    engines.copy_together([a_copy, (*a_copy[:2], 33), a_copy])
    assert launched == [2]
