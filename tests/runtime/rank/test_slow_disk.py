"""Many shards on a slow disk: what is read ahead, the bar, and the rate in the log."""

from __future__ import annotations

import logging
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from slow_disk import SlowDisk

from moeserve.device.machine import machine_named
from moeserve.runtime.config import Config
from moeserve.runtime.epoch import Epoch
from moeserve.runtime.planning.layers import plans_for
from moeserve.runtime.rank.member.held_epoch import HeldEpoch
from moeserve.runtime.rank.rank import Rank
from moeserve.runtime.sections import Wanted
from moeserve.runtime.served import served_from

LAYERS, SHARDS = 4, 9
RATE = 16e6  # bytes a second
SAID = re.compile(
    r"rank 0: read (?P<megabytes>[\d.]+) MB of expert weights for 4 layers in (?P<seconds>[\d.]+) s, "
    r"(?P<rate>[\d.]+) MB/s"
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shards")
    make_checkpoint("qwen3_moe", path, layers=LAYERS, shards=SHARDS)
    assert len(list(path.glob("*.safetensors"))) == SHARDS
    return path


@dataclass(frozen=True)
class Loaded:
    """What a load wrote into the log, and how the disk was read."""

    megabytes: float
    seconds: float
    rate: float
    disk: SlowDisk
    took: float  # seconds by the test's own clock; the log has hundredths


def load(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, advice: bool
) -> Loaded:
    """Loads all experts as a member does when its group forms."""
    disk = SlowDisk(rate=RATE, latency=0.004, window=16 << 10)
    with monkeypatch.context() as patched, caplog.at_level(logging.INFO):
        disk.install(patched, advice=advice)
        served = served_from(Config().with_values({"model.checkpoint": str(path)}).checked())
        rank = Rank(0, served, plans_for(served, machine_named("cpu", ()), Wanted()), "cpu")
        held = HeldEpoch(rank, None, lambda generation: None)
        epoch = Epoch.first(served.mesh, len(served.layers), served.checkpoint.num_experts)
        caplog.clear()
        began = time.perf_counter()
        held._load(epoch, 1)
        took = time.perf_counter() - began
    (told,) = [found for record in caplog.records if (found := SAID.fullmatch(record.getMessage()))]
    assert rank.experts.bytes_read == served.checkpoint.expert_nbytes(0) * 8 * LAYERS
    return Loaded(*(float(told[name]) for name in ("megabytes", "seconds", "rate")), disk, took)


@pytest.mark.timed
def test_a_slow_disk_is_read_at_its_rate_and_not_window_by_window(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ahead = load(path, monkeypatch, caplog, advice=True)
    alone = load(path, monkeypatch, caplog, advice=False)
    wanted = ahead.megabytes * 1e6
    assert ahead.disk.faults == 0, "those of the first layer are asked for too"
    assert wanted <= ahead.disk.asked <= 1.1 * wanted
    assert alone.disk.asked == 0 and alone.disk.faults >= wanted / alone.disk.window
    # the log's megabytes are rounded; what a window moves beyond the page that is waited for comes meanwhile
    least, waits = (wanted - 5e4) / RATE, alone.disk.latency - alone.disk.window / RATE
    for found, bound in ((ahead, least), (alone, least + alone.disk.faults * waits)):
        assert found.took >= bound and found.took >= found.seconds - 0.005
        assert found.seconds >= round(bound, 2), "the log has hundredths"
    assert ahead.seconds < alone.seconds / 2
    for found in (ahead, alone):
        assert found.rate == pytest.approx(found.megabytes / found.seconds, rel=0.05)
        assert found.rate <= RATE / 1e6


def test_a_terminal_sees_a_bar_over_layers(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for terminal in (True, False):
        with monkeypatch.context() as patched:
            patched.setattr(os, "isatty", lambda descriptor, answer=terminal: answer)
            load(path, patched, caplog, advice=True)
        said = capfd.readouterr().err
        assert ("experts: 100%" in said and "4/4" in said and "layer" in said) == terminal
        assert ("experts:   0%" in said) == terminal
