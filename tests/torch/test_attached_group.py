"""Rows of a GPU over a device lane of a group of two owners. Their processes, and the caller's, may share one
GPU and then take turns of milliseconds; where there are two GPUs each owner has its own.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gpu_ways import batch, opened
from houses import Alone, house_config

from moeserve.proto.errors import MoeError, Unavailable
from moeserve.proto.passes.running import PassLate
from moeserve.runtime.launch.local_cluster import LocalCluster
from moeserve.torch import MoeExperts, Settings, connect

pytestmark = pytest.mark.gpu(1)

GROUP = {
    "plan__device": "cuda",
    "plan__all2all_backend": "nvlink_ll",
    "plan__measure": "never",
    "parallel__data_parallel_size": 2,
    "parallel__enable_expert_parallel": True,
    "passes__share_gpu": True,
    "step__lane_rows": 64,
    "step__timeout_seconds": 60.0,
    "step__late_seconds": 30.0,
}
LAYERS = (0, 1)


@pytest.fixture(scope="module")
def house(path: Path) -> Iterator[LocalCluster]:
    with LocalCluster(house_config(path, **GROUP)) as house:
        yield house


@pytest.fixture
def remote(house: LocalCluster) -> Iterator[object]:
    way = connect(Settings("remote", house.address, timeout=60.0))
    yield way
    way.close()


def test_answers_have_the_bits_of_a_call(house: LocalCluster, remote: object, alone: Alone) -> None:
    way = opened(house, stages=2)
    for turn, rows in enumerate((1, 5, 16, 40, 2, 2, 2, 2)):
        answers = []
        for layer in LAYERS:
            given = [batch(alone, rows, seed=20 * turn + 2 * layer + stage) for stage in (0, 1)]
            experts = MoeExperts(way, layer)
            tickets = [experts.submit(*one) for one in given]
            answers += [(layer, *one) for one in zip(given, map(experts.wait, tickets), strict=True)]
        way.check()
        for layer, one, answer in answers:
            assert torch.equal(answer, MoeExperts(remote, layer)(*one)), (turn, layer)
    way.close()


def test_whole_forward_passes_run_ahead(house: LocalCluster, remote: object, alone: Alone) -> None:
    way = opened(house, "ahead")
    layers, others = ([MoeExperts(one, layer) for layer in LAYERS] for one in (way, remote))
    given = [batch(alone, 3, seed=turn) for turn in range(24)]
    found, took = [], []
    for one in given:  # nobody else calls meanwhile
        began = time.monotonic()
        found.append([layer(*one) for layer in layers])
        way.check()
        took.append(time.monotonic() - began)
    for turn, (one, answers) in enumerate(zip(given, found, strict=True)):
        for layer, answer in enumerate(answers):
            assert torch.equal(answer, others[layer](*one)), (turn, layer)
    print(f"a pass of {len(LAYERS)} layers: median {sorted(took)[len(took) // 2] * 1e3:.2f} ms")
    way.close()


def test_two_callers_and_host_calls_take_turns(house: LocalCluster, remote: object, alone: Alone) -> None:
    ways = [opened(house, f"caller-{at}") for at in range(3)]  # of both ranks, by their names
    host = [MoeExperts(remote, layer) for layer in LAYERS]
    for turn in range(12):
        for layer in LAYERS:
            given = [batch(alone, 1 + turn % 3, seed=4 * turn + at) for at in range(len(ways))]
            modules = [MoeExperts(way, layer) for way in ways]
            tickets = [module.submit(*one) for module, one in zip(modules, given, strict=True)]
            found = [module.wait(ticket) for module, ticket in zip(modules, tickets, strict=True)]
            for one, answer in zip(given, found, strict=True):
                assert torch.equal(answer, host[layer](*one)), (turn, layer)
    for way in ways:
        way.check()
        way.close()


def test_a_caller_that_withholds_rows_is_late_and_no_member_is_blamed(
    house: LocalCluster, remote: object, alone: Alone
) -> None:
    way, other = opened(house, "late"), MoeExperts(remote, 0)
    given = batch(alone, 2, seed=1)
    right = other(*given)
    time.sleep(1.0)  # then nobody else wants steps
    for _ in range(4):  # so that a whole forward pass is launched ahead
        for layer in LAYERS:
            MoeExperts(way, layer)(*given)
        way.check()
    MoeExperts(way, 0)(*given)  # and nothing of layer 1
    began = time.monotonic()
    assert torch.equal(other(*given), right)
    print(f"a call beside a run that waits for its caller took {time.monotonic() - began:.3f} s")
    assert time.monotonic() - began < 10.0
    time.sleep(3.0)
    with pytest.raises(PassLate, match=r"passes\.patience_seconds = 2"):
        way.check()
    assert torch.equal(MoeExperts(way, 0)(*given), right)
    way.check()
    assert all(house.pid(rank) for rank in (0, 1)), "no rank was given up"
    way.close()


def test_members_that_would_wait_for_too_short_are_named(path: Path) -> None:
    with (
        LocalCluster(house_config(path, **GROUP | {"step__late_seconds": 3.0})) as short,
        pytest.raises(MoeError, match=r"passes\.patience_seconds = 2 is more than half of the 3 s"),
    ):
        opened(short)


@pytest.mark.parametrize("killed", [0, 1])
def test_a_member_is_killed_in_a_pass_and_is_back(path: Path, alone: Alone, killed: int) -> None:
    with LocalCluster(house_config(path, **GROUP)) as house:
        way, remote = opened(house, "survivor"), connect(Settings("remote", house.address, timeout=60.0))
        given = batch(alone, 3, seed=2)
        right = [MoeExperts(remote, layer)(*given) for layer in LAYERS]
        time.sleep(1.0)
        for _ in range(4):
            found = [MoeExperts(way, layer)(*given) for layer in LAYERS]
            way.check()
            assert all(map(torch.equal, found, right))
        os.kill(house.pid(killed), signal.SIGKILL)
        until, errors = time.monotonic() + 120.0, 0
        while True:  # a status or right answers, and nothing else
            try:
                found = [MoeExperts(way, layer)(*given) for layer in LAYERS]
                way.check()
            except (MoeError, Unavailable):
                errors += 1
                assert time.monotonic() < until
                time.sleep(0.2)
                continue
            assert all(map(torch.equal, found, right))
            if errors:
                break
            assert time.monotonic() < until
        print(f"{errors} errors until answers came again")
        remote.close()
        way.close()


@pytest.mark.gpu(2)
def test_a_dispatcher_that_does_not_say_who_lives_is_named(path: Path) -> None:
    by_nccl = GROUP | {"plan__all2all_backend": "allgather_reducescatter"}
    with (
        LocalCluster(house_config(path, **by_nccl)) as house,
        pytest.raises(MoeError, match="layer 0: allgather_reducescatter carries steps of up to 64 rows"),
    ):
        opened(house)


@pytest.mark.gpu(3)
def test_a_caller_of_its_own_gpu_is_served_by_two_others(path: Path, alone: Alone) -> None:
    with LocalCluster(house_config(path, **GROUP | {"passes__share_gpu": False})) as house:
        way, remote = (
            opened(house, "apart", device="cuda:2"),
            connect(Settings("remote", house.address, timeout=60.0)),
        )
        given = [batch(alone, 1 + turn % 7, seed=turn, device="cuda:2") for turn in range(200)]
        found, took = [], []
        for one in given:
            began = time.monotonic()
            found.append([MoeExperts(way, layer)(*one) for layer in LAYERS])
            way.check()
            took.append(time.monotonic() - began)
        for turn, (one, answers) in enumerate(zip(given, found, strict=True)):
            for layer, answer in enumerate(answers):
                assert torch.equal(answer, MoeExperts(remote, layer)(*one)), (turn, layer)
        print(f"a pass of {len(LAYERS)} layers: median {sorted(took)[len(took) // 2] * 1e6:.0f} us")
        remote.close()
        way.close()
