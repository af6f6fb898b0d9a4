"""The device of a rank's process, and what its grids leave to others."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from moeserve.device import waits
from moeserve.device.machine import machine_named
from moeserve.runtime.config import Config
from moeserve.runtime.launch import environment


def test_multiprocessors_are_held_before_a_rank_launches_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: done.append(device))
    monkeypatch.setattr(environment, "hold", lambda device, count: done.append((device, count)))
    config = Config().with_values({"members.held_multiprocessors": 12})
    device = environment.own_device(config, machine_named("h200"), 0)
    assert done == ["cuda:0", ("cuda:0", 12)] and device == "cuda:0"


def test_blocks_wait_for_others_for_as_long_as_is_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "_longest", waits._longest)
    config = Config().with_values({"step.blocks_seconds": 25.0})
    environment.own_device(config, machine_named("cpu", ()), 0)
    assert waits._longest == 25.0


def test_a_cpu_has_none_to_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "hold", lambda device, count: pytest.fail("nothing is held on a CPU"))
    config = Config().with_values({"members.held_multiprocessors": 12})
    assert environment.own_device(config, machine_named("cpu", ()), 3) == "cpu"


@pytest.mark.parametrize(
    ("machine", "gpus", "shares", "on_host", "backend"),
    [
        ("cpu", 0, True, 2, "gloo"),
        ("h100", 2, True, 2, "nccl"),
        ("h100", 1, True, 2, "gloo"),
        ("h100", 1, True, 1, "nccl"),  # the other rank is on another host
        ("h100", 1, False, 2, "nccl"),  # it says itself that it takes no two ranks of one GPU
    ],
)
def test_ranks_that_share_a_gpu_meet_without_nccl(
    monkeypatch: pytest.MonkeyPatch,
    machine: str,
    gpus: int,
    shares: bool,
    on_host: int,
    backend: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    config = Config().with_values({"parallel.data_parallel_size": 2, "passes.share_gpu": shares})
    assert environment.group_backend(config, machine_named(machine, ()), on_host) == backend


@pytest.mark.parametrize(
    ("named", "on_host", "backend"),
    [
        ("nvlink_ll", 2, "gloo"),
        ("nvlink_ht", 2, "gloo"),
        ("nvlink_ll", 1, "gloo"),  # ranks agree, whatever each knows of others' hosts
        ("all2allv", 2, "nccl"),
        ("auto", 2, "nccl"),
    ],
)
def test_ranks_that_only_meet_by_their_group_form_it_by_gloo(
    monkeypatch: pytest.MonkeyPatch, named: str, on_host: int, backend: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    config = Config().with_values({"parallel.data_parallel_size": 2, "plan.all2all_backend": named})
    assert environment.group_backend(config, machine_named("h100", ()), on_host) == backend


TUNED = """
import gc
from moeserve.runtime.launch.environment import tune_process
imported = len(gc.get_objects())
tune_process()
held = [[] for _ in range(10)]
left = {id(one) for one in gc.get_objects()}
print(imported, gc.get_freeze_count(), all(id(one) in left for one in held), len(left))
"""


def test_what_a_process_has_imported_is_left_out_of_collections() -> None:
    said = subprocess.run(
        [sys.executable, "-c", TUNED], capture_output=True, text=True, check=True, timeout=60
    )
    imported, frozen, looked_at, left = said.stdout.split()
    assert int(frozen) >= int(imported) > 10_000
    assert looked_at == "True" and int(left) < int(imported) / 10, "what comes later is looked at"
