"""Runs of a group of several owners on the CPU: real members and a head, and steps of calls between them."""

from __future__ import annotations

from pathlib import Path

from checkpoints import make_checkpoint
from parallel import parallel_launch
from run_ranks import STEPS, TURNS, ordered


def test_runs_and_calls_answer_alike_in_one_order(tmp_path: Path) -> None:
    make_checkpoint("qwen3_moe", tmp_path, hidden=128)
    (lane, head), (rank, _), (owner, _) = parallel_launch(3, ordered, tmp_path)
    assert head >= len(STEPS) * (TURNS + 2) + 3, "with steps of calls"
    assert rank == owner == lane == head, "each counts the steps that it took part in"
