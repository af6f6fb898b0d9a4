"""A tiny model on this process's GPU, one a file, for tests of runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from gpu_ways import joined, tiny
from houses import Alone

from moeserve.runtime.launch.torchrun import HostedRank
from moeserve.runtime.rank.runs.runs import PassRuns


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    return Alone(tiny(tmp_path_factory))


@pytest.fixture(scope="module")
def rank(alone: Alone) -> Iterator[HostedRank]:
    with joined(alone.checkpoint.path) as rank:
        yield rank


@pytest.fixture(scope="module")
def runs(rank: HostedRank) -> PassRuns:
    return PassRuns(rank)
