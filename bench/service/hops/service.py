"""The service in the benches of the hop: its sizes on this machine, its configuration, its checkpoint."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from bench.service.hops.sizes import Sizes
from moeserve.runtime.config import Config

DEFAULTS = Config()
MOST_CALLERS = 64
LARGE, ALONE, TINY = (
    Sizes(7168, 2048, 128, 8, 4),
    Sizes(7168, 2048, 64, 8, 4),
    Sizes(256, 128, 16, 2, 2),
)


def sizes_of(ranks: int) -> Sizes:
    """Large where each rank has a GPU, and tiny elsewhere."""
    return TINY if not on_gpus(ranks) else LARGE if ranks == 2 else ALONE


def on_gpus(ranks: int) -> bool:
    """Whether each rank has a GPU of its own here."""
    return torch.cuda.device_count() >= ranks


def group_of(ranks: int) -> str:
    """How a case begins whose service has so many ranks; two are not named."""
    return "one rank, " if ranks == 1 else ""


def config_of(
    folder: Path,
    ranks: int,
    *,
    dispatcher: str = "auto",
    graph_rows: int = DEFAULTS.step.graph_rows,
    spin: float = DEFAULTS.cluster.spin_seconds,
) -> Config:
    """The service's configuration, and that of the ranks in process."""
    return Config().with_values(
        {
            "model.checkpoint": str(folder),
            "parallel.data_parallel_size": ranks,
            "parallel.enable_expert_parallel": ranks > 1,
            "plan.device": "cuda" if on_gpus(ranks) else "cpu",
            "plan.all2all_backend": dispatcher,
            "step.graph_rows": graph_rows,
            "cluster.spin_seconds": spin,
            "passes.host_ahead": "always",
            "passes.lane_bytes": 1 << 30,
            "passes.lanes": MOST_CALLERS,
            "passes.patience_seconds": 10.0,  # for callers who wait until the others are warm
            "step.late_seconds": 25.0,  # or two ranks would launch nothing ahead for them
            "server.port": 0,
            "server.metrics_port": 0,
        }
    )


@contextmanager
def checkpoint_folder(sizes: Sizes) -> Iterator[Path]:
    """A folder with room for the checkpoint, in memory where that is large enough."""
    needed = 3 * sizes.hidden * sizes.inner * sizes.experts * sizes.layers * 1.2
    shared = Path("/dev/shm")
    roomy = shared.is_dir() and shutil.disk_usage(shared).free > 2 * needed
    with tempfile.TemporaryDirectory(dir=shared if roomy else None) as folder:
        yield Path(folder)
