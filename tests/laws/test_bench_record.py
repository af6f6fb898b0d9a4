"""`bench/lib/record.py`: a record names the command that made it, and replaces its own case."""

import json
import sys
from pathlib import Path

import pytest

from bench.lib import record


@pytest.mark.parametrize(
    ("argv", "ranks", "command"),
    [
        (["bench/service/hop.py", "--calls", "4"], None, "python -m bench.service.hop --calls 4"),
        (
            ["bench/dispatch/gpu_a2a.py", "--record"],
            "4",
            "torchrun --nproc-per-node 4 -m bench.dispatch.gpu_a2a --record",
        ),
        (
            ["bench/numbers/cross_checks.py", "--only", "zero points, words"],
            None,
            "python -m bench.numbers.cross_checks --only 'zero points, words'",
        ),
    ],
)
def test_a_command_is_what_one_types(
    argv: list[str], ranks: str | None, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [str(record.ROOT / argv[0]), *argv[1:]])
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if ranks:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert record.command() == command


def test_paths_of_this_machine_stay_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside, outside = record.ROOT / "tests" / "producers", tmp_path / "counts"
    program = str(record.ROOT / "bench" / "service" / "quantized.py")
    monkeypatch.setattr(sys, "argv", [program, str(inside), str(outside)])
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert record.command() == "python -m bench.service.quantized tests/producers counts"


def test_a_case_that_is_measured_again_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "b.jsonl"
    record.write(
        [record.Result("b", "one", 1.0, "ms", "lower"), record.Result("b", "two", 2.0, "ms", "lower")], path
    )
    record.write([record.Result("b", "one", 3.0, "ms", "lower")], path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["case"], line["ours"]) for line in lines] == [("one", 3.0), ("two", 2.0)]
