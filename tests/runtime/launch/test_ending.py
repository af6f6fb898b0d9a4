"""A process that has stopped and does not end."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoints import make_checkpoint
from houses import house_config

from moeserve.runtime.control.stream import StreamClosed
from moeserve.runtime.launch import rank_process
from moeserve.runtime.launch.rank_process import RankSpec

BEGIN = "import ctypes, logging, time; logging.basicConfig(); from moeserve.runtime.launch import ending; "
WAITS = {
    "in a wait of its own": (
        "time.sleep(60)",
        -signal.SIGKILL,
        "rank 3 has stopped, and its process has not ended",
    ),
    "with the interpreter": ("ctypes.PyDLL(None).sleep(60)", -signal.SIGALRM, ""),
    "not at all": ("", 0, ""),
}


@pytest.mark.parametrize("where", WAITS)
def test_a_process_that_does_not_end_is_killed(where: str) -> None:
    wait, code, said = WAITS[where]
    began = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-c", f"{BEGIN}ending.end_at_last('rank 3', 0.5); {wait}"],
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert ended.returncode == code and time.monotonic() - began < 30
    assert said in ended.stderr


def test_a_rank_that_has_stopped_has_so_long_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint("qwen3_moe", tmp_path)
    seen = list[object]()

    def run() -> None:
        seen.append("ran")
        raise StreamClosed("the head is gone")

    process = SimpleNamespace(
        address="", metrics_address="", weights_address="", outlives=False, rank=SimpleNamespace(plans={}),
        member=SimpleNamespace(run=run), close=lambda: seen.append("closed"),
    )  # fmt: skip
    stream: Any = SimpleNamespace(send=lambda message: None)
    monkeypatch.setattr(rank_process, "_prepare_process", lambda spec: None)
    monkeypatch.setattr(rank_process, "_dial", lambda *given: stream)
    monkeypatch.setattr(rank_process, "_RankProcess", lambda *given: process)
    monkeypatch.setattr(rank_process, "end_at_last", lambda *given: seen.append(given))
    config = house_config(tmp_path, cluster__end_seconds=7.0)
    rank_process.run_rank(RankSpec(config, 3, "127.0.0.1:1", "token", "127.0.0.1", 1, 0))
    assert seen == ["ran", ("rank 3", 7.0), "closed"]


def test_what_ends_a_rank_before_its_log_has_begun_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A launcher's process says nothing more of it: at a host's limit of threads nobody knew why it ended."""
    make_checkpoint("qwen3_moe", tmp_path)

    def prepare(spec: RankSpec) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(rank_process, "_prepare_process", prepare)
    with pytest.raises(RuntimeError):
        rank_process.run_rank(RankSpec(house_config(tmp_path), 3, "127.0.0.1:1", "token", "127.0.0.1", 1, 0))
    assert "rank 3 ends: can't start new thread" in caplog.text
