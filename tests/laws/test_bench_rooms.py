"""`bench/`: every file can be imported, and no room has more files of its own than one looks through."""

import subprocess
import sys
from pathlib import Path

import pytest

from bench.lib.record import ROOT

FILES = sorted((ROOT / "bench").rglob("*.py"))
MODULES = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in FILES]


def test_every_bench_can_be_imported() -> None:
    """In one process apart, since some set the environment of torch and transformers for good."""
    pytest.importorskip("triton")
    pytest.importorskip("transformers")
    text = f"import importlib\nfor name in {MODULES!r}: importlib.import_module(name)"
    done = subprocess.run(
        [sys.executable, "-c", text], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("room", sorted({path.parent for path in FILES}), ids=lambda room: room.name)
def test_a_room_has_at_most_fifteen_files(room: Path) -> None:
    assert sum(path.is_file() for path in room.iterdir()) <= 15
