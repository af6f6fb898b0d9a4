"""Measuring without a service: whatever becomes of a rank's process is said, by rank, in bounded time."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest

from moeserve.device.machine import machine_named
from moeserve.dispatch.costs import agreement
from moeserve.dispatch.costs.measure import measure
from moeserve.runtime.config import Config
from moeserve.runtime.launch import measuring
from moeserve.runtime.launch.measuring import MeasuringFailed, _collected, measured_here
from moeserve.runtime.planning.costing import costing_of
from moeserve.runtime.sections import ConfigError

Ends = tuple[list[Connection], list[Connection]]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Three pipes: where answers are read, and where ranks write them."""
    pipes = [multiprocessing.Pipe(duplex=False) for _ in range(3)]
    yield [mine for mine, _ in pipes], [theirs for _, theirs in pipes]
    for mine, theirs in pipes:
        mine.close()
        theirs.close()


def test_answers_come_by_rank(ends: Ends) -> None:
    read, write = ends
    for rank in (2, 0, 1):
        write[rank].send((f"of {rank}", ""))
    assert _collected(read, 5.0) == ["of 0", "of 1", "of 2"]


def test_every_rank_that_failed_is_named_with_its_reason(ends: Ends) -> None:
    read, write = ends
    write[0].send((None, "ValueError: no room"))
    write[1].close()
    write[2].send(("of 2", ""))
    with pytest.raises(MeasuringFailed, match="rank 0: ValueError: no room; rank 1: ended without a word"):
        _collected(read, 5.0)


def test_a_rank_that_hangs_is_not_waited_for_for_ever(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "LAST_WORDS_SECONDS", 0.1)
    read, write = ends
    write[1].send((None, "RuntimeError: gone"))
    began = time.monotonic()
    with pytest.raises(MeasuringFailed, match="rank 0: did not finish in time; rank 1: RuntimeError: gone"):
        _collected(read, 60.0)
    assert time.monotonic() - began < 5


def test_ranks_that_take_too_long_are_told_with_the_key_that_gives_them_longer(ends: Ends) -> None:
    read, write = ends
    write[2].send(("of 2", ""))
    late = "did not finish within plan.measure_timeout_seconds = 0.05"
    with pytest.raises(MeasuringFailed, match=f"rank 0: {late}; rank 1: {late}"):
        _collected(read, 0.05)


def test_ranks_measure_for_as_long_as_is_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []

    def kind(backend: str, seconds: float) -> object:
        given.append(seconds)
        return None

    monkeypatch.setattr(agreement, "GroupKind", kind)
    monkeypatch.setattr(agreement, "group_beside", lambda group, kind: group)
    monkeypatch.setattr(agreement, "end_group", lambda group: None)
    monkeypatch.setattr("torch.distributed.get_backend", lambda group: "nccl")
    costing = costing_of(Config().with_values({"plan.measure_timeout_seconds": 900.0}))
    measure((), 1.0, object(), costing.within)  # type: ignore[arg-type]
    assert given == [900.0]


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "machine_for", lambda config: machine_named("h200"))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    config = Config().with_values({"parallel.data_parallel_size": 4})
    with pytest.raises(ConfigError, match="4 ranks are to be measured, and this host has 2 GPUs"):
        measured_here(config, 1.0)
