"""`bench/experts/gpu_sanitize.py`: every kernel of ours, grouping and odd size runs under the sanitizer."""

import importlib
import time
from types import ModuleType
from typing import TextIO

import pytest

from moeserve.device.machine import machine_named
from moeserve.experts.batch import Grouping
from moeserve.experts.kernels import KERNELS


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The bench, as on an H200 with everything installed."""
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")  # which the bench would set for good
    module = importlib.import_module("bench.experts.gpu_sanitize")
    monkeypatch.setattr(module, "this_machine", lambda: machine_named("h200"))
    return module


def test_every_kernel_of_ours_is_met_with_every_grouping_and_both_sizes(bench: ModuleType) -> None:
    cases = list(bench.cases([]))
    ours = {name for name, entry in KERNELS.items() if "sm90" in entry.archs and entry.modules & bench.OURS}
    found = {case.entry.name for case in cases}
    assert found == ours
    for name in found:
        own = [case for case in cases if case.entry.name == name]
        assert {case.grouping for case in own} == set(KERNELS[name].groupings) <= set(Grouping)
        assert {case.odd for case in own} == {True, False}
        assert {0 in case.counts for case in own} == {True}
    assert all(case.shape.hidden % case.entry.multiple_of[0] == 0 for case in cases)


def test_kernels_can_be_named_and_a_case_has_a_line_of_its_own(bench: ModuleType) -> None:
    cases = list(bench.cases(["triton_fp4"]))
    assert {case.entry.name for case in cases} == {"triton_fp4"}
    assert len({str(case) for case in cases}) == len(cases)


def test_reports_of_tritons_own_dispatch_are_told_apart(bench: ModuleType) -> None:
    lines = next(iter(bench.dispatching("hopper_gemm.py")))
    inside, outside = lines.start, lines.start - 10
    printed = "".join(
        f"========= Error: Race reported between Write access at gemm+0x1 in hopper_gemm.py:{write}\n"
        f"=========     and Read access at gemm+0x2 in hopper_gemm.py:{inside} [8 hazards]\n=========\n"
        for write in (inside, outside)
    )
    reports = bench.REPORT.split(f"========= COMPUTE-SANITIZER\n{printed}========= RACECHECK SUMMARY: 2\n")[
        1:
    ]
    assert [bench.is_dispatch(report) for report in reports] == [True, False]
    assert not bench.is_dispatch("Invalid __global__ read of size 4 bytes\n=========     at prefill+0x12\n")


def test_dispatchers_run_by_ranks_and_by_members_one_after_the_other(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two that wait for each other would take turns of a GPU with all others."""
    under_way: list[str] = []
    commands: list[list[str]] = []

    class Process:
        """One that ends well once it is waited for."""

        pid = returncode = 0

        def __init__(self, command: list[str], *, stdout: TextIO, **how: object) -> None:
            assert not under_way
            under_way.append(" ".join(command))
            commands.append(command)
            stdout.write("ok   rank 0\nok   rank 1\n========= ERROR SUMMARY: 0 errors\n")

        def wait(self, seconds: float) -> int:
            under_way.clear()
            return 0

    monkeypatch.setattr(bench.subprocess, "Popen", Process)
    monkeypatch.setattr(bench, "sanitizer", lambda tool: ["compute-sanitizer", "--tool", tool])
    tools = ["memcheck", "racecheck", "synccheck"]
    results = bench.sanitize(tools, list(bench.DISPATCHERS), time.monotonic() + 60, keep=False)
    assert len(results) == len(commands) == 3 * 6
    assert [result.ours for result in results] == [0.0] * 18
    assert {result.unit for result in results} == {"reports in 2 members"}
    assert all(result.aim == 0.0 for result in results)
    for name in ("nvlink_ll", "nvlink_ht"):
        own = [command for command in commands if name in command]
        assert len(own) == 9
        assert {"1x1" in command for command in own} == {True, False}
        assert all("--watched" in command and command.count("-m") == 2 for command in own)
    assert "memcheck, nvlink_ll, both,lane: 0 reports" in capsys.readouterr().out
