"""Workers that put the twin of dispatchers over peer memory through its protocol, one function a launch."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from parallel import group
from torch import Tensor

from moeserve.dispatch.dispatcher import DispatchSpec
from moeserve.dispatch.members import Members
from moeserve.dispatch.peers.dispatcher import PeerDispatcher
from moeserve.dispatch.peers.sequence import LAST
from moeserve.dispatch.routing import Routing
from moeserve.experts.batch import ExpertBatch, Grouping
from moeserve.experts.placement import EMPTY
from moeserve.quant.formats import FORMATS

SLOTS, HIDDEN, TOP_K, LANE_ROWS = 3, 160, 3, 40  # a row takes two packets
PATIENCE = 1.0
DELAY = 2.5


@dataclass(frozen=True, eq=False)
class Lanes:
    """Every lane's inputs of one step, the same in every process."""

    hidden: list[Tensor]
    slots: list[Tensor]
    weights: list[Tensor]

    @property
    def rows(self) -> tuple[int, ...]:
        return tuple(h.shape[0] for h in self.hidden)

    def routing(self, rank: int, number: int) -> Routing:
        return Routing(self.slots[rank], self.weights[rank], self.rows, number)

    def expected(self, rank: int, without: tuple[int, ...] = ()) -> Tensor:
        """Slot s multiplies by s + 1; slots of the ranks `without` answer nothing. Exact: small integers."""
        slots = self.slots[rank]
        here = slots >= 0
        for lost in without:
            here = here & (slots // SLOTS != lost)
        factor = torch.where(here, self.weights[rank].nan_to_num() * (slots + 1), 0.0).sum(dim=1)
        return self.hidden[rank] * factor[:, None]


def lanes(seed: int, rows: tuple[int, ...]) -> Lanes:
    """Small integers everywhere, so that sums are exact in any order; some choices are empty."""
    random = torch.Generator().manual_seed(seed)
    made = Lanes([], [], [])
    for count in rows:
        made.hidden.append(torch.randint(-8, 9, (count, HIDDEN), generator=random).float())
        order = torch.rand(count, SLOTS * len(rows), generator=random).argsort(dim=1)[:, :TOP_K].int()
        empty = torch.rand(count, TOP_K, generator=random) < 0.2
        made.slots.append(torch.where(empty, EMPTY, order))
        weight = torch.randint(1, 5, (count, TOP_K), generator=random).float()
        made.weights.append(torch.where(empty, float("nan"), weight))
    return made


def spec(rank: int, ranks: int, patience: float = 30.0) -> DispatchSpec:
    """Float32 all the way."""
    return DispatchSpec(
        members=Members.of_ranks(ranks),
        seat=rank,
        slots=SLOTS,
        hidden=HIDDEN,
        top_k=TOP_K,
        lane_rows=LANE_ROWS,
        dtype=torch.float32,
        wire=FORMATS["fp32"],
        row_align=2,
        patience=patience,
    )


def compute(batch: ExpertBatch, rank: int) -> Tensor:
    """Slot s of all ranks multiplies by s + 1; rows that no slot owns come back as NaN."""
    rows = batch.tokens.dequantize()
    outputs = torch.full_like(rows, float("nan"))
    flat, answers = rows.flatten(0, -2), outputs.flatten(0, -2)
    for slot, (first, count) in enumerate(zip(batch.offsets.tolist(), batch.counts.tolist(), strict=False)):
        answers[first : first + count] = flat[first : first + count] * (rank * SLOTS + slot + 1)
    return outputs


def step(dispatcher: PeerDispatcher, rank: int, given: Lanes, number: int = 0) -> Tensor:
    """One whole step of `number`, of the next one by default."""
    arrived = dispatcher.dispatch(given.hidden[rank], given.routing(rank, number or after(dispatcher)))
    return dispatcher.combine(compute(arrived.batch, rank), arrived.ticket)


def after(dispatcher: PeerDispatcher) -> int:
    """The number after that of the dispatcher's last step."""
    return dispatcher._number + 1


def barrier() -> None:
    """Waits for all workers of the launch."""
    dist.barrier(group=group())


def everything(
    rank: int, world: int
) -> tuple[dict[str, bool], dict[str, Any], tuple[bool, bool, float] | None]:
    """All there is to see, in one launch: the protocol, rank 1 too late, the last rank excluded."""
    held = protocol(rank, world, Grouping.PADDED), protocol(rank, world, Grouping.RAGGED)
    well = {what: all(found[what] for found in held) for what in held[0]}
    return well, one_is_late(rank, world, 1), one_is_excluded(rank, world, world - 1)


def protocol(rank: int, world: int, grouping: Grouping) -> dict[str, bool]:
    """What must hold when all ranks come, by name."""
    dispatcher = PeerDispatcher(spec(rank, world), grouping, group())
    return {
        "over the turn of the sequence numbers": _turn(dispatcher, rank, world),
        "two under way": _under_way(dispatcher, rank, world),
        "abandoned steps": _abandoned(dispatcher, rank, world),
        "a stale step is refused": _stale(dispatcher, rank, world),
        "random sizes": _random_sizes(dispatcher, rank, world),
        "nobody was late": dispatcher.late() == (),
    }


def _turn(dispatcher: PeerDispatcher, rank: int, world: int) -> bool:
    given = [lanes(seed, (3, 0, 6)[:world]) for seed in range(7)]
    well = True
    for at, each in enumerate(given):
        well &= torch.equal(step(dispatcher, rank, each, LAST - 2 + at), each.expected(rank))
    assert dispatcher._twin is not None
    return well and dispatcher._twin.sequence == 4


def _under_way(dispatcher: PeerDispatcher, rank: int, world: int) -> bool:
    one, two = lanes(11, (4, 2, 5)[:world]), lanes(12, (6, 6, 1)[:world])
    well = True
    for turn in range(6):
        arrived = [
            dispatcher.dispatch(each.hidden[rank], each.routing(rank, after(dispatcher)))
            for each in (one, two)
        ]
        outputs = [compute(each.batch, rank) for each in arrived]
        answers = {}
        for at in (0, 1) if turn % 2 else (1, 0):
            answers[at] = dispatcher.combine(outputs[at], arrived[at].ticket)
        well &= torch.equal(answers[0], one.expected(rank)) and torch.equal(answers[1], two.expected(rank))
    return well


def _abandoned(dispatcher: PeerDispatcher, rank: int, world: int) -> bool:
    given = lanes(21, (2, 3, 4)[:world])
    for _ in range(3):
        dispatcher.dispatch(given.hidden[rank], given.routing(rank, after(dispatcher)))
    return torch.equal(step(dispatcher, rank, given), given.expected(rank))


def _stale(dispatcher: PeerDispatcher, rank: int, world: int) -> bool:
    given = lanes(22, (1, 1, 1)[:world])
    arrived = [
        dispatcher.dispatch(given.hidden[rank], given.routing(rank, after(dispatcher))) for _ in range(3)
    ]
    try:
        dispatcher.combine(compute(arrived[0].batch, rank), arrived[0].ticket)
    except ValueError as error:
        return "has the buffers of step" in str(error)
    return False


def _random_sizes(dispatcher: PeerDispatcher, rank: int, world: int) -> bool:
    random = torch.Generator().manual_seed(5)
    well = True
    for seed in range(30):
        rows = torch.randint(0, LANE_ROWS + 1 if seed % 2 else 5, (world,), generator=random).tolist()
        given = lanes(100 + seed, tuple(rows))
        if (seed + rank) % 5 == 0:
            time.sleep(0.003)  # out of step with the others
        well &= torch.equal(step(dispatcher, rank, given), given.expected(rank))
    return well


def one_is_late(rank: int, world: int, late_rank: int) -> dict[str, Any]:
    """Steps in which one rank comes too late; what each rank saw."""
    dispatcher = PeerDispatcher(spec(rank, world, PATIENCE), Grouping.RAGGED, group())
    first, second, third = (lanes(seed, (3,) * world) for seed in (31, 32, 33))
    whole = torch.equal(step(dispatcher, rank, first), first.expected(rank))
    barrier()
    if rank == late_rank:
        time.sleep(DELAY)
    began = time.monotonic()
    answer = step(dispatcher, rank, second)
    took = time.monotonic() - began
    named, again = dispatcher.late(), dispatcher.late()
    began = time.monotonic()
    after = step(dispatcher, rank, third)
    gone = tuple(other for other in range(world) if other != rank) if rank == late_rank else (late_rank,)
    return {
        "whole": whole,
        "took": took,
        "named": named,
        "again": again,
        "answer": torch.equal(answer, second.expected(rank, gone)),
        "after": torch.equal(after, third.expected(rank, gone)),
        "then": time.monotonic() - began,
    }


def one_is_excluded(rank: int, world: int, dead_rank: int) -> tuple[bool, bool, float] | None:
    """A rank that never comes, and is known not to: right answers, nobody named, seconds."""
    dispatcher = PeerDispatcher(spec(rank, world, PATIENCE), Grouping.RAGGED, group())
    given = lanes(41, (3,) * world)
    barrier()
    if rank == dead_rank:
        return None
    dispatcher.exclude((dead_rank,))
    began = time.monotonic()
    answers = [step(dispatcher, rank, given) for _ in range(4)]
    took = time.monotonic() - began
    well = all(torch.equal(answer, given.expected(rank, (dead_rank,))) for answer in answers)
    return well, dispatcher.late() == (), took


def number_after_seven(rank: int, world: int, number: int) -> str:
    """What a dispatcher says to a step of `number` after step 7: the refusal, or "taken"."""
    dispatcher, given = PeerDispatcher(spec(rank, world), Grouping.RAGGED, group()), lanes(3, (2,) * world)
    step(dispatcher, rank, given, 7)
    try:
        answer = step(dispatcher, rank, given, number)
    except ValueError as error:
        return str(error)
    return "taken" if torch.equal(answer, given.expected(rank)) else "wrong"


def two_streams(rank: int, world: int) -> list[bool]:
    """Steps of two dispatchers, on streams of their own and as large as the GPU: whether all answers are
    right.

    Each stream waits for nothing but what dispatchers make it wait for.
    """
    wide = replace(spec(rank, world, PATIENCE), device="cuda", lane_rows=2048)
    both = [PeerDispatcher(wide, grouping, group()) for grouping in (Grouping.PADDED, Grouping.RAGGED)]
    given = [lanes(seed, (2048, 1500)[:world]) for seed in (51, 52)]
    here = [
        Lanes(*([tensor.cuda() for tensor in each] for each in (one.hidden, one.slots, one.weights)))
        for one in given
    ]
    streams = [torch.cuda.Stream() for _ in both]
    torch.cuda.synchronize()
    answers = []
    for number in range(1, 21):
        arrived = []
        for stream, dispatcher, one in zip(streams, both, here, strict=True):
            with torch.cuda.stream(stream):
                arrived.append(dispatcher.dispatch(one.hidden[rank], one.routing(rank, number)))
        for stream, dispatcher, came in zip(streams, both, arrived, strict=True):
            with torch.cuda.stream(stream):
                answers.append(dispatcher.combine(doubled(came.batch), came.ticket))
    torch.cuda.synchronize()
    assert all(dispatcher.late() == () for dispatcher in both)
    wanted = [_doubled_answer(one, rank) for one in given]
    return [torch.equal(answer.cpu(), wanted[at % 2]) for at, answer in enumerate(answers)]


def doubled(batch: ExpertBatch) -> Tensor:
    """Every slot multiplies by 2, on the batch's own device and without a look at its counts."""
    return batch.tokens.dequantize() * 2


def _doubled_answer(given: Lanes, rank: int) -> Tensor:
    here = torch.where(given.slots[rank] >= 0, given.weights[rank].nan_to_num(), 0.0)
    return given.hidden[rank] * 2 * here.sum(dim=1, keepdim=True)
