"""What `serve`, `plan` and `inspect` take as words: checkpoint or configuration, and where paths start."""

from __future__ import annotations

import json
import os
from argparse import ArgumentParser
from pathlib import Path

import pytest
from checkpoints import make_checkpoint

from moeserve.cli import main
from moeserve.cli.arguments.configured import add_config_flags, config_of
from moeserve.runtime.config import Config


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-MoE checkpoint of two layers."""
    path = tmp_path_factory.mktemp("models") / "qwen3"
    make_checkpoint("qwen3_moe", path)
    return path


def configured(*words: str) -> Config:
    """What `serve` makes of these words."""
    parser = ArgumentParser()
    add_config_flags(parser, serving=True)
    return config_of(parser.parse_args(words))


def test_the_first_word_is_the_checkpoint(checkpoint: Path) -> None:
    assert configured(str(checkpoint)) == configured("--checkpoint", str(checkpoint))


def test_a_word_and_a_file_go_together(checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "service.toml"
    file.write_text('[model]\ncheckpoint = "other"\n[server]\nport = 7\n')
    for words in ((str(file), str(checkpoint)), (str(checkpoint), str(file))):
        config = configured(*words)
        assert (config.model.checkpoint, config.server.port) == (str(checkpoint), 7)


def test_a_folder_may_be_called_like_a_file(tmp_path: Path) -> None:
    (tmp_path / "weights.toml").mkdir()
    assert configured(str(tmp_path / "weights.toml")).model.checkpoint == str(tmp_path / "weights.toml")


@pytest.mark.parametrize("redirected", [False, True])
def test_a_configuration_may_come_by_a_pipe(
    redirected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of `serve <(envsubst < service.toml)`, and of /dev/stdin; it lies in no folder."""
    text = b'[model]\ncheckpoint = "weights"\n[server]\nport = 7\n'
    monkeypatch.chdir(tmp_path)
    if redirected:
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "elsewhere" / "service.toml").write_bytes(text)
        end = os.open(tmp_path / "elsewhere" / "service.toml", os.O_RDONLY)
    else:
        end, written = os.pipe()
        os.write(written, text)
        os.close(written)
    try:
        config = configured(f"/dev/fd/{end}")
    finally:
        os.close(end)
    assert (config.model.checkpoint, config.server.port) == (str(tmp_path / "weights"), 7)


def test_relative_paths_of_flags_start_at_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "service.toml").write_text('[model]\ncheckpoint = "weights"\n')
    monkeypatch.chdir(tmp_path)
    assert configured("files/service.toml").model.checkpoint == str(tmp_path / "files" / "weights")
    for words in (("weights",), ("--checkpoint", "weights")):
        config = configured("files/service.toml", *words)
        assert config.model.checkpoint == str(tmp_path / "weights")


def test_a_plan_is_found_beside_its_file_from_anywhere(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = checkpoint.parent / "service.toml"
    file.write_text('[model]\ncheckpoint = "qwen3"\n')
    monkeypatch.chdir(tmp_path)
    assert main(["plan", str(file), "--device", "cpu", "--json"]) == 0
    by_file = json.loads(capsys.readouterr().out)
    monkeypatch.chdir(checkpoint.parent)
    assert main(["plan", "qwen3", "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == by_file


def test_inspect_takes_the_flag_too(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(checkpoint)]) == 0
    shown = capsys.readouterr().out
    assert main(["inspect", "--checkpoint", str(checkpoint)]) == 0
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize("command", ["serve", "plan", "inspect"])
@pytest.mark.parametrize("words", [["a", "--checkpoint", "b"], ["a", "b"]], ids=" ".join)
def test_two_checkpoints_are_refused_by_name(
    command: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, *words]) == 2
    named = "a and --checkpoint b" if "--checkpoint" in words else "a and b"
    assert capsys.readouterr().err == f"moeserve {command}: {named} name 2 checkpoints: give one\n"


def test_two_files_are_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "a.toml", "b.toml"]) == 2
    assert "a.toml and b.toml are two configurations: give one" in capsys.readouterr().err


def test_inspect_without_a_checkpoint_says_what_to_give(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect"]) == 2
    assert "no checkpoint is named: give a folder with config.json" in capsys.readouterr().err
