"""`bench/experts/gpu_sanitize.py`: every kernel of ours, grouping and odd size runs under the sanitizer."""

import importlib
from types import ModuleType

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
