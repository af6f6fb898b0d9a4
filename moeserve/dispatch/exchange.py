"""The collectives that carriers over torch.distributed share: gloo on the CPU, NCCL or RCCL on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from moeserve.dispatch.dispatcher import DispatchSpec

_SM = (70, 75, 80, 86, 87, 89, 90, 100, 103, 110, 120, 121)
TORCH_ARCHS = frozenset(("cpu", "gfx90a", "gfx942", "gfx950", *(f"sm{version}" for version in _SM)))
"""Where plain torch operations run."""

PARTIAL_SUMS = "float32 sums of a rank travel in the hidden dtype and are added in float32, in rank order"


def check_group(spec: DispatchSpec) -> None:
    """Raises ValueError when torch.distributed's default group is not the one `spec` was made for."""
    if not dist.is_initialized():
        raise ValueError("torch.distributed has no default group; call init_process_group first")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if (rank, ranks) != (spec.rank, spec.ranks):
        raise ValueError(
            f"the default group makes this rank {rank} of {ranks}; "
            f"the carrier is built for rank {spec.rank} of {spec.ranks}"
        )


def exchange(received: Sequence[Tensor], sent: Sequence[Tensor]) -> None:
    """Sends `sent[r]` to each rank r and fills `received[r]` from it; contiguous, any sizes, zero too.

    Collective. On gloo it is one message a pair, without a copy: all-to-all there takes either even lists or
    one tensor that holds every copy, and its all-gather takes longer from 1 MiB on.
    """
    if not received[0].is_cpu:
        dist.all_to_all(list(received), list(sent))
        return
    rank, ranks = dist.get_rank(), len(sent)
    received[rank].copy_(sent[rank])
    others = [(rank + step) % ranks for step in range(1, ranks)]
    works = [dist.irecv(received[r], r) for r in others if received[r].numel()]
    works += [dist.isend(sent[r], r) for r in others if sent[r].numel()]
    for work in works:
        if work is not None:
            work.wait()


def sum_partials(partials: Sequence[Tensor]) -> Tensor:
    """Sum of one partial `[T, H]` a rank, in float32 and in rank order, so that its bits repeat."""
    total = partials[0].float()
    for partial in partials[1:]:
        total = total + partial
    return total
