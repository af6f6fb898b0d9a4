"""What the documents name is there: links, files, keys, flags, codes; and the README's quick start runs."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from moeserve.cli import COMMANDS
from moeserve.cli.arguments.configured import FLAGS, SERVE_FLAGS
from moeserve.runtime.config import Config
from moeserve.runtime.doors.failures import _TABLE as STATUSES
from moeserve.runtime.launch.local_cluster import LocalCluster
from moeserve.runtime.telemetry.metrics import METRICS

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FOLDERS = ("moeserve", "tests", "bench", "deploy", "docs")
LINK = re.compile(r"\]\(([^)\s]+)\)")
NAMED_FILE = re.compile(rf"(?<![\w/.])((?:{'|'.join(FOLDERS)})/[\w./-]*\w/?)")
KEY = re.compile(r"^\| `([a-z]+\.[a-z0-9_]+)` \|([^|]*)\|", re.MULTILINE)

page = pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))


def keys(config: Config) -> dict[str, Any]:
    """Every key with its default."""
    tables = {field.name: getattr(config, field.name) for field in fields(config)}
    return {
        f"{name}.{f.name}": getattr(value, f.name) for name, value in tables.items() for f in fields(value)
    }


@page
def test_links_lead_somewhere(path: Path) -> None:
    text = path.read_text()
    for target in LINK.findall(text):
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        found = (path.parent / file).resolve() if file else path
        assert found.exists(), target
        headings = (
            {
                re.sub(r"[^a-z0-9 -]", "", line.lstrip("# ").lower()).replace(" ", "-")
                for line in found.read_text().splitlines()
                if line.startswith("#")
            }
            if anchor
            else {""}
        )
        assert anchor in headings, target


@page
def test_files_that_are_named_exist(path: Path) -> None:
    made_when_run = {"bench/results/", "moeserve/deploy"}  # the folder of a wheel, and what a run writes
    for name in NAMED_FILE.findall(path.read_text()):
        if not any(name.startswith(made) for made in made_when_run):
            assert (ROOT / name).exists(), name


def test_every_key_is_documented_with_its_default() -> None:
    documented = dict(KEY.findall((ROOT / "docs" / "configuration.md").read_text()))
    expected = keys(Config())
    assert documented.keys() == expected.keys()
    for key, said in documented.items():
        value = expected[key]
        word = re.sub(r"[`\s]", "", said)
        if said.strip().endswith("iB"):
            size, unit = said.split()
            assert int(size) << {"MiB": 20, "GiB": 30}[unit] == value, key
        elif key != "model.name":  # by the folder's name
            shown = str(value).lower() if isinstance(value, bool) else "[]" if value == () else str(value)
            assert word == shown, key


@page
def test_flags_and_commands_exist(path: Path) -> None:
    flags = {*FLAGS, *SERVE_FLAGS, "--enable-expert-parallel", "--layers"}
    for line in path.read_text().splitlines():
        for command, rest in re.findall(r"moeserve (serve|plan|[a-z]+(?= HOST))([^`|]*)", line):
            assert command in COMMANDS, line
            if command == "serve":
                assert set(re.findall(r"--[a-z0-9-]+", rest)) <= flags, line


def test_every_failure_is_documented_under_its_code() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    rows = dict(re.findall(r"^\| ([A-Z_]+) \| (`.+?`) \|", text, re.MULTILINE))
    for _, code, reason in STATUSES:
        assert f"`{reason}`" in rows[code], reason


def test_metrics_that_are_named_exist() -> None:
    named = set(re.findall(r"\bmoe_[a-z_]+\b", (ROOT / "docs" / "operations.md").read_text()))
    assert named and named <= METRICS.keys()


def test_decisions_are_numbered_without_a_gap() -> None:
    numbers = [int(path.name[:4]) for path in sorted((ROOT / "docs" / "adr").glob("*.md"))]
    assert numbers == list(range(1, len(numbers) + 1))


def test_the_quick_start_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    make, call, generate = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    exec(make, {})
    shown = {
        "model.checkpoint": "tiny-moe",
        "parallel.data_parallel_size": 4,
        "parallel.enable_expert_parallel": True,
        "plan.device": "cpu",
        "server.port": 0,
        "server.metrics_port": -1,
    }
    with LocalCluster(Config().with_values(shown)) as house:
        said: dict[str, Any] = {}
        exec(call.replace("127.0.0.1:50051", house.address), said)
        assert said["mixed"].shape == (5, 64) and abs(said["mixed"]).max() > 0
        exec(generate.replace("127.0.0.1:50051", house.address), said)
        assert type(said["model"]).__name__ == "Qwen3MoeForCausalLM"
