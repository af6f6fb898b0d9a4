"""Whether a process has its GPU for itself: with a library of the test's own, and on a GPU."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from moeserve.device import sharing
from moeserve.device.sharing import GpuProcesses, Unknown, by_service

UUID = "6a4f0a52-0000-1111-2222-333344445555"
SECONDS = 20.0
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
        self.before: Callable[[], object] = lambda: None

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, device: Any) -> int:  # the library's name
        assert uuid == b"GPU-" + UUID.encode()
        return 6 if self.wrong == "device" else 0

    def nvmlDeviceGetComputeRunningProcesses_v3(self, device: Any, count: Any, infos: None) -> int:
        self.before()
        self.asked += 1
        if self.wrong == "processes":
            return 3
        count._obj.value = self.count
        return 7 if self.count else 0


@pytest.mark.parametrize("count", [1, 3])
def test_processes_are_counted(count: int) -> None:
    found = GpuProcesses(UUID, Nvml(count))
    assert found.count() == count
    found.look()
    assert found.alone is (count == 1)


@pytest.mark.parametrize(
    ("library", "why"),
    [
        (Nvml(0), "counts none"),
        (Nvml(wrong="device"), "nvmlDeviceGetHandleByUUID gives 6"),
        (Nvml(wrong="processes"), "gives 3"),
        (object(), "has no nvmlDeviceGetComputeRunningProcesses_v3"),
    ],
)
def test_where_nobody_knows_it_is_not_alone_and_the_log_says_why(
    library: Any, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    found = GpuProcesses(UUID, library)
    with pytest.raises(Unknown, match=why):
        found.count()
    with caplog.at_level("INFO"):
        found.look()
        found.look()
    assert not found.alone
    assert caplog.text.count(why) == 1


def test_it_is_counted_again_after_a_while_beside_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "LOOK_SECONDS", 0.05)
    library = Nvml(1)
    found = GpuProcesses(UUID, library)
    wait_for(lambda: found.alone)
    library.count = 2
    wait_for(lambda: not found.alone)
    monkeypatch.setattr(sharing, "LOOK_SECONDS", 3600.0)
    wait_for(lambda: not found._looks)
    before = library.asked
    assert not any(found.alone for _ in range(100))
    assert library.asked == before


def test_a_driver_that_does_not_answer_holds_nobody_up() -> None:
    library, answers = Nvml(1), threading.Event()
    library.before = lambda: answers.wait(SECONDS)
    found = GpuProcesses(UUID, library)
    began = time.monotonic()
    assert not any(found.alone for _ in range(10))
    assert time.monotonic() - began < SECONDS / 2
    answers.set()
    wait_for(lambda: found.alone)


def wait_for(true: Callable[[], bool]) -> None:
    until = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < until
        time.sleep(0.005)


@pytest.mark.parametrize(("told", "is_so"), [((0, 1), True), ((0, 0), False), ((1, 1), False)])
def test_the_driver_says_whether_processes_share_a_device(
    monkeypatch: pytest.MonkeyPatch, told: tuple[int, int], *, is_so: bool
) -> None:
    asked = []

    def attribute(which: str, device: int) -> tuple[int, int]:
        asked.append((which, device))
        return told

    driver = SimpleNamespace(
        CUdevice_attribute=SimpleNamespace(CU_DEVICE_ATTRIBUTE_MPS_ENABLED="MPS"),
        CUresult=SimpleNamespace(CUDA_SUCCESS=0),
        cuDeviceGetAttribute=attribute,
    )
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=driver))
    assert by_service("cuda:1") is is_so and asked == [("MPS", 1)]
    assert not by_service("cpu") and len(asked) == 1


@pytest.mark.gpu(1)
def test_this_process_shares_its_gpu_by_no_service() -> None:
    torch.ones(1, device="cuda").item()
    assert not by_service("cuda:0")


@pytest.mark.skipif(torch.cuda.is_available(), reason="it is about machines without NVIDIA's driver")
def test_without_the_library_nobody_knows() -> None:
    with pytest.raises(Unknown, match=sharing.LIBRARY):
        GpuProcesses(UUID).count()


@pytest.mark.gpu(1)
def test_the_driver_counts_this_process_and_another_one() -> None:
    torch.ones(1, device="cuda").item()
    processes = GpuProcesses(str(torch.cuda.get_device_properties(0).uuid))
    try:
        before = processes.count()
    except Unknown as why:
        if "counts none" not in str(why):
            raise
        pytest.skip("NVML counts no process here, not even this one, as in a container of its own")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", OTHER], **pipes) as other:  # type: ignore[call-overload]
        assert other.stdout.readline() == "there\n"
        assert processes.count() == before + 1
        other.stdin.write("\n")
        other.stdin.flush()
