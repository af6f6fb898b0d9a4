"""How many cores a process may use, by the cores it is bound to and by what its control groups say."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moeserve.proto import host as module
from moeserve.proto.host import usable_cores

HOST = 64


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(HOST)), raising=False)


def groups(root: Path, of: str, files: dict[str, str]) -> Path:
    """A host whose process is in the groups of these lines of /proc/self/cgroup."""
    for name, text in ({"proc/self/cgroup": of} | files).items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def second(quota: str, group: str = "") -> dict[str, str]:
    """A group's files, version 2."""
    return {f"sys/fs/cgroup/{group}cpu.max": f"{quota} 100000\n"}


def first(quota: str, group: str = "") -> dict[str, str]:
    """A group's files, version 1."""
    folder = f"sys/fs/cgroup/cpu/{group}"
    return {f"{folder}cpu.cfs_quota_us": f"{quota}\n", f"{folder}cpu.cfs_period_us": "100000\n"}


@pytest.mark.parametrize(
    ("of", "files", "cores"),
    [
        ("0::/\n", {}, HOST),
        ("0::/\n", second("max"), HOST),
        ("0::/\n", second("800000"), 8),
        ("0::/\n", second("250000"), 2),
        ("0::/\n", second("20000"), 1),
        ("0::/\n", second("9900000"), HOST),
        ("0::/pod/box\n", second("max", "pod/box/") | second("400000", "pod/"), 4),
        ("0::/not/shown\n", second("300000"), 3),
        ("0::/\n", second("three"), HOST),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "100000 0\n"}, HOST),
        ("4:memory:/x\n3:cpu,cpuacct:/x\n", first("600000", "x/"), 6),
        ("3:cpu:/x\n0::/\n", first("-1", "x/"), HOST),
        ("3:cpuacct:/\n", first("100000"), HOST),
    ],
)
def test_what_a_process_may_use_is_the_least_that_any_of_its_groups_has(
    tmp_path: Path, of: str, files: dict[str, str], cores: int
) -> None:
    assert usable_cores(groups(tmp_path, of, files)) == cores


def test_a_process_that_is_bound_to_few_cores_has_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5, 9}, raising=False)
    assert usable_cores(groups(tmp_path, "0::/\n", second("800000"))) == 2


def test_elsewhere_than_on_linux_the_host_says_how_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(module.os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    assert usable_cores(tmp_path) == 12
