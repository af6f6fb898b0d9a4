"""Callers of few rows and of more, each with a track of a rank's GPU for itself."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
from gpu_ways import batch, opened
from houses import Alone, house_config
from torch import Tensor

from moeserve.proto.passes.running import PassLate
from moeserve.runtime.doors.passes.looking import COMPANY_SECONDS
from moeserve.runtime.launch.local_cluster import LocalCluster
from moeserve.torch import MoeExperts, Settings, connect
from moeserve.torch.attached_device import AttachedDevice

pytestmark = pytest.mark.gpu(1)

LAYERS, FEW, MANY = (0, 1), 3, 60
PROMPT = 1.0  # seconds: half of the time for which the other's rows are waited for


@pytest.fixture(scope="module")
def house(path: Path) -> Iterator[LocalCluster]:
    with LocalCluster(
        house_config(path, plan__device="cuda", passes__share_gpu=True, passes__short_rows=8)
    ) as house:
        yield house


@pytest.fixture(scope="module")
def right(house: LocalCluster, alone: Alone) -> dict[int, list[Tensor]]:
    """Answers by rows, and by layer; from then on only GPUs want steps."""
    remote = connect(Settings("remote", house.address, timeout=30.0))
    found = {
        rows: [MoeExperts(remote, layer)(*batch(alone, rows, seed=rows)) for layer in LAYERS]
        for rows in (FEW, 2 * FEW, MANY)
    }
    remote.close()
    time.sleep(2 * COMPANY_SECONDS)
    return found


def passed(way: AttachedDevice, alone: Alone, right: dict[int, list[Tensor]], rows: int) -> float:
    """Seconds of one forward pass of so many rows."""
    given, began = batch(alone, rows, seed=rows), time.monotonic()
    found = [MoeExperts(way, layer)(*given) for layer in LAYERS]
    way.check()
    assert all(map(torch.equal, found, right[rows])), rows
    return time.monotonic() - began


def test_forward_passes_beside_each_other_have_the_bits_of_calls(
    house: LocalCluster, alone: Alone, right: dict[int, list[Tensor]]
) -> None:
    ways = [opened(house, f"beside-{rows}") for rows in (FEW, MANY)]
    given = [batch(alone, rows, seed=rows) for rows in (FEW, MANY)]
    modules = [[MoeExperts(way, layer) for layer in LAYERS] for way in ways]
    streams = [torch.cuda.Stream() for _ in ways]
    torch.cuda.synchronize()
    for _ in range(80):
        found: list[list[list[Tensor]]] = [[[], []], [[], []]]
        for _ in range(3):
            for at, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    for layer in LAYERS:
                        found[at][layer].append(modules[at][layer](*given[at]))
        torch.cuda.synchronize()
        for (at, rows), layer in product(enumerate((FEW, MANY)), LAYERS):
            assert all(torch.equal(one, right[rows][layer]) for one in found[at][layer]), (rows, layer)
    for way in ways:
        way.check()
        way.close()


@pytest.mark.parametrize(("late", "other"), [(MANY, FEW), (FEW, MANY)])
def test_who_withholds_rows_keeps_nobody_of_the_other_track_waiting(
    house: LocalCluster, alone: Alone, right: dict[int, list[Tensor]], late: int, other: int
) -> None:
    way = opened(house, f"late-{late}")
    for _ in range(3):  # so that a whole forward pass is launched ahead
        passed(way, alone, right, late)
    given = batch(alone, late, seed=late)
    MoeExperts(way, 0)(*given)  # and nothing of layer 1
    second = opened(house, f"other-{other}")
    assert (took := passed(second, alone, right, other)) < PROMPT, f"its first one: {took:.2f} s"
    with pytest.raises(PassLate):
        time.sleep(2.5)
        way.check()
    for _ in range(20):
        for one, rows in ((way, late), (second, other)):
            passed(one, alone, right, rows)
    MoeExperts(way, 0)(*given)
    time.sleep(COMPANY_SECONDS + 0.2)  # it wants steps no more, but lies on the device
    for _ in range(5):
        assert (took := passed(second, alone, right, other)) < PROMPT, f"{took:.2f} s"
    if other == FEW:
        took = passed(second, alone, right, 2 * FEW)
        assert took < PROMPT, f"as many rows as never before, to be recorded: {took:.2f} s"
    began = time.monotonic()
    second.close()
    third = opened(house, f"third-{other}")
    passed(third, alone, right, other)
    assert time.monotonic() - began < 2 * PROMPT, "one is detached, and another one is attached"
    with pytest.raises(PassLate):
        time.sleep(2.5)
        way.check()
    for one in (way, third):
        one.close()
