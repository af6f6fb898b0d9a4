"""What a process does under torchrun in a test: it steps with its rank and says whether it was right."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from houses import Alone, house_config

from moeserve.runtime.launch.torchrun import SequenceParallel, join_torchrun, leave_torchrun
from moeserve.runtime.step import LaneInput


def main(path: Path) -> None:
    """Two engines of two tensor-parallel ranks: first all bring rows of their own, then engines share."""
    torch.set_num_threads(1)
    mesh = {"data_parallel_size": 2, "tensor_parallel_size": 2, "enable_expert_parallel": True}
    rank = join_torchrun(house_config(path, **{f"parallel__{key}": value for key, value in mesh.items()}))
    alone = Alone(path)
    lanes = (3, 0, 5, 1)
    own = alone.batch(lanes[rank.index], seed=rank.index)
    answer, _ = rank.step(1, LaneInput(*own, torch.ones(len(own[0]), dtype=torch.bool)), lanes)
    torch.testing.assert_close(answer, alone.forward(1, *own), rtol=1e-4, atol=1e-4)
    sequence = SequenceParallel(rank)
    engines = (7, 1)
    shared = alone.batch(engines[rank.index // 2], seed=50 + rank.index // 2)
    whole = sequence.step(0, LaneInput(*shared, torch.ones(len(shared[0]), dtype=torch.bool)), engines)
    torch.testing.assert_close(whole, alone.forward(0, *shared), rtol=1e-4, atol=1e-4)
    if dist.is_initialized():
        raise AssertionError("a default group was formed in the caller's name")
    print(f"rank {rank.index} right", flush=True)
    sequence.close()
    leave_torchrun(rank)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
