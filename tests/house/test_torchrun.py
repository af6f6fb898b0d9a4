"""Ranks inside the caller's own processes, started by torchrun: own rows, and sequence-parallel rows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path


def test_torchrun_ranks_answer_as_one_with_own_and_with_shared_rows(checkpoint_path: Path) -> None:
    script = Path(__file__).parents[1] / "support" / "torchrun_ranks.py"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "4",
        "--master-addr",
        "127.0.0.1",
    ]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", str(script), str(checkpoint_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=180, env=environment, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    # ranks share the pipe, and a line may begin in the middle of another's
    assert sorted(re.findall(r"rank (\d) right", ran.stdout)) == ["0", "1", "2", "3"], ran.stdout
