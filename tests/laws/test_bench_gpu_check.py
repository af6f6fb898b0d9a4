"""`bench/gpu_check.py` on trees whose benches only pretend: turns, old names, partial results, ratios."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from bench import gpu_check
from bench.gpu_check import AFTER, BEFORE, Check, Step, copied

PRETENDED = """
import json, pathlib, sys, time
root = next(p for p in pathlib.Path(__file__).parents if (p / "bench").is_dir())
kinds = sys.argv[sys.argv.index("--kinds") + 1].split(",")
results = root / "bench" / "results"
results.mkdir(exist_ok=True)
found = {{"ours": {ours}, "unit": "us", "peers": {{}}}}
lines = [{{"case": f"{{kind}}, 1 tokens x 2, whole"}} | found for kind in kinds]
(results / "gpu_experts.jsonl").write_text("".join(json.dumps(line) + "\\n" for line in lines))
{then}
"""


def tree(folder: Path, where: str, ours: float, then: str = "") -> Path:
    """A checkout with one bench that records `ours` for every kind."""
    path = folder / "bench" / where
    path.parent.mkdir(parents=True)
    path.write_text(PRETENDED.format(ours=ours, then=then))
    for room in {path.parent, folder / "bench"}:
        (room / "__init__.py").touch()
    (folder / "moeserve").mkdir()
    (folder / "bench" / "results").mkdir()
    (folder / "bench" / "results" / "gpu_experts.jsonl").write_text("not to be read")
    return folder


STEP = Step("experts", "gpu_experts", ("--kinds", "fp8,bf16"), (0,))


def checked(tmp_path: Path, before: Path, after: Path, seconds: float = 60.0) -> Check:
    """Two rounds of one step in both trees."""
    trees = (copied(BEFORE, before, tmp_path / "b", 1), copied(AFTER, after, tmp_path / "a", 1))
    (tmp_path / "out").mkdir()
    check = Check(trees, tmp_path / "out", time.monotonic() + seconds)
    for number in range(2):
        check.round([[STEP]], number)
    return check


def test_trees_take_turns_and_medians_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tree(tmp_path / "old", "gpu_experts.py", 200.0)
    after = tree(tmp_path / "new", "experts/gpu_experts.py", 150.0)
    check = checked(tmp_path, before, after)
    assert check.failed == []
    (fp8, bf16) = check.lines()
    assert (fp8[BEFORE], fp8[AFTER], fp8["ratio"]) == (200.0, 150.0, 0.75)
    assert bf16["samples"] == {BEFORE: [200.0, 200.0], AFTER: [150.0, 150.0]}
    assert "0.750" in gpu_check.text([fp8]) and "fp8, 1 tokens x 2, whole, us" in gpu_check.text([fp8])
    ran = [line.split(",")[0] for line in capsys.readouterr().out.splitlines()]
    assert ran == [BEFORE, AFTER, AFTER, BEFORE]
    samples = [json.loads(line) for line in (tmp_path / "out" / "samples.jsonl").read_text().splitlines()]
    assert [(one["tree"], one["round"]) for one in samples[::2]] == [
        (BEFORE, 0), (AFTER, 0), (AFTER, 1), (BEFORE, 1),
    ]  # fmt: skip
    assert (before / "bench" / "results" / "gpu_experts.jsonl").read_text() == "not to be read"


def test_what_a_step_recorded_before_it_failed_counts_and_it_is_told(tmp_path: Path) -> None:
    before = tree(tmp_path / "old", "gpu_experts.py", 200.0)
    after = tree(tmp_path / "new", "experts/gpu_experts.py", 150.0, "sys.exit('no such kernel')")
    check = checked(tmp_path, before, after)
    assert check.failed == ["after, experts"] * 2
    assert check.lines()[0]["ratio"] == 0.75


def test_a_step_without_an_end_is_ended_at_the_deadline(tmp_path: Path) -> None:
    before = tree(tmp_path / "old", "gpu_experts.py", 200.0, "time.sleep(300)")
    after = tree(tmp_path / "new", "experts/gpu_experts.py", 150.0)
    began = time.monotonic()
    check = checked(tmp_path, before, after, seconds=3.0)
    assert time.monotonic() - began < 30
    assert check.failed == ["before, experts"]
    assert check.lines()[0]["ratio"] is None


def test_old_trees_have_old_names(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    for root, path, text in (
        (old, "gpu_a2a.py", "--carriers"),
        (new, "dispatch/gpu_a2a.py", "--dispatchers"),
    ):
        (root / "bench" / path).parent.mkdir(parents=True)
        (root / "bench" / path).write_text(text)
        (root / "moeserve").mkdir()
    (step,) = gpu_check.steps_for(2)[-1]
    command = copied(BEFORE, old, tmp_path / "b", 2).command(step)
    assert "--carriers" in command and "--dispatchers" not in command
    assert str(tmp_path / "b" / "before-0" / "bench" / "gpu_a2a.py") in command
    command = copied(AFTER, new, tmp_path / "a", 2).command(step)
    assert command[0] == sys.executable and command[command.index("-m") + 1] == "torch.distributed.run"
    assert "bench.dispatch.gpu_a2a" in command and "--dispatchers" in command


def test_the_kernels_name_does_not_make_another_case() -> None:
    case = "fp8, 1 tokens a rank, EP2, nvlink_ll, cuda_fp8: dispatch + combine"
    assert (
        gpu_check.comparable("gpu_layer", case) == "fp8, 1 tokens a rank, EP2, nvlink_ll: dispatch + combine"
    )
    assert gpu_check.comparable("gpu_experts", "fp8, x: y") == "fp8, x: y"


def test_one_gpu_runs_the_experts_alone_and_two_all() -> None:
    (((step,),)) = gpu_check.steps_for(1)
    assert step.options[1] == "fp8,mxfp4,nvfp4,bf16"
    assert [[step.gpus for step in together] for together in gpu_check.steps_for(2)] == [
        [(0,), (1,)], [(0, 1)], [(0, 1)],
    ]  # fmt: skip


def test_whole_steps_are_recorded_beside_the_tree_before() -> None:
    def line(bench: str, case: str, after: float | None) -> dict[str, object]:
        ratio = None if after is None else after / 10
        return {"bench": bench, "case": case, "unit": "us", BEFORE: 10.0, AFTER: after, "ratio": ratio}

    found = gpu_check.recorded(
        [
            line("gpu_experts", "fp8, 1 tokens x 2, 2 of 64 experts active, whole", 9.0),
            line("gpu_experts", "fp8, 1 tokens x 2, 2 of 64 experts active, kernel", 8.0),
            line("gpu_layer", "fp8, 1 tokens a rank, EP2, nvlink_ll: layer", 7.0),
            line("gpu_layer", "fp8, 1 tokens a rank, EP2, nvlink_ll: experts", 6.0),
            line("gpu_a2a", "nvlink_ll, fp8_group128, uniform, 1 tokens a rank, EP2, dispatch", 5.0),
            line(
                "gpu_a2a", "nvlink_ll, fp8_group128, uniform, 1 tokens a rank, EP2, dispatch + combine", None
            ),
        ]
    )
    assert [(one.ours, one.peers) for one in found] == [(9.0, {BEFORE: 10.0}), (7.0, {BEFORE: 10.0})]
