"""Kernels whose launch overlaps the one before."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from moeserve.device.overlap import LEAST_CAPABILITY, overlaps


def test_a_cpu_has_no_launch_to_overlap() -> None:
    assert not overlaps(torch.device("cpu"))


@pytest.mark.skipif(find_spec("triton") is None, reason="needs the package triton")
def test_keywords_of_a_launch_say_whether_its_kernel_waits_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    from moeserve.device import overlap_kernels

    device = torch.device("cpu")
    assert overlap_kernels.behind(device) == {"OVERLAPS": False}
    monkeypatch.setattr(overlap_kernels, "overlaps", lambda device: True)
    assert overlap_kernels.behind(device) == {"OVERLAPS": True, "launch_pdl": True}


@pytest.mark.gpu(1)
def test_a_gpu_overlaps_from_hopper_on() -> None:
    device = torch.device("cuda", 0)
    assert overlaps(device) == (torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY)


@pytest.mark.gpu(1)
def test_kernels_that_wait_by_themselves_find_what_the_one_before_wrote() -> None:
    from moeserve.dispatch.row_kernels import place, spread, weigh

    torch.manual_seed(1)
    device = torch.device("cuda", 0)
    rows, top, experts, width = 256, 8, 16, 1024
    capacity = rows * top + 1
    for _ in range(200):  # each chain of six launches writes where others have read a moment before
        words = torch.randint(-(1 << 20), 1 << 20, (rows, width), dtype=torch.int32, device=device)
        slots = torch.randint(0, experts, (rows, top), dtype=torch.int32, device=device)
        _, _, places = place(slots, experts, 1, capacity)
        spread_out = spread(words, places, capacity)
        summed = weigh(spread_out.float(), places, torch.ones_like(slots, dtype=torch.float32), torch.float32)
        assert torch.equal(summed, words.float() * top)
