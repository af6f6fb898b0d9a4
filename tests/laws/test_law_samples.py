"""The bench that draws many cases of the kernels' laws, as it runs without a GPU."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODULE = "bench.experts.gpu_law_samples"


def test_samples_of_the_cpus_kernel_are_within_their_bounds() -> None:
    command = [sys.executable, "-m", MODULE, "--samples", "16", "--kernels", "torch_grouped_mm", "--bias"]
    done = subprocess.run(command, capture_output=True, cwd=ROOT, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert len(lines) == 4
    assert all("16 samples, 0 over their bounds" in line for line in lines[:3])
    assert lines[3] == "3 of 3 kernels and schemes within their bounds"
