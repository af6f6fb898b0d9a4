"""Whether a process has its GPU for itself: with a library of the test's own, and on a GPU."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from moeserve.device import sharing
from moeserve.device.sharing import GpuProcesses

UUID = "6a4f0a52-0000-1111-2222-333344445555"
OTHER = """
import sys, torch
torch.ones(1, device="cuda").item()
print("there", flush=True)
sys.stdin.readline()
"""


class Nvml:
    """Counts as many processes as it is told."""

    def __init__(self, count: int = 1, wrong: str = "") -> None:
        self.count, self.wrong, self.asked = count, wrong, 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, device: Any) -> int:  # the library's name
        assert uuid == b"GPU-" + UUID.encode()
        return 6 if self.wrong == "device" else 0

    def nvmlDeviceGetComputeRunningProcesses_v3(self, device: Any, count: Any, infos: None) -> int:
        self.asked += 1
        if self.wrong == "processes":
            return 3
        count._obj.value = self.count
        return 7 if self.count else 0


@pytest.mark.parametrize(
    ("nvml", "count"),
    [
        (Nvml(1), 1),
        (Nvml(3), 3),
        (Nvml(0), None),
        (Nvml(wrong="device"), None),
        (Nvml(wrong="processes"), None),
    ],
)
def test_processes_are_counted_where_they_can_be(nvml: Nvml, count: int | None) -> None:
    found = GpuProcesses(UUID, nvml)
    assert found.count() == count
    assert found.alone is (count == 1)


def test_it_is_asked_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(sharing.time, "monotonic", lambda: now)
    nvml = Nvml(1)
    found = GpuProcesses(UUID, nvml)
    assert found.alone and found.alone and nvml.asked == 1
    nvml.count = 2
    assert found.alone
    now += sharing.LOOK_SECONDS
    assert not found.alone and nvml.asked == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="it is about machines without NVIDIA's driver")
def test_without_the_library_nobody_knows() -> None:
    assert GpuProcesses(UUID).count() is None
    assert not GpuProcesses(UUID).alone


@pytest.mark.gpu(1)
def test_the_driver_counts_this_process_and_another_one() -> None:
    torch.ones(1, device="cuda").item()
    processes = GpuProcesses(str(torch.cuda.get_device_properties(0).uuid))
    before = processes.count()
    assert before is not None
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", OTHER], **pipes) as other:  # type: ignore[call-overload]
        assert other.stdout.readline() == "there\n"
        assert processes.count() == before + 1
        other.stdin.write("\n")
        other.stdin.flush()
