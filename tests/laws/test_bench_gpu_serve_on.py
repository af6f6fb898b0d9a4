"""`gpu_serve_on`: lines of a log become moments, and answers what a caller saw."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.service.hops.sizes import Sizes
from bench.service.serving_on.gpu.asking import Answer
from bench.service.serving_on.gpu.events import seen_of
from bench.service.serving_on.gpu.service import Setup, slot_bytes
from bench.service.serving_on.gpu.timeline import lines_of, moments

LOG = """\
2026-11-24T10:00:00.500Z INFO    rank 0 generation 3 epoch 1 rank.x: before
2026-11-24T10:00:01.020Z WARNING head generation 3 epoch 1 head.x: generation 3 aborts: rank 1 (pid 7) is lost
    has a second line
2026-11-24T10:00:01.010Z WARNING launcher generation - epoch - launch.x: rank 1 (pid 7) ended with -9; it is
2026-11-24T10:00:01.200Z INFO    head generation 4 epoch 2 head.x: generation 4 serves epoch 2 with 1 members
2026-11-24T10:00:03.000Z WARNING head generation 4 epoch 2 head.x: generation 4 aborts: ranks [1] join
2026-11-24T10:00:03.250Z INFO    head generation 5 epoch 3 head.x: generation 5 serves epoch 3 with 2 members
"""
AT = 1795514401.0  # 2026-11-24T10:00:01Z


def test_moments_are_told_by_lines_after_the_event() -> None:
    lines = lines_of(LOG, AT)
    assert [line.seconds for line in lines] == pytest.approx([0.01, 0.02, 0.2, 2.0, 2.25])
    assert moments(lines, rank=1) == {
        "launcher sees its end": 0.01,
        "head hears": 0.02,
        "serves": 0.2,
        "it joins": 2.0,
        "whole serves": 2.25,
    }
    assert "head hears" not in moments(lines, rank=0)


def test_gaps_belong_to_the_loss_or_to_the_return() -> None:
    ended = [AT - 0.2, AT - 0.1, AT + 0.4, AT + 1.9, AT + 2.2, AT + 2.3]
    answers = [Answer(turn % 2, at - 0.1, at) for turn, at in enumerate(ended)]
    wrong = Answer(0, AT - 0.05, AT + 0.1, "relative error 1", wrong=True)
    seen = seen_of(answers[:2], [wrong, *answers[2:]], AT, joins=2.0)
    assert (seen.call, seen.interruption) == pytest.approx((0.1, 1.4))
    assert (seen.losing, seen.returning) == pytest.approx((1.4, 0.2))
    assert (seen.first, seen.all_layers) == pytest.approx((1.9, 1.9))
    assert seen.right == 6 and seen.ended == {"relative error 1": 1}


def test_an_owner_of_shadows_holds_its_own_experts_alone() -> None:
    sizes = Sizes(7168, 2048, 64, 8, 4)
    replicas, shadows = (Setup(sizes, 2, 64, one) for one in (False, True))
    assert replicas.owner_bytes == 2 * shadows.owner_bytes == slot_bytes(shadows)
    assert replicas.owner_bytes == pytest.approx(11.3e9, rel=0.01)
    assert (replicas.aim("kill"), replicas.aim("stop")) == (0.5, 2.5)
    assert shadows.aim("kill") == pytest.approx(1.0 + 5.64 / 20, rel=0.01)


def test_sockets_of_a_killed_process_are_timed(tmp_path: Path) -> None:
    out = tmp_path / "found.jsonl"
    words = f"-m bench.service.serving_on.gpu_serve_on --sockets --ranks 64 --seconds 30 --out {out}"
    subprocess.run([sys.executable, *words.split()], check=True, timeout=100)
    for record in map(json.loads, out.read_text().splitlines()):
        assert 0.0 < record["peers"]["older, ms"] < 30e3
        assert record["peers"].keys() == {"older, ms", "younger, ms", "ended, ms"}
