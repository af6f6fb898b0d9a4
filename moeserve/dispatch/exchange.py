"""The collectives that dispatchers over torch.distributed share: gloo on the CPU, NCCL or RCCL on a GPU."""

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
            f"the dispatcher is built for rank {spec.rank} of {spec.ranks}"
        )


def exchange(received: Tensor, sent: Tensor, received_rows: Sequence[int], sent_rows: Sequence[int]) -> None:
    """Sends the next `sent_rows[r]` rows of `sent` to each rank r; `received` gets `received_rows[r]` of its.

    Collective; contiguous tensors, any row counts, zero too.
    """
    dist.all_to_all_single(received, sent, list(received_rows), list(sent_rows))


def spread(lanes: Tensor, mine: Tensor, lane_rows: Sequence[int]) -> None:
    """Fills `lanes` with every rank's `mine`, `lane_rows[r]` rows from rank r. Collective.

    On gloo an all-to-all of copies is the fastest way below 1 MiB a lane, where decoding lives; an all-gather
    takes twice as long, and messages between pairs wait for one another's threads.
    """
    ranks = len(lane_rows)
    if mine.is_cpu:
        exchange(lanes, mine.repeat(ranks, 1), lane_rows, [mine.shape[0]] * ranks)
    else:
        dist.all_to_all(list(lanes.split_with_sizes(lane_rows)), [mine] * ranks)


def sum_partials(partials: Sequence[Tensor]) -> Tensor:
    """Sum of one partial `[T, H]` a rank, in float32 and in rank order, so that its bits repeat."""
    total = partials[0].float()
    for partial in partials[1:]:
        total = total + partial
    return total
