"""Steps of the high-throughput carrier's twin, run in several processes."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.dispatch.backends import DISPATCHERS
from moeserve.dispatch.dispatcher import DispatchSpec
from moeserve.dispatch.peers.ht_twin import Twin
from moeserve.dispatch.routing import Routing
from moeserve.quant.formats import FORMATS

SLOTS, HIDDEN, TOP_K, LANE_ROWS = 3, 32, 2, 6


def spec_of(rank: int, ranks: int, patience: float = 30.0) -> DispatchSpec:
    return DispatchSpec(
        rank=rank,
        ranks=ranks,
        slots=SLOTS,
        hidden=HIDDEN,
        top_k=TOP_K,
        lane_rows=LANE_ROWS,
        dtype=torch.float32,
        wire=FORMATS["fp32"],
        patience=patience,
    )


def lane(rank: int, ranks: int, step: int) -> tuple[Tensor, Routing]:
    """What `rank` brings to a step; every lane's first row needs all ranks."""
    random = torch.Generator().manual_seed(100 * step + rank)
    rows = tuple((step + r) % LANE_ROWS + 1 for r in range(ranks))
    hidden = torch.randn(rows[rank], HIDDEN, generator=random)
    slots = torch.rand(rows[rank], ranks * SLOTS, generator=random).argsort(dim=1)[:, :TOP_K].int()
    slots[0] = torch.arange(TOP_K) * SLOTS + rank % SLOTS
    return hidden, Routing(slots, torch.rand(rows[rank], TOP_K, generator=random), rows)


def overlapping(rank: int, ranks: int) -> list[bool]:
    """Four steps, two under way at a time: whether each answer is that of another carrier, bit for bit."""
    carriers = [DISPATCHERS[name].build(spec_of(rank, ranks)) for name in ("nvlink_ht", "all2allv")]
    answers: list[list[Tensor]] = [[], []]
    for carrier, found in zip(carriers, answers, strict=True):
        under_way = []
        for step in range(4):
            under_way.append(carrier.dispatch(*lane(rank, ranks, step)).wait())
            if len(under_way) == 2:
                oldest = under_way.pop(0)
                found.append(carrier.combine(oldest.batch.tokens.parts[0] * 2, oldest.ticket).wait())
        found.append(carrier.combine(under_way[0].batch.tokens.parts[0] * 2, under_way[0].ticket).wait())
        carrier.close()
    return [torch.equal(a, b) for a, b in zip(*answers, strict=True)]


@dataclass(frozen=True)
class Seen:
    """What one rank saw of one step."""

    late: tuple[int, ...]
    seconds: float
    right: bool  # the answer is the sum over the ranks that `present` names


def with_absence(rank: int, ranks: int, patience: float, pause: float) -> list[Seen]:
    """Three steps; the last rank comes to the second, and stays, `pause` seconds late."""
    carrier = Twin(spec_of(rank, ranks, patience))
    seen = []
    for step in range(3):
        if rank == ranks - 1 and step == 1:
            time.sleep(pause)
        started = time.monotonic()
        hidden, routing = lane(rank, ranks, step)
        arrived = carrier.dispatch(hidden, routing).wait()
        answer = carrier.combine(arrived.batch.tokens.parts[0], arrived.ticket).wait()
        together = {rank} if rank == ranks - 1 else set(range(ranks - 1))
        present = together if step else set(range(ranks))
        come = torch.tensor([s in present for s in (routing.slots // SLOTS).flatten().tolist()])
        weights = torch.where(come.view(routing.slots.shape), routing.weights, 0.0)
        expected = hidden * weights.sum(dim=1, keepdim=True)
        right = torch.allclose(answer, expected, rtol=1e-5, atol=1e-6)
        seen.append(Seen(carrier.late(), time.monotonic() - started, right))
    carrier.close()
    return seen


def without_excluded(rank: int, ranks: int) -> tuple[tuple[int, ...], int]:
    """A step that the last rank does not come to, excluded before: who was late, and rows that arrived."""
    carrier = Twin(spec_of(rank, ranks))
    late, rows = (), 0
    if rank < ranks - 1:
        carrier.exclude((ranks - 1,))
        hidden, routing = lane(rank, ranks, 0)
        arrived = carrier.dispatch(hidden, routing).wait()
        carrier.combine(arrived.batch.tokens.parts[0], arrived.ticket).wait()
        late, rows = carrier.late(), int(arrived.batch.counts.sum())
    carrier.close()
    return late, rows
