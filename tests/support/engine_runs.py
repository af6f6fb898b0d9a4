"""Services for real engines, and the processes in which engines run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from engine_models import prompts
from houses import house_config

from moeserve.runtime.launch.local_cluster import LocalCluster

ROOT = Path(__file__).parent.parent.parent
HERE = ROOT / "tests" / "engines"
RUN_SECONDS = 280
NEW_TOKENS = 24
REQUESTS = 16


def environment(address: str | None, **more: str) -> dict[str, str]:
    """The environment of an engine, with its experts behind `address`, or alone."""
    left_out = ("MOESERVE_EXPERTS", "OMP_NUM_THREADS", "PYTHONPATH")
    given = {key: value for key, value in os.environ.items() if key not in left_out}
    chosen = {"MOESERVE_EXPERTS": address} if address else {}
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    return given | {"PYTHONPATH": str(ROOT), "VLLM_PLUGINS": "moeserve"} | offline | chosen | more


def house_of(path: Path, ranks: int = 2, **values: Any) -> LocalCluster:
    """A service of `ranks` ranks, whose weights can be reloaded."""
    spare = {"balance__redundant_experts": ranks, "parallel__enable_expert_parallel": True}
    return LocalCluster(house_config(path, parallel__data_parallel_size=ranks, **spare, **values))


def run_engine(
    script: str, folder: Path, model: Path, address: str | None, environ: dict[str, str], **job: Any
) -> dict[str, Any]:
    """Runs an engine once in a process of its own; returns what it wrote, or `failed` and what it said."""
    asked = {
        "model": str(model),
        "prompts": prompts(REQUESTS),
        "sampling": {"max_tokens": NEW_TOKENS, "logprobs": 20},
        "options": {},
        "rounds": [None],
        "address": address,
    } | job
    (folder / "job.json").write_text(json.dumps(asked))
    command = [sys.executable, str(HERE / script), folder / "job.json", folder / "answer.json"]
    ended = subprocess.run(
        command,
        env=environment(address, **environ),
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
        check=False,
    )
    said = ended.stdout + ended.stderr
    if ended.returncode:
        return {"failed": ended.returncode, "said": said}
    answer: dict[str, Any] = json.loads((folder / "answer.json").read_text())
    return answer | {"said": said}
