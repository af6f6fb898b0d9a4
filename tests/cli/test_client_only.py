"""Every subcommand where only the base install is there: numpy, grpcio and protobuf, without any extra."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from moeserve.cli import COMMANDS
from moeserve.cli.shown.errors import EXTRAS

ROOT = Path(__file__).parents[2]
CLIENT_ONLY = ROOT / "tests" / "support" / "client_only.py"
NOBODY = "127.0.0.1:1"

WORDS: dict[str, list[list[str]]] = {
    "serve": [["weights"], ["--checkpoint", "weights", "--launcher", "local"]],
    "plan": [["weights"], ["--table", "machines"], ["--from-vllm-env"], ["weights", "--measure"]],
    "inspect": [["weights"], ["weights", "--json"]],
    "quantize": [["weights", "smaller", "--to", "fp8"]],
    "record": [["--from", "load.pt", "--out", "trace.jsonl"]],
    "simulate": [
        ["--load", "load.pt", "--ranks", "4"],
        ["--load", "load.json", "--ranks", "4", "--checkpoint", "weights"],
    ],
}
"""Command lines that need an extra: they open a checkpoint, start ranks, or read a file of torch's."""

ASKING: dict[str, list[str]] = {
    "status": [NOBODY],
    "health": [NOBODY],
    "log-level": [NOBODY],
    "rebalance": [NOBODY],
    "reload": [NOBODY, "weights"],
    "scale": [NOBODY, "3"],
    "bench": [NOBODY],
    "record": [NOBODY, "--out", "trace.jsonl"],
}
"""Command lines that ask a service which is not there."""


def run(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """A `moeserve` command line where every other package than the base install's is missing."""
    return subprocess.run(
        [sys.executable, str(CLIENT_ONLY), *words],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=cwd,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with a count file, the same for torch, and a folder for a checkpoint."""
    (tmp_path / "weights").mkdir()
    (tmp_path / "load.pt").write_bytes(b"")
    (tmp_path / "load.json").write_text(json.dumps({"logical_count": [[3, 1, 2, 5], [1, 1, 4, 2]]}))
    return tmp_path


def test_the_hook_leaves_the_base_install_and_nothing_else() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(CLIENT_ONLY.parent)!r}); from client_only import ClientOnly\n"
        "sys.meta_path.insert(0, ClientOnly())\n"
        "import grpc, numpy, google.protobuf, moeserve.proto.client\n"
        "for name in ('torch', 'ray', 'safetensors', 'tqdm', 'prometheus_client', 'transformers'):\n"
        "    try: __import__(name)\n"
        "    except ModuleNotFoundError as error: assert error.name == name\n"
        "    else: raise SystemExit(f'{name} was imported')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=ROOT)


def test_the_list_of_commands() -> None:
    done = run("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert all(f"    {name}" in done.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_every_command(name: str) -> None:
    done = run(name, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: moeserve {name}")


def test_every_command_is_walked() -> None:
    assert WORDS.keys() | ASKING.keys() | {"version"} == COMMANDS.keys()


@pytest.mark.parametrize(
    "words", [[name, *words] for name, lines in WORDS.items() for words in lines], ids=" ".join
)
def test_what_needs_an_extra_says_in_one_line_which(words: list[str], folder: Path) -> None:
    done = run(*words, cwd=folder)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert (
        line == f"moeserve {words[0]}: this needs the package torch; pip install 'moeserve[server]' brings it"
    )


@pytest.mark.parametrize("words", [[name, *words] for name, words in ASKING.items()], ids=" ".join)
def test_what_asks_a_service_needs_no_extra(words: list[str], folder: Path) -> None:
    done = run(*words, "--timeout", "0.5", cwd=folder)
    assert done.returncode == 1
    assert "UNAVAILABLE" in done.stderr or "UNREACHABLE" in done.stdout
    assert "Traceback" not in done.stderr and "pip install" not in done.stderr


def test_loads_are_simulated_and_recorded_without_an_extra(folder: Path) -> None:
    assert run("record", "--from", "load.json", "--out", "trace.jsonl", cwd=folder).returncode == 0
    done = run("simulate", "--load", "trace.jsonl", "--ranks", "2", "--json", cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(json.loads(done.stdout)) == 4  # policies


def test_version_needs_no_extra() -> None:
    assert run("version").returncode == 0


def test_the_extras_that_are_named_bring_the_packages() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    distributions = {"grpc_health": "grpcio-health-checking", "grpc_reflection": "grpcio-reflection"}
    for package, extra in EXTRAS.items():
        distribution = distributions.get(package, package)
        assert any(line.startswith(distribution) for line in extras[extra]), package
