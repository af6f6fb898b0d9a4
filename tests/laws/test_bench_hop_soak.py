"""The bench of many callers starts a service, compares its answers, and writes what it saw."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(180)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_short_run_counts_calls_and_finds_nothing_wrong(ranks: int, tmp_path: Path) -> None:
    out = tmp_path / "soak.jsonl"
    words = f"-m bench.service.hop_soak --seconds 8 --callers 2 --rows 3 --ranks {ranks} --out {out}"
    subprocess.run([sys.executable, *words.split()], check=True, timeout=150)
    (record,) = map(json.loads, out.read_text().splitlines())
    assert record["ours"] == 0.0
    assert record["peers"]["calls"] > 0
    assert {f"rank {rank} MiB" for rank in range(ranks)} <= record["peers"].keys()
