"""Steps of random sizes and routings over one dispatcher without a wrong byte, and one rank that comes too
late.

    torchrun --nproc-per-node 2 -m bench.dispatch.gpu_soak [--dispatcher nvlink_ll] [--steps 10000] [--record]
    torchrun --nproc-per-node 4 -m bench.dispatch.gpu_soak --device cpu --steps 2000     # the CPU twin
    compute-sanitizer --tool racecheck --target-processes all torchrun --nproc-per-node 2 \
        -m bench.dispatch.gpu_soak --watched --steps 40

Rows hold small integers, weights and experts multiply by small integers, so that sums are exact in any order
and every byte of every answer is known. Up to two steps are under way at a time where the dispatcher allows
it; lanes may be empty, choices missing, all rows for one expert. Afterwards one rank waits 2 s before a step,
and the others must name it. Prints wrong rows, memory at the start and at the end, and who was named. A tool
that watches every access makes all ranks late: --watched has them wait for minutes, meet over gloo, and
leaves out the late one.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import deque
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from bench.lib.record import Result, write
from moeserve.dispatch.backends import DISPATCHERS
from moeserve.dispatch.dispatcher import Dispatched, Dispatcher, DispatchSpec
from moeserve.dispatch.routing import Routing
from moeserve.experts.batch import ExpertBatch
from moeserve.experts.placement import EMPTY
from moeserve.quant.formats import format_named

DELAY = 2.0
PATIENCE = 0.5
WATCHED_PATIENCE = 120.0
CHECK_EVERY = 50  # steps between looks at the count of wrong rows
LARGEST = 4


def lane(spec: DispatchSpec, seed: int, rows: tuple[int, ...]) -> tuple[Tensor, Routing]:
    """This rank's rows of step `seed`: integers within +-4, their slots and weights."""
    random = torch.Generator(spec.device).manual_seed(seed * 64 + spec.rank)
    own = rows[spec.rank]
    hidden = torch.randint(-LARGEST, LARGEST + 1, (own, spec.hidden), generator=random, device=spec.device)
    slots = spec.slots * spec.ranks
    order = torch.rand((own, slots), generator=random, device=spec.device).argsort(dim=1)[:, : spec.top_k]
    if seed % 7 == 3:
        order = order[:1].expand(own, -1)  # one set of experts for all rows
    none = torch.rand(order.shape, generator=random, device=spec.device) < (0.3 if seed % 3 else 0.0)
    weights = torch.randint(1, 4, order.shape, generator=random, device=spec.device).float()
    return hidden.to(spec.dtype), Routing(torch.where(none, EMPTY, order.int()), weights, rows)


def factors(slots: Tensor) -> Tensor:
    """What each slot multiplies by: 1, 2 or 3."""
    return 1 + slots % 3


def compute(spec: DispatchSpec, batch: ExpertBatch) -> Tensor:
    """This rank's experts, without a look at the counts."""
    first = spec.rank * spec.slots
    rows = batch.tokens.dequantize()
    mine = factors(torch.arange(first, first + spec.slots, device=rows.device)).float()
    if rows.dim() == 3:
        return (rows * mine[:, None, None]).to(spec.dtype)
    slot = torch.searchsorted(
        batch.offsets[1:].contiguous(), torch.arange(len(rows), device=rows.device), right=True
    )
    return (rows * mine[slot.clamp(max=spec.slots - 1)][:, None]).to(spec.dtype)


def wrong_rows(spec: DispatchSpec, hidden: Tensor, routing: Routing, answer: Tensor) -> Tensor:
    """How many rows of `answer` are not what they must be: a scalar on the device."""
    weighted = torch.where(routing.slots >= 0, routing.weights * factors(routing.slots), 0.0)
    partials = torch.zeros_like(hidden, dtype=torch.float32)
    for rank in range(spec.ranks):  # each rank's sum travels in the hidden dtype
        here = routing.slots // spec.slots == rank
        partials += (hidden.float() * torch.where(here, weighted, 0.0).sum(dim=1, keepdim=True)).to(
            spec.dtype
        )
    return (answer.float() != partials.to(spec.dtype).float()).any(dim=1).sum()


class Steps:
    """Random steps of one dispatcher, up to `in_flight` of them under way."""

    def __init__(self, dispatcher: Dispatcher, spec: DispatchSpec, in_flight: int) -> None:
        self._dispatcher, self._spec, self._in_flight = dispatcher, spec, in_flight
        self._sizes = torch.Generator().manual_seed(0)
        self._open: deque[tuple[Tensor, Routing, Dispatched]] = deque()
        self.wrong = torch.zeros((), dtype=torch.int64, device=spec.device)

    def run(self, seed: int) -> None:
        """Dispatches one step, and combines the oldest when enough are under way."""
        most = self._spec.lane_rows
        rows = torch.randint(0, most + 1, (self._spec.ranks,), generator=self._sizes)
        idle = torch.rand(self._spec.ranks, generator=self._sizes) < 0.2
        small = torch.rand(1, generator=self._sizes) < 0.5
        rows = torch.where(idle, 0, rows % 5 if small else rows)
        hidden, routing = lane(self._spec, seed, tuple(rows.tolist()))
        self._open.append((hidden, routing, self._dispatcher.dispatch(hidden, routing)))
        if len(self._open) >= 1 + seed % self._in_flight:
            self.drain(1)

    def drain(self, steps: int | None = None) -> None:
        """Combines and checks the oldest `steps`, or all."""
        for _ in range(len(self._open) if steps is None else steps):
            hidden, routing, arrived = self._open.popleft()
            answer = self._dispatcher.combine(compute(self._spec, arrived.batch), arrived.ticket)
            self.wrong += wrong_rows(self._spec, hidden, routing, answer)


def memory(spec: DispatchSpec) -> float:
    """MiB of the device in use, or of this process on the CPU."""
    if spec.device == "cpu":
        with open("/proc/self/statm") as numbers:
            return int(numbers.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**20


def soak(spec: DispatchSpec, name: str, steps: int) -> tuple[int, float, float]:
    """Wrong rows of all ranks, MiB that this rank grew by, and steps a second."""
    entry = DISPATCHERS[name]
    dispatcher = entry.build(spec)
    running = Steps(dispatcher, spec, entry.in_flight)
    warm = min(200, steps // 4)
    began = before = 0.0
    for seed in range(steps):
        if seed == warm:
            before, began = memory(spec), time.monotonic()
        running.run(seed)
        if seed % CHECK_EVERY == 0 and int(running.wrong):
            sys.exit(f"rank {spec.rank}: {int(running.wrong)} wrong rows by step {seed}")
    running.drain()
    wrong = running.wrong.clone()
    dist.all_reduce(wrong)
    rate = (steps - warm) / (time.monotonic() - began)
    grown = memory(spec) - before
    if late := dispatcher.late():
        sys.exit(f"rank {spec.rank}: ranks {list(late)} were late")
    dist.barrier()
    dispatcher.close()
    return int(wrong), grown, rate


def lateness(spec: DispatchSpec, name: str) -> tuple[bool, float]:
    """Whether all others name rank 1 when it comes 2 s late, and the longest that a step took there."""
    dispatcher = DISPATCHERS[name].build(replace(spec, patience=PATIENCE))
    rows = (spec.lane_rows,) * spec.ranks
    running = Steps(dispatcher, spec, 1)
    running.run(0)
    hidden, routing = lane(spec, 1, rows)
    if spec.device != "cpu":
        torch.cuda.synchronize()
    dist.barrier()
    if spec.rank == 1:
        time.sleep(DELAY)
    began = time.monotonic()
    arrived = dispatcher.dispatch(hidden, routing)
    dispatcher.combine(compute(spec, arrived.batch), arrived.ticket)
    if spec.device != "cpu":
        torch.cuda.synchronize()
    took = time.monotonic() - began
    named = dispatcher.late()
    print(f"rank {spec.rank}: the step took {took:.3f} s and names {list(named)} late", flush=True)
    seen: list[tuple[int, ...]] = [()] * spec.ranks
    times = [0.0] * spec.ranks
    dist.all_gather_object(seen, named)
    dist.all_gather_object(times, took)
    dispatcher.close()
    others = [rank for rank in range(spec.ranks) if rank != 1]
    return all(1 in seen[rank] for rank in others), max(times[rank] for rank in others)


def main() -> None:
    """Soaks, delays, prints from rank 0, and fails on a wrong row or a late rank that nobody names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dispatcher", default="nvlink_ll")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--steps", type=int, default=10000)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--lane-rows", type=int, default=64)
    parser.add_argument("--wire", default="bf16")
    parser.add_argument("--watched", action="store_true", help="by compute-sanitizer: steps alone")
    parser.add_argument("--record", action="store_true")
    args = parser.parse_args()
    os.environ["NCCL_NVLS_ENABLE"] = "0"  # NVLink multicast stays off
    if args.device == "cuda":
        local = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(local)
        if args.watched:
            dist.init_process_group("gloo")
        else:
            dist.init_process_group("nccl", device_id=torch.device("cuda", local))
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    spec = DispatchSpec(
        rank=dist.get_rank(),
        ranks=dist.get_world_size(),
        slots=8,
        hidden=args.hidden,
        top_k=4,
        lane_rows=args.lane_rows,
        dtype=torch.bfloat16,
        wire=format_named(args.wire),
        device=args.device,
    )
    if args.watched:
        spec = replace(spec, patience=WATCHED_PATIENCE)
    wrong, grown, rate = soak(spec, args.dispatcher, args.steps)
    if args.watched:
        said = f"rank {spec.rank}: {args.steps} steps of {args.dispatcher}, {wrong} wrong rows"
        print("FAIL" if wrong else "ok  ", said, flush=True)
        sys.exit(1 if wrong else 0)
    named, longest = lateness(spec, args.dispatcher)
    if spec.rank == 0:
        head = f"{args.dispatcher}, {args.steps} steps, {spec.ranks} ranks on {args.device}"
        print(f"{head}: {wrong} wrong rows, memory {grown:+.1f} MiB, {rate:.0f} steps/s")
        print(
            f"rank 1 {DELAY:g} s late, patience {PATIENCE:g} s: named by all others {named}, {longest:.3f} s"
        )
        if args.record:
            write(
                [
                    Result("gpu_soak", f"{head}, wrong rows", wrong, "rows", "lower", 0.0),
                    Result("gpu_soak", f"{head}, memory growth", grown, "MiB", "lower", 0.0),
                    Result("gpu_soak", f"{head}, step with a late rank", longest, "s", "lower", 1.0),
                ]
            )
    dist.destroy_process_group()
    if wrong or not named:
        sys.exit(1)


if __name__ == "__main__":
    main()
