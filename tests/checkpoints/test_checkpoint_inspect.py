"""`moeserve inspect`: what it prints is what the checkpoint is, and it reads no weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint, quantize_fp8_block

from moeserve.checkpoints.store import TensorStore
from moeserve.cli import main
from moeserve.cli.shown.units import human, ranges


def inspect(*arguments: str) -> int:
    return main(["inspect", *arguments])


@pytest.fixture
def no_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(TensorStore, "read", refuse)


@pytest.mark.usefixtures("no_reading")
def test_text_shows_layers_bytes_and_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint("deepseek_v3", tmp_path, dtype=torch.bfloat16, layers=4, experts=10, n_group=1)
    assert inspect(str(tmp_path), "--ranks", "4") == 0
    lines = capsys.readouterr().out.splitlines()
    expert = 3 * 64 * 128 * 2
    assert lines[1] == "architecture  DeepseekV3ForCausalLM (deepseek_v3)"
    assert lines[3].startswith(
        "routing       DeepSeekV3 (sigmoid), top 2 of 10, renormalized, correction bias"
    )
    assert lines[4] == f"experts       {human(3 * 10 * expert)} in 3 layers"
    row = next(line for line in lines if line.startswith("1-3"))
    assert " ".join(row.split()) == "1-3 10 64 128 silu bf16 - bf16 48 KiB 480 KiB"
    ranks = [line.split(maxsplit=2) for line in lines[-4:]]
    assert [rank[:2] for rank in ranks] == [["0", "0-2"], ["1", "3-5"], ["2", "6-7"], ["3", "8-9"]]
    assert [rank[2] for rank in ranks] == [human(3 * count * expert) for count in (3, 3, 2, 2)]


@pytest.mark.usefixtures("no_reading")
def test_layers_that_choose_by_token_id_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint("deepseek_v4", tmp_path)
    assert inspect(str(tmp_path)) == 0
    told = "by token id   layers 0: a table chooses experts, not logits"
    assert told in capsys.readouterr().out.splitlines()
    assert inspect(str(tmp_path), "--json") == 0
    assert json.loads(capsys.readouterr().out)["by_token"] == [0]
    make_checkpoint("mixtral", tmp_path / "other")
    assert inspect(str(tmp_path / "other")) == 0
    assert "by token id" not in capsys.readouterr().out


@pytest.mark.usefixtures("no_reading")
def test_columns_are_aligned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint("gpt_oss", tmp_path)
    inspect(str(tmp_path))
    header, row = capsys.readouterr().out.splitlines()[6:8]
    for title, value in (("activation", "swigluoai + bias"), ("weights", "fp32"), ("an expert", "97.2 KiB")):
        assert header.index(title) == row.index(value)


@pytest.mark.usefixtures("no_reading")
def test_json_has_every_layer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint("mixtral", tmp_path)
    quantize_fp8_block(tmp_path)
    assert inspect(str(tmp_path), "--ranks", "3", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["dialect"], found["dtype"], found["model_type"]) == ("fp8_block", "float32", "mixtral")
    assert [layer["layer"] for layer in found["layers"]] == [0, 1]
    assert found["layers"][0]["weights"] == "fp8_block128"
    assert found["layers"][0]["activations"] == "fp8_group128"
    assert found["layers"][0]["expert_nbytes"] == 3 * (64 * 128 + 4)
    assert found["nbytes"] == 2 * 8 * 3 * (64 * 128 + 4) == sum(rank["nbytes"] for rank in found["ranks"])
    assert [rank["experts"] for rank in found["ranks"]] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert found["routing"]["top_k"] == 2


def test_more_ranks_than_experts_leave_some_empty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint("mixtral", tmp_path, experts=2, top_k=1)
    assert inspect(str(tmp_path), "--ranks", "3") == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == ["2", "none", "0", "B"]


@pytest.mark.parametrize(
    ("arguments", "message"), [((), "cannot read"), (("--ranks", "0"), "--ranks=0 must be 1 to 65536")]
)
def test_what_cannot_be_shown_is_said(
    arguments: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert inspect(str(tmp_path), *arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"moeserve inspect: {message}")


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (44 * 2**20, "44 MiB"),
        (3 * 2**50, "3072 TiB"),
    ],
)
def test_human_units(nbytes: int, text: str) -> None:
    assert human(nbytes) == text


@pytest.mark.parametrize(("numbers", "text"), [([], "none"), ([4], "4"), ([0, 1, 2, 5, 7, 8], "0-2, 5, 7-8")])
def test_ranges(numbers: list[int], text: str) -> None:
    assert ranges(numbers) == text


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"routed_scaling_factor": None}, "has routed_scaling_factor=None, which must be a number"),
        ({"n_group": {"of": 2}}, "config.json has a value of another kind than expected"),
    ],
)
def test_a_router_that_the_config_does_not_describe_is_named(
    keys: dict[str, object], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_checkpoint("deepseek_v3", tmp_path, n_group=1)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | keys))
    assert inspect(str(tmp_path)) == 2
    assert said in capsys.readouterr().err
