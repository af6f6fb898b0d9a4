"""A tiny model on a GPU: its checkpoint, a rank in process, ways to its experts from a GPU, and batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from houses import Alone, house_config
from torch import Tensor

from moeserve.runtime.launch.local_cluster import LocalCluster
from moeserve.runtime.launch.torchrun import HostedRank, join_torchrun, leave_torchrun
from moeserve.torch import Settings, connect
from moeserve.torch.attached_device import AttachedDevice


def tiny(folders: pytest.TempPathFactory) -> Path:
    """A Qwen3-MoE checkpoint of two layers whose experts kernels for GPUs take."""
    path = folders.mktemp("qwen3")
    make_checkpoint("qwen3_moe", path, dtype=torch.bfloat16, hidden=256, inner=256)
    return path


FP8 = "fp8_per_block"
"""What the checkpoint's experts are loaded as where rows come rounded."""


@contextmanager
def joined(path: Path, **values: Any) -> Iterator[HostedRank]:
    """A rank of this process, on its first GPU."""
    rank = join_torchrun(house_config(path, plan__device="cuda", **values))
    yield rank
    leave_torchrun(rank)


def opened(
    house: LocalCluster,
    name: str = "torch",
    stages: int = 1,
    *,
    device: str = "cuda",
    one_version: bool = False,
    rows_wire: str = "auto",
    layers: tuple[int, ...] = (),
) -> AttachedDevice:
    """A way with rows on a GPU. layers: of a forward pass; (): the service's."""
    settings = Settings(
        "attached",
        house.address,
        timeout=60.0,
        name=name,
        rows=64,
        stages=stages,
        device=device,
        one_version=one_version,
        rows_wire=rows_wire,
        layers=layers,
    )
    return connect(settings)


def batch(alone: Alone, rows: int, seed: int, device: str = "cuda") -> tuple[Tensor, Tensor, Tensor]:
    """Rows on a GPU, with chosen experts and weights."""
    hidden, ids, weights = alone.batch(rows, seed=seed)
    return hidden.bfloat16().to(device), ids.to(device), weights.to(device)
