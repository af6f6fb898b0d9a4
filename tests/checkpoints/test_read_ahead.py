"""Reading ahead: what is asked of the system, and that a rank asks before it reads the layer before."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from checkpoints import make_checkpoint

from moeserve.checkpoints.checkpoint import Checkpoint
from moeserve.checkpoints.read_ahead import GAP, Span, merged
from moeserve.runtime.rank.experts import RankExperts


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """File name, first byte and number of bytes of every call."""
    calls: list[tuple[str, int, int]] = []

    def advise(descriptor: int, start: int, length: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        calls.append((Path(os.readlink(f"/proc/self/fd/{descriptor}")).name, start, length))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    return calls


def test_near_spans_become_one() -> None:
    a, b = Path("a"), Path("b")
    spans = [
        Span(a, 5 * GAP, 6 * GAP),
        Span(b, 0, 4),
        Span(a, 0, 10),
        Span(a, 10 + GAP, 20 + GAP),
        Span(b, 2, 9),
    ]
    assert merged(spans) == [Span(a, 0, 20 + GAP), Span(a, 5 * GAP, 6 * GAP), Span(b, 0, 9)]


@pytest.mark.parametrize("form", ["apart", "fused", "sharded"])
def test_the_bytes_of_the_experts_are_asked_for(
    tmp_path: Path, asked: list[tuple[str, int, int]], form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint("qwen3_moe", tmp_path, fused=form == "fused", shards=3 if form == "sharded" else None)
    monkeypatch.setattr("moeserve.checkpoints.read_ahead.GAP", -1)
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.read_ahead(1, [2, 5]) == 2 * checkpoint.expert_nbytes(1)
    assert sum(length for *_, length in asked) == 2 * checkpoint.expert_nbytes(1)
    assert len({file for file, *_ in asked}) == (3 if form == "sharded" else 1)
    if form == "apart":  # the bytes of the file that are asked for are those of the tensor
        name = "model.layers.1.mlp.experts.2.down_proj.weight"
        entry = checkpoint._store.entries[name]
        raw = entry.file.read_bytes()[entry.start : entry.start + entry.nbytes]
        assert raw == checkpoint._store.read(name).numpy().tobytes()
        assert any(start <= entry.start < start + length for _, start, length in asked)


def test_a_system_without_the_call_reads_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint("qwen3_moe", tmp_path)
    monkeypatch.delattr(os, "posix_fadvise")
    assert Checkpoint(tmp_path).read_ahead(0, [0]) == 0


def test_a_rank_asks_for_a_layer_before_it_reads_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[tuple[str, int]] = []
    checkpoint = SimpleNamespace(read_ahead=lambda layer, ids: events.append((f"ask {ids}", layer)))
    served = SimpleNamespace(layers=(3, 4), checkpoint=checkpoint)
    experts = RankExperts(0, cast(Any, served), {}, "cpu")
    monkeypatch.setattr(experts, "_held_in", lambda epoch, position: ((0, -1, 2), 1))
    monkeypatch.setattr(experts, "_load_layer", lambda layer, wanted: events.append(("read", layer)))
    member = SimpleNamespace(owner=0)
    epoch = SimpleNamespace(members=SimpleNamespace(at=lambda _: member), mesh=SimpleNamespace(sliced=False))
    experts.load(cast(Any, epoch), lambda layers: layers)
    assert events == [("ask [0, 2]", 3), ("ask [0, 2]", 4), ("read", 3), ("read", 4)]
