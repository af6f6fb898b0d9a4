"""`moeserve plan`: one section for layers that share a plan, reasons for all that was refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint

from moeserve.cli import main
from moeserve.dispatch.backends import DISPATCHERS
from moeserve.experts.kernels import KERNELS

EP4 = ("--data-parallel-size", "4", "--enable-expert-parallel")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Qwen3-MoE checkpoint of two layers in bf16."""
    path = tmp_path_factory.mktemp("qwen3")
    make_checkpoint("qwen3_moe", path, dtype=torch.bfloat16)
    return str(path)


def planned(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What `plan --json` prints."""
    assert main(["plan", *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_layers_with_one_plan_share_a_section(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--checkpoint", checkpoint, "--device", "cpu", *EP4]) == 0
    machine, layers = capsys.readouterr().out.strip().split("\n\n")
    assert (
        machine.splitlines()[1] == "ranks    4 (data parallel 4, tensor parallel 1), each with whole experts"
    )
    assert layers.startswith("layers 0-1: 8 experts, top 2, H=64, I=128 a rank\n")
    assert "kernel   torch_grouped_mm (verified: cpu" in layers
    assert "    not local: joins at most 1 ranks, not 4" in layers


def test_every_row_is_chosen_or_refused(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    (plan,) = planned(["--checkpoint", checkpoint, *EP4], capsys)["plans"]
    named = {plan["kernel"]["name"], plan["carrier"]["name"], *(row["name"] for row in plan["refused"])}
    assert named >= {*KERNELS, *DISPATCHERS}
    assert all(row["reason"] for row in plan["refused"])
    assert plan["layers"] == [0, 1]


def test_slices_are_planned_with_their_own_size(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--checkpoint", checkpoint, "--device", "cpu", "--tensor-parallel-size", "4"]) == 0
    shown = capsys.readouterr().out
    assert "each with a 1/4 slice of every expert" in shown
    assert "I=32 a rank" in shown


def test_a_named_machine_needs_none(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(["--checkpoint", checkpoint, "--machine", "h200", *EP4], capsys)
    assert (found["machine"]["arch"], found["mesh"]) == ("sm90", {"dp": 4, "tp": 1, "ep": 4})
    (plan,) = found["plans"]
    reasons = {row["name"]: row["reason"] for row in plan["refused"]}
    assert reasons["torch_reference"] == "a reference serves on a GPU only when named"


def test_another_systems_name_of_a_carrier_is_understood(
    checkpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (plan,) = planned(["--checkpoint", checkpoint, "--all2all-backend", "ag_rs", *EP4], capsys)["plans"]
    assert plan["carrier"]["name"] == "allgather_reducescatter"


def test_an_unknown_machine_is_refused_with_those_known(
    checkpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--checkpoint", checkpoint, "--machine", "tpu"]) == 2
    assert "unknown machine 'tpu'; known: cpu, h100, h200" in capsys.readouterr().err


def test_flags_override_the_file(checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "house.toml"
    file.write_text(
        f"[model]\ncheckpoint = '{checkpoint}'\nlayers = [0]\n"
        "[parallel]\ndata_parallel_size = 2\nenable_expert_parallel = true\n"
    )
    assert planned([str(file)], capsys)["mesh"] == {"dp": 2, "tp": 1, "ep": 2}
    found = planned([str(file), "--no-enable-expert-parallel", "--layers", "0-1"], capsys)
    assert found["mesh"] == {"dp": 2, "tp": 1, "ep": 1}
    assert found["plans"][0]["layers"] == [0, 1]
