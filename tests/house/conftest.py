"""One running house for the tests of this folder that only ask questions of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from houses import EP4, Alone, house_config

from moeserve.runtime.launch.local_cluster import LocalCluster

LANE_ROWS = 64


@pytest.fixture(scope="session")
def checkpoint_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-MoE checkpoint of two layers, eight experts, top-2."""
    path = tmp_path_factory.mktemp("qwen3")
    make_checkpoint("qwen3_moe", path)
    return path


@pytest.fixture(scope="session")
def alone(checkpoint_path: Path) -> Alone:
    """What one process computes."""
    return Alone(checkpoint_path)


@pytest.fixture(scope="module")
def house(checkpoint_path: Path) -> Iterator[LocalCluster]:
    """Four ranks, whole experts, small lanes so that splitting is seen.

    A test may stop a rank so that no step ends: it is not taken for lost, however long that test takes.
    """
    config = house_config(checkpoint_path, step__lane_rows=LANE_ROWS, cluster__stopped_seconds=0.0, **EP4)
    with LocalCluster(config) as cluster:
        yield cluster
