"""`moeserve simulate`: rows a script can read, a table a person can, workloads in order, refusals."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint

from moeserve.checkpoints.checkpoint import Checkpoint
from moeserve.cli import main
from moeserve.cli.simulate import NEED_SIZES
from moeserve.experts.balance.eplb import eplb_slots
from moeserve.experts.load import Load, LoadTrace, LoadWindow, write_trace
from moeserve.experts.placement import Placement

FIELDS = {
    "policy",
    "ranks",
    "redundant",
    "mean_balancedness",
    "worst_layer_balancedness",
    "moves_per_layer",
    "moved_bytes",
    "plan_seconds",
}
EXPERTS, LAYERS = 32, 4


def counts(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).lognormal(5, 1, (LAYERS, EXPERTS)).round()


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    """Two workloads as published count files, with a dense first layer."""
    paths = []
    for seed in (0, 1):
        found = np.vstack([np.zeros(EXPERTS), counts(seed)])
        paths.append(tmp_path / f"load{seed}.json")
        paths[-1].write_text(json.dumps({"logical_count": found.tolist()}))
    return str(paths[0]), str(paths[1])


SIZED = ("--hidden", "7168", "--inner", "2048", "--top-k", "8")
"""The sizes of experts that bytes and times are counted with."""


def simulated(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    """What `--json` prints, for experts of known sizes."""
    assert main(["simulate", *words, *(() if "--hidden" in words else SIZED), "--json"]) == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return rows


def balanced(slots: np.ndarray, ranks: int, seed: int) -> np.ndarray:
    return 1 / Placement(slots, ranks, EXPERTS).imbalance(counts(seed))


def test_a_row_a_policy_with_the_figures_of_its_plan(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = simulated(capsys, "--load", files[0], "--ranks", "4", "8", "--redundant", "0", "8")
    assert [(row["ranks"], row["redundant"], row["policy"]) for row in rows] == [
        (ranks, redundant, name)
        for ranks in (4, 8)
        for redundant in (0, 8)
        for name in ("even", "eplb", "incremental", "flexible")
    ]
    for row in rows:
        assert row.keys() >= FIELDS
        slots = eplb_slots(counts(0), EXPERTS + row["redundant"], row["ranks"])
        theirs = balanced(slots, row["ranks"], 0)
        if row["policy"] == "eplb":
            assert row["mean_balancedness"] == pytest.approx(theirs.mean())
            assert row["worst_layer_balancedness"] == pytest.approx(theirs.min())
            assert row["moved_bytes"] == row["moves_per_layer"] * LAYERS * 3 * 7168 * 2048
        elif row["policy"] == "incremental":
            assert row["mean_balancedness"] >= theirs.mean() - 1e-9
            assert row["worst_layer_balancedness"] >= theirs.min() - 1e-9
        elif row["policy"] == "even":
            assert (row["moves_per_layer"], row["moved_bytes"]) == (0, 0)
        assert row["rank_bytes"] == LAYERS * (EXPERTS + row["redundant"]) // row["ranks"] * 3 * 7168 * 2048
        assert 0 < row["step_balancedness"] < row["mean_balancedness"] + 0.005
        assert row["plan_seconds"] > 0
        assert row["step_seconds"] > 0


def test_without_sizes_bytes_and_times_are_left_out(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["simulate", "--load", files[0], "--serve", files[1], "--ranks", "4", "--policy", "eplb"]
    assert main([*words, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["sizes"].startswith("not known, so bytes and times are left out: give --checkpoint FOLDER")
    assert row.keys() >= FIELDS - {"moved_bytes"}
    assert not row.keys() & set(NEED_SIZES)
    assert main(words) == 0
    said, head, *_ = capsys.readouterr().out.splitlines()
    assert said == f"sizes: {row['sizes']}"
    assert "GB" not in head and "a step" not in head


def test_loads_of_deepseek_v3_have_its_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "load.json"
    words = ["simulate", "--load", str(path), "--ranks", "8", "--policy", "even", "--json"]
    path.write_text(json.dumps({"logical_count": np.ones((58, 256)).tolist()}))
    assert main(words) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["rank_bytes"] == 58 * 32 * 3 * 7168 * 2048
    assert row["sizes"] == (
        "H=7168, I=2048, top 8, 8 bits a weight (DeepSeek-V3's, whose layers and experts the loads have)"
    )
    path.write_text(json.dumps({"logical_count": np.ones((62, 256)).tolist()}))  # MiniMax-M2's
    assert main(words) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["sizes"].startswith("not known") and "rank_bytes" not in row


class TestACheckpoint:
    """`--checkpoint` tells the sizes of the experts that the loads count."""

    @pytest.fixture
    def checkpoint(self, tmp_path: Path) -> Checkpoint:
        """As many experts as the workloads count, in bf16."""
        make_checkpoint("qwen3_moe", tmp_path, dtype=torch.bfloat16, experts=EXPERTS)
        return Checkpoint(tmp_path)

    def test_tells_bytes_and_times(
        self, checkpoint: Checkpoint, files: tuple[str, str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        words = ["simulate", "--load", files[0], "--ranks", "4", "--policy", "eplb", "--json"]
        assert main([*words, "--checkpoint", str(checkpoint.path)]) == 0
        (row,) = json.loads(capsys.readouterr().out)
        nbytes, shape = checkpoint.expert_nbytes(0), checkpoint.shape(0)
        assert row["rank_bytes"] == LAYERS * EXPERTS // 4 * nbytes
        assert row["moved_bytes"] == row["moves_per_layer"] * LAYERS * nbytes
        stated = f"H={shape.hidden}, I={shape.inner}, top {checkpoint.top_k}, 16 bits a weight"
        assert row["sizes"] == f"{stated} (of {checkpoint.path})"
        sizes = ["--hidden", str(shape.hidden), "--inner", str(shape.inner), "--weight-bits", "16"]
        assert main([*words, *sizes, "--top-k", str(checkpoint.top_k)]) == 0
        (given,) = json.loads(capsys.readouterr().out)
        for name in ("rank_bytes", "moved_bytes", "wire_bytes", "step_seconds", "step_balancedness"):
            assert row[name] == given[name]

    def test_gives_way_to_flags(
        self, checkpoint: Checkpoint, files: tuple[str, str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        words = ["simulate", "--load", files[0], "--ranks", "4", "--policy", "even", "--json"]
        assert main([*words, "--checkpoint", str(checkpoint.path), "--weight-bits", "4"]) == 0
        (row,) = json.loads(capsys.readouterr().out)
        assert row["rank_bytes"] == LAYERS * EXPERTS // 4 * checkpoint.expert_nbytes(0) // 4
        assert row["sizes"].endswith("4 bits a weight (of " + f"{checkpoint.path}, but weight_bits as given)")

    def test_of_another_model_is_refused(
        self, tmp_path: Path, files: tuple[str, str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        make_checkpoint("qwen3_moe", tmp_path / "other", experts=8)
        words = ["simulate", "--load", files[0], "--ranks", "4", "--checkpoint", str(tmp_path / "other")]
        assert main(words) == 2
        assert "has 8 experts a layer, and the loads count 32" in capsys.readouterr().err


def test_serve_judges_the_plan_as_it_is_and_says_what_a_rebalance_does(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--load", files[0], "--serve", files[1], "--ranks", "4", "--policy", "eplb", "incremental")
    eplb, incremental = simulated(capsys, *words)
    assert eplb["mean_balancedness"] == pytest.approx(
        balanced(eplb_slots(counts(0), EXPERTS, 4), 4, 1).mean()
    )
    fresh = balanced(eplb_slots(counts(1), EXPERTS, 4), 4, 1)
    assert eplb["shift_mean_balancedness"] == pytest.approx(fresh.mean())
    assert incremental["mean_balancedness"] < incremental["shift_mean_balancedness"]
    assert incremental["shift_moves_per_layer"] < eplb["shift_moves_per_layer"]


def test_several_loads_follow_each_other(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    (last,) = simulated(capsys, "--load", *files, "--ranks", "4", "--policy", "incremental")
    (shift,) = simulated(
        capsys, "--load", files[0], "--serve", files[1], "--ranks", "4", "--policy", "incremental"
    )
    for name in ("mean_balancedness", "worst_layer_balancedness", "moves_per_layer", "moved_bytes"):
        assert last[name] == shift[f"shift_{name}"]
    assert len(last["balancedness_over_time"]) == 2


def test_windows_of_a_trace_are_workloads(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    layers = tuple(range(1, LAYERS + 1))
    write_trace(LoadTrace(layers, tuple(LoadWindow(Load(counts(seed))) for seed in (0, 1))), path)
    words = ("--ranks", "4", "--policy", "eplb")
    (one,), (other,) = (simulated(capsys, "--load", *load, *words) for load in ([str(path)], files))
    assert one["balancedness_over_time"] == other["balancedness_over_time"]


def test_a_budget_binds(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    rows = simulated(capsys, "--load", *files, "--ranks", "4", "--budget", "6")
    assert all(row["moves_per_layer"] * LAYERS <= 6 for row in rows)
    assert any(row["moves_per_layer"] for row in rows)
    size = 3 * 7168 * 2048
    same = simulated(capsys, "--load", *files, "--ranks", "4", "--budget-bytes", str(7 * size - 1))
    assert [row["moved_bytes"] for row in same] == [row["moved_bytes"] for row in rows]
    free = simulated(capsys, "--load", *files, "--ranks", "4", "--budget-bytes", "0")
    assert not any(row["moves_per_layer"] for row in free)


def test_a_budget_of_one_workload_is_said_to_have_no_effect(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["simulate", "--ranks", "4", "--policy", "eplb", "--budget", "0", "--json", "--load", files[0]]
    assert main(words) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)[0]["moves_per_layer"]
    assert "--budget=0 has no effect: it bounds rebalances, and one workload has none" in shown.err
    assert main([*words, "--serve", files[1]]) == 0
    assert not capsys.readouterr().err


def test_windows_of_one_phase_are_planned_for(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, layers = tmp_path / "trace.jsonl", tuple(range(1, LAYERS + 1))
    phases = ("decode", "prefill", "")
    windows = tuple(LoadWindow(Load(counts(seed)), phase=phase) for seed, phase in enumerate(phases))
    write_trace(LoadTrace(layers, windows), path)
    words = ("--ranks", "4", "--policy", "eplb", "--load", str(path))
    for phase, seeds in (("decode", (0, 2)), ("prefill", (1, 2))):
        (row,) = simulated(capsys, *words, "--phase", phase)
        wanted = [balanced(eplb_slots(counts(seed), EXPERTS, 4), 4, seed).mean() for seed in seeds]
        assert row["balancedness_over_time"] == pytest.approx(wanted)
    write_trace(LoadTrace(layers, windows[:1]), path)
    assert main(["simulate", *words, "--phase", "prefill"]) == 2
    assert "has no window of phase prefill" in capsys.readouterr().err


def test_rates_of_experts_come_from_results(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, words = tmp_path / "results.jsonl", ("--load", files[0], "--ranks", "4", "--policy", "eplb")
    lines = [
        {"case": "nvfp4, 128 tokens x 2, 50 of 64 experts active, whole", "ours": 500.0},
        {"case": "nvfp4, 16384 tokens x 2, 64 of 64 experts active, whole", "ours": 5000.0},
        {"case": "nvfp4, 16384 tokens x 2, 64 of 64 experts active, kernel", "ours": 1.0},
        {"case": "fp8, 128 tokens x 2, 64 of 64 experts active, whole", "ours": 1.0},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    expert = 3 * 7168 * 2048 * 4.5 / 8
    rates = (
        f"weight_bits={4.5}",
        f"read_bytes={50 * expert / 500e-6}",
        f"flops={32768 * 6 * 7168 * 2048 / 5e-3}",
    )
    (taken,) = simulated(capsys, *words, "--measured", str(path), "--weights", "nvfp4")
    (given,) = simulated(capsys, *words, "--rate", *rates)
    for name in ("step_seconds", "rank_bytes", "moved_bytes"):
        assert taken[name] == pytest.approx(given[name])
    words = (*words, *SIZED)
    assert main(["simulate", *words, "--measured", str(path), "--weights", "bf16"]) == 2
    assert "has no case 'bf16, ..." in capsys.readouterr().err
    assert main(["simulate", *words, "--measured", files[0]]) == 2
    assert "is not a file of results" in capsys.readouterr().err


@pytest.mark.parametrize("objective", ["tokens", "active", "time"])
def test_objectives_and_nodes_are_taken(
    files: tuple[str, str], objective: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--ranks", "8", "--redundant", "8", "--nodes", "2", "--groups", "4", "--objective", objective)
    rows = simulated(capsys, "--load", *files, *words, "--tokens", "2")
    assert len(rows) == 4
    slots = eplb_slots(counts(1), EXPERTS + 8, 8, nodes=2, groups=4)
    assert rows[1]["mean_balancedness"] == pytest.approx(balanced(slots, 8, 1).mean())


def test_csv_and_table(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "--load", files[0], "--ranks", "4", "--policy", "even", *SIZED]
    assert main([*words, "--csv"]) == 0
    (row,) = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert row.keys() >= FIELDS
    assert (row["policy"], row["ranks"]) == ("even", "4")
    assert row["sizes"] == "H=7168, I=2048, top 8, 8 bits a weight (as given)"
    assert main(words) == 0
    sizes, head, line = capsys.readouterr().out.splitlines()
    assert sizes == f"sizes: {row['sizes']}"
    assert head.split()[:5] == ["policy", "ranks", "redundant", "balance", "worst"]
    assert line.split()[3] == f"{float(row['mean_balancedness']):.4f}"


def test_pictures_are_drawn(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "plots"
    (row,) = simulated(
        capsys, "--load", *files, "--ranks", "4", "--policy", "incremental", "--plot", str(folder)
    )
    assert sorted(Path(path).name for path in row["plots"]) == [
        "incremental_4_0_balance.svg",
        "incremental_4_0_placement.svg",
    ]
    placed = ElementTree.parse(folder / "incremental_4_0_placement.svg").getroot()
    bars = [each for each in placed if each.tag.endswith("rect")]
    assert len(bars) == 1 + 2 * (EXPERTS + 4)  # the ground; twice: experts and rank loads


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks", "4", "--redundant", "3"], "3 redundant experts do not divide over 4 ranks"),
        (["--ranks", "0"], "ranks=0 must be 1 or more"),
        (["--ranks", "4", "--policy", "greedy"], "unknown balancing policy 'greedy'; known: even, eplb"),
        (["--ranks", "4", "--rate", "speed=1"], "unknown 'speed'; known: hidden, inner"),
        (["--ranks", "4", "--rate", "hidden=big"], "'big' is not a number"),
        (["--ranks", "4", *SIZED, "--rate", "link_bytes=0"], "link_bytes=0.0 must be more than 0"),
        (["--ranks", "4", *SIZED, "--hidden", "0"], "hidden=0 must be more than 0"),
        (["--ranks", "4", "--json", "--csv"], "--json and --csv exclude each other"),
        (["--ranks", "4", "--serve", "OTHER"], "counts 1 layers (0 to 0) of 2 experts, and"),
        (
            ["--ranks", "4", "--nodes", "3"],
            "4 ranks do not divide over 3 nodes, which",
        ),
        (["--ranks", "6", "4", "--nodes", "3"], "4 ranks divide over 1, 2, 4 nodes"),
        (
            ["--ranks", "4", "--nodes", "3", "--policy", "eplb", "--groups", "3"],
            "4 ranks do not divide over 3",
        ),
        (
            ["--ranks", "4", "--hidden", "64", "--top-k", "2"],
            "--hidden, --top-k without --inner: give",
        ),
        (["--ranks", "4", "--objective", "time"], "--objective time needs the sizes of the model's experts"),
        (
            ["--ranks", "4", "--budget-bytes", "9"],
            "--budget-bytes needs the sizes of the model",
        ),
        (["--ranks", "4", "--budget", "-1"], "--budget=-1 must be 0 or more"),
        (["--ranks", "4", *SIZED, "--budget-bytes", "-5"], "--budget-bytes=-5 must be 0 or more"),
        (["--ranks", "4", "--groups", "0"], f"--groups=0 must divide the {EXPERTS} experts"),
        (["--ranks", "4", "--groups", "-2"], f"--groups=-2 must divide the {EXPERTS} experts"),
        (["--ranks", "4", "--groups", "5"], f"--groups=5 must divide the {EXPERTS} experts"),
        (["--ranks", "4", *SIZED, "--top-k", "999"], f"--top-k=999 must be {EXPERTS} at most"),
        (["--ranks", "4", "--serve", "GARBAGE"], "garbage.pt is not a load file: torch cannot read it: "),
        (
            ["--ranks", "4", "--plot", "OTHER"],
            "other.json is a file; name a folder, or one that is not there",
        ),
    ],
)
def test_what_it_refuses(
    words: list[str], message: str, files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.json"
    other.write_text('{"logical_count": [[1, 2]]}')
    garbage = tmp_path / "garbage.pt"
    garbage.write_bytes(b"PK\x03\x04garbage")
    named = {"OTHER": str(other), "GARBAGE": str(garbage)}
    words = [named.get(word, word) for word in words]
    assert main(["simulate", "--load", files[0], *words]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1
