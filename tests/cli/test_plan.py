"""`moeserve plan`: one section for layers that share a plan, reasons for all that was refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from costing_ranks import FITTING

from moeserve.cli import main
from moeserve.cli.shown.tables import table
from moeserve.cli.shown.units import human
from moeserve.dispatch.backends import DISPATCHERS
from moeserve.experts.kernels import KERNELS
from moeserve.runtime.planning.passes import BESIDE_STEP_BYTES, GRAPH_STEP_BYTES

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
    chosen = {plan["kernel"]["name"], *(dispatcher["name"] for dispatcher in plan["dispatchers"])}
    named = chosen | {row["name"] for row in plan["refused"]}
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


def test_kernels_of_a_family_are_listed_with_their_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_checkpoint("qwen3_moe", tmp_path, dtype=torch.bfloat16, hidden=256, inner=128)
    words = ["--checkpoint", str(tmp_path), "--machine", "h200", *EP4]
    (plan,) = planned(words, capsys)["plans"]
    assert plan["kernel"]["name"] == "cuda_bf16"
    assert [(one["name"], one["up_to"], one["verified"]) for one in plan["kernels"]] == [
        ("cuda_bf16_few", 4, ["sm90"]),
        ("cuda_bf16_some", 103, ["sm90"]),
        ("cuda_bf16_many", 4 * 4096, ["sm90"]),
    ]
    assert main(["plan", *words]) == 0
    assert "kernel   cuda_bf16_some up to 103 rows of all lanes (verified: sm90)" in capsys.readouterr().out
    assert main(["plan", *words, "--kernel", "cuda_bf16_many"]) == 0
    shown = capsys.readouterr().out
    assert "kernel   cuda_bf16_many (verified: sm90)" in shown
    assert "not cuda_bf16_few: kernel cuda_bf16_many was named" in shown


def test_another_systems_name_of_a_dispatcher_is_understood(
    checkpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (plan,) = planned(["--checkpoint", checkpoint, "--all2all-backend", "ag_rs", *EP4], capsys)["plans"]
    assert [dispatcher["name"] for dispatcher in plan["dispatchers"]] == ["allgather_reducescatter"]


def test_reserved_seats_cost_what_the_plan_says(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--checkpoint", checkpoint, "--device", "cpu", *EP4, "--all2all-backend=nvlink_ht"]
    bare = planned(words, capsys)
    assert bare["reserved"] == {"lanes": 0, "owners": 0, "dispatch": 0, "workspace": 0}
    room = ["--max-lanes", "10", "--max-owners", "5"]
    wide = planned([*words, *room], capsys)
    reserved = wide["reserved"]
    assert (reserved["lanes"], reserved["owners"]) == (6, 1)
    for what in ("dispatch", "workspace"):
        assert wide["memory"][what] - bare["memory"][what] == reserved[what] > 0
    assert wide["memory"]["weights"] == bare["memory"]["weights"]
    assert main(["plan", *words]) == 0
    assert "reserved seats" not in capsys.readouterr().out
    assert main(["plan", *words, *room]) == 0
    shown = capsys.readouterr().out
    text = f"{human(reserved['dispatch'])} of dispatch buffers, {human(reserved['workspace'])} of workspace"
    assert f"reserved seats: +6 lanes, +1 owners: {text}\n" in shown
    assert main(["plan", "--checkpoint", checkpoint, "--device", "cpu", *EP4, *room]) == 0
    text = (
        "serves groups in which every member has a lane and experts; here are 6 lanes and 1 owners reserved"
    )
    assert f"not local: {text}\n" in capsys.readouterr().out


def test_an_unknown_machine_is_refused_with_those_known(
    checkpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--checkpoint", checkpoint, "--machine", "tpu"]) == 2
    assert "unknown machine 'tpu'; known: cpu, a100, l40s, h20, h100, h200" in capsys.readouterr().err


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


def test_load_as_is_stated_with_its_error_and_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_checkpoint("qwen3_moe", tmp_path, dtype=torch.bfloat16, hidden=256, inner=128)
    words = ["--checkpoint", str(tmp_path), "--load-as", "fp8_per_block"]
    found = planned(words, capsys)
    loaded, (plan,) = found["load_as"], found["plans"]
    scheme = "fp8_block128 x fp8_group128"
    assert plan["scheme"] == scheme and (loaded["stored"], loaded["loaded"]) == (["bf16"], [scheme])
    assert (loaded["layers"], loaded["experts"]) == ([0, 1], [0, 4, 7])
    assert 0.02 < loaded["gate_up"]["mean"] <= loaded["gate_up"]["max"] < 0.04
    matrices = 2 * 8 * 3 * 256 * 128  # layers, experts, projections
    assert loaded["stored_nbytes"] == 2 * matrices
    assert loaded["loaded_nbytes"] == matrices + matrices // 128**2 * 4
    assert main(["plan", *words]) == 0
    shown = capsys.readouterr().out
    assert f"load_as  fp8_per_block: bf16 -> {scheme}\n" in shown
    assert f"  error  gate_up {loaded['gate_up']['mean']:.3g} mean, " in shown
    assert "read: experts 0, 4, 7 of layers 0-1\n" in shown
    assert "  bytes  3 MiB stored -> 1.5 MiB loaded\n" in shown


def test_what_is_loaded_as_stored_is_not_compared(
    checkpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert planned(["--checkpoint", checkpoint], capsys)["load_as"] is None


def test_sizes_that_a_scheme_cannot_have_are_named(
    checkpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", "--checkpoint", checkpoint, "--load-as", "int4_group128"]
    assert main(words) == 2
    assert "H=64 must be a multiple of 128, a group of int4_group128" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["machines", "vllm-members"])
def test_a_table_is_printed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--table", name]) == 0
    assert capsys.readouterr().out == f"{table(name)}\n"


def test_an_unknown_table_is_refused_with_those_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--table", "kernels"]) == 2
    assert (
        "unknown table 'kernels'; known: machines, kernels-by-rows, vllm-members" in capsys.readouterr().err
    )


@pytest.fixture
def measuring(checkpoint: str, tmp_path: Path) -> Path:
    """A configuration of two CPU ranks with short lanes, whose costs are kept beside it."""
    file = tmp_path / "house.toml"
    file.write_text(
        f"[model]\ncheckpoint = '{checkpoint}'\n[step]\nlane_rows = 16\n"
        f"[plan]\ndevice = 'cpu'\nmeasure = 'always'\ncosts = '{tmp_path / 'costs'}'\n"
        "[parallel]\nenable_expert_parallel = true\ndata_parallel_size = 2\n"
    )
    return file


def test_dispatchers_are_measured_and_the_plan_follows(
    measuring: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (plan,) = planned([str(measuring), "--measure"], capsys)["plans"]
    measured = {dispatcher["dispatcher"]: dispatcher["points"] for dispatcher in plan["costs"]["dispatchers"]}
    assert measured.keys() == FITTING
    for points in measured.values():
        assert points[0]["rows"] == 1 and [p["rows"] for p in points] == sorted(p["rows"] for p in points)
        assert all(point["dispatch"] > 0 and point["combine"] > 0 for point in points)
    assert {dispatcher["name"] for dispatcher in plan["dispatchers"]} <= FITTING
    assert plan["dispatchers"][-1]["up_to"] == plan["costs"]["setting"]["lane_rows"] == 16
    setting = plan["costs"]["setting"]
    assert [setting[name] for name in ("lanes", "owners", "max_lanes", "max_owners")] == [2] * 4
    assert setting["device"] == "cpu"
    (kept,) = (measuring.parent / "costs").iterdir()
    assert json.loads(kept.read_text()) == plan["costs"]

    (again,) = planned([str(measuring)], capsys)["plans"]  # read again; nothing is measured
    assert (again["costs"], again["dispatchers"]) == (plan["costs"], plan["dispatchers"])
    assert main(["plan", str(measuring)]) == 0
    shown = capsys.readouterr().out
    assert "  cost     measured on " in shown
    head = shown.index("  microseconds of dispatch + combine")
    table_head, first, *_ = shown[head:].splitlines()[1:]
    assert all(f"{name} (bf16)" in table_head for name in FITTING)
    assert first.split()[0] == "1" and first.count("*") == 1

    text = measuring.read_text().replace("'always'", "'never'")
    measuring.write_text(text)
    (told,) = planned([str(measuring)], capsys)["plans"]
    assert told["costs"] is None and told["dispatchers"][0]["name"] == "allgather_reducescatter"


def test_ranks_of_a_measurement_replace_the_mesh(measuring: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = planned([str(measuring), "--measure", "--ranks", "3", "--all2all-backend", "all2allv"], capsys)
    assert found["mesh"] == {"dp": 3, "tp": 1, "ep": 3}
    (plan,) = found["plans"]
    assert (
        plan["costs"] is None and plan["dispatchers"][0]["name"] == "all2allv"
    )  # pinned: nothing to measure
    assert not (measuring.parent / "costs").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--measure", "--machine", "h200"], "--machine h200 may be another one"),
        (["--ranks", "4"], "add --measure"),
        (["--measure", "--ranks", "3", "--tensor-parallel-size", "2"], "--ranks 3 must be a multiple of"),
        (["--measure", "--ranks", "0"], "--ranks 0 must be a multiple of"),
    ],
)
def test_a_measurement_that_makes_no_sense_is_refused(
    words: list[str], message: str, measuring: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(measuring), *words]) == 2
    assert message in capsys.readouterr().err


def balanced(tmp_path: Path, **keys: int) -> str:
    """A configuration with these keys of the section balance."""
    path = tmp_path / "balance.toml"
    path.write_text("[balance]\n" + "".join(f"{key} = {value}\n" for key, value in keys.items()))
    return str(path)


def test_what_covers_a_loss_is_shown_in_bytes(
    checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    each = 2 * 3 * 64 * 128 * 2  # of one expert in both layers, bf16
    words = ["--checkpoint", checkpoint, "--device", "cpu", *EP4]
    cover = planned(words, capsys)["cover"]
    assert cover["configured"] == {"redundant": 0, "slot_nbytes": 0, "shadow_nbytes": 0}
    assert cover["missing"] == 4  # any three of four ranks hold 8 experts with 3 slots each
    assert cover["by_replicas"] == {"redundant": 8, "slot_nbytes": 2 * each, "shadow_nbytes": 0}
    fewest = cover["by_shadows"]
    assert (fewest["redundant"], fewest["slot_nbytes"]) == (4, each)
    assert fewest["shadow_nbytes"] % each == 0 and 0 < fewest["shadow_nbytes"] <= 4 * each
    covering = balanced(tmp_path, redundant_experts=8, cover_owners=1)
    cover = planned([covering, *words], capsys)["cover"]
    assert (cover["configured"], cover["missing"]) == (cover["by_replicas"], 0)
    assert main(["plan", covering, *words]) == 0
    head = capsys.readouterr().out.split("\n\n")[0].splitlines()
    shown = head[next(at for at, line in enumerate(head) if line.startswith("cover ")) :]
    assert shown == [
        f"cover    8 redundant slots, {human(2 * each)} a rank: enough for the loss of any one rank",
        "         shadows (off): up to 0 B of host memory a rank",
        f"         with second replicas of all: 8 redundant slots, {human(2 * each)} a rank",
        f"         with shadows: 4 redundant slots, {human(each)} a rank; up to "
        f"{human(fewest['shadow_nbytes'])} of host memory a rank",
    ]


def test_slots_that_do_not_stand_a_loss_are_refused_with_how_many_are_missing(
    checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--checkpoint", checkpoint, "--device", "cpu"]
    assert main(["plan", balanced(tmp_path, cover_owners=1), *words, *EP4]) != 0
    assert "the other 3 have 6 slots a layer for 8 experts; 4 more are missing" in capsys.readouterr().err
    assert main(["plan", *words, *EP4]) == 0
    assert "cover    0 redundant slots, 0 B a rank: 4 too few for the loss of one rank" in (
        capsys.readouterr().out
    )
    assert planned([*words, "--tensor-parallel-size", "4"], capsys)["cover"] is None


def test_rows_that_come_rounded_take_less_of_a_lane_and_may_be_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_checkpoint("qwen3_moe", tmp_path / "wide", dtype=torch.bfloat16, hidden=1024, inner=256)
    words = ["--checkpoint", str(tmp_path / "wide"), "--machine", "h200"]
    small = tmp_path / "small.toml"
    small.write_text("[passes]\nlane_bytes = 3800000\n")
    plain, rounded = (
        planned([str(small), *words, *more], capsys)["passes"]["rooms"]
        for more in ([], ["--load-as", "fp8_per_block"])
    )
    assert rounded == 2 * plain, "917 rows as they are are padded to 1024, and 1205 that come rounded to 2048"


def test_what_callers_gpus_may_take_is_bounded_by_keys(
    checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--checkpoint", checkpoint, "--machine", "h200"]
    taken = planned(words, capsys)["passes"]
    assert taken["mailboxes"] == 8 * (256 << 20)
    assert taken["graphs"] == 4096 * GRAPH_STEP_BYTES
    assert taken["rooms"] == 2 * 2 * 4096 * (64 * 2 + 2 * 8 + 8 * 4 + 1)
    assert main(["plan", *words]) == 0
    shown = capsys.readouterr().out
    whole = human(taken["pool"] + taken["graphs"])
    assert "up to 2 GiB of mailboxes (passes.lanes = 8 of passes.lane_bytes = 256 MiB)" in shown
    assert f"{human(taken['rooms'])} of rows, {whole} of graphs (passes.graph_steps = 4096)" in shown
    fewer = tmp_path / "fewer.toml"
    fewer.write_text("[passes]\ngraph_steps = 0\nlane_bytes = 65536\n[step]\nlane_rows = 100\n")
    less = planned([str(fewer), *words], capsys)["passes"]
    assert (less["graphs"], less["pool"]) == (0, 0)
    assert less["rooms"] == taken["rooms"] * 128 // 4096
    fewer.write_text("[passes]\nshort_rows = 100\n")
    both = planned([str(fewer), *words], capsys)["passes"]
    assert both["rooms"] * 4096 == taken["rooms"] * (4096 + 128), "short steps have a track of their own"
    assert both["graphs"] == 4096 * BESIDE_STEP_BYTES, "GEMMs beside them are recorded in pieces"
    assert taken["pool"] < both["pool"] < 1.5 * taken["pool"]
    fewer.write_text("[passes]\nlanes = 0\n")
    assert planned([str(fewer), *words], capsys)["passes"] is None
    assert planned(["--checkpoint", checkpoint, "--device", "cpu"], capsys)["passes"] is None
