"""What a rank's device memory is held for now, by purpose."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from moeserve.experts.bank import Bank
from moeserve.runtime.planning.memory import (
    CACHED,
    DISPATCH,
    GRAPHS,
    KEPT,
    PASSES,
    STAGING,
    WEIGHTS,
    WORKSPACE,
)


class RunsHeld(NamedTuple):
    """What a rank holds of its device for callers' GPUs, and for the runs of their passes."""

    pools: tuple[Any, ...] = ()  # of their graphs
    rooms: int = 0  # bytes of torch's memory
    mailboxes: int = 0  # bytes beside torch's memory


NO_RUNS = RunsHeld()


def held_bytes(
    bank: Bank, buffers: tuple[int, int], device: str, pool: Any = None, runs: RunsHeld = NO_RUNS
) -> dict[str, int]:
    """Bytes by each of `PURPOSES`. buffers: what those of dispatchers take, and those kept of generations
    before. pool: of the graphs.

    On a CPU torch keeps no account: workspace, graphs, passes and cached are 0 there. CUDA's own context and
    what it keeps of graphs, compiled kernels and libraries that allocate by themselves are in none of them.
    """
    held = {WEIGHTS: bank.slots_nbytes, STAGING: bank.staging_nbytes}
    held |= dict(zip((DISPATCH, KEPT), buffers, strict=True))
    if device == "cpu":
        return held | {GRAPHS: 0, PASSES: 0, WORKSPACE: 0, CACHED: 0}
    pools = [one for one in (pool, *runs.pools) if one is not None]
    segments = [segment for one in pools for segment in torch.cuda.memory_snapshot(one)]  # type: ignore[no-untyped-call]
    recorded = sum(int(segment["total_size"]) for segment in segments)
    in_use = sum(int(segment["allocated_size"]) for segment in segments)
    allocated = torch.cuda.memory_allocated(device) - in_use
    reserved = torch.cuda.memory_reserved(device) - recorded
    return held | {
        GRAPHS: recorded,
        PASSES: runs.rooms + runs.mailboxes,
        WORKSPACE: max(0, allocated - held[WEIGHTS] - held[STAGING] - runs.rooms),
        CACHED: max(0, reserved - allocated),
    }


def release_cached(device: str) -> None:
    """Gives back what torch keeps for its next allocation, once loading or warming is over."""
    if device != "cpu":
        torch.cuda.empty_cache()
