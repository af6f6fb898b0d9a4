"""The command line as a whole: what it lists, what it imports, and how it speaks of errors."""

from __future__ import annotations

import subprocess
import sys

import pytest

from moeserve import __version__
from moeserve.cli import COMMANDS, explain, main

BASE = ("status", "health", "rebalance", "reload", "scale", "bench", "version", "record", "simulate")
"""Commands of the base install: numpy, grpcio, protobuf."""


def run_apart(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: moeserve {name}")
    assert "--debug" in shown


def test_the_list_of_commands_imports_nothing_heavy() -> None:
    shown = run_apart(
        "import sys; from moeserve.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'numpy', 'grpc', 'ray'} & set(sys.modules)))"
    )
    assert shown.endswith("[]\n")
    assert all(f"    {name}" in shown for name in COMMANDS)


@pytest.mark.parametrize("name", BASE)
def test_a_command_of_the_base_install_needs_no_torch(name: str) -> None:
    code = f"import sys, moeserve.cli.{name}; print({{'torch', 'ray', 'safetensors'}} & set(sys.modules))"
    assert run_apart(code) == "set()\n"


def test_no_command_and_an_unknown_one_are_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["sevre"]):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 2
    assert "invalid choice: 'sevre' (choose from 'serve', 'plan'" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["moeserve"] == __version__
    assert lines["numpy"][0].isdigit()


def test_a_missing_package_is_named_with_what_brings_it() -> None:
    missing = ModuleNotFoundError("No module named 'ray'", name="ray")
    assert explain(missing) == "this needs the package ray; pip install 'moeserve[cluster]' brings it"


@pytest.mark.parametrize("flag_first", [True, False])
def test_debug_shows_the_traceback_wherever_it_stands(flag_first: bool) -> None:
    words = ["plan", "--checkpoint", "nowhere"]
    with pytest.raises(ValueError, match="nowhere"):
        main(["--debug", *words] if flag_first else [*words, "--debug"])
