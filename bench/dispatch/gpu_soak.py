"""Steps of random sizes and routings over one dispatcher without a wrong byte, and one member that comes too
late.

    torchrun --nproc-per-node 2 -m bench.dispatch.gpu_soak [--dispatcher nvlink_ll] [--steps 10000] [--record]
    torchrun --nproc-per-node 2 -m bench.dispatch.gpu_soak --members 1x1 [--room 12x4]    # or both,lane
    torchrun --nproc-per-node 3 -m bench.dispatch.gpu_soak --device cpu --members 2x1     # the CPU twin
    compute-sanitizer --tool racecheck --target-processes all torchrun --nproc-per-node 2 \
        -m bench.dispatch.gpu_soak --watched --steps 40

Members are ranks, or lanes x owners, or roles one by one. Every byte of every answer is known (exact_steps).
Lanes are absent at random, for one step or for many on end: a member that is no owner then does not call, and
comes back whenever the others have got to. Numbers of steps jump. Up to two steps are under way at a time
where the dispatcher allows it; choices are missing, or all rows go to one expert. Afterwards one member waits
2 s before a step, and those that wait for it must name it. Prints wrong rows; by how much device memory, host
memory, open files and threads have grown; and who was named. A tool that watches every access makes all
members late: --watched has them wait for minutes, meet over gloo, and leaves out the late one.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import time
from collections import deque
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from bench.dispatch.exact_steps import compute, held_by, lane_rows, members_named, wrong_rows
from bench.lib.record import Result, write
from moeserve.dispatch.backends import DISPATCHERS
from moeserve.dispatch.dispatcher import Dispatched, Dispatcher, DispatchSpec
from moeserve.dispatch.peers.sequence import LAST
from moeserve.dispatch.routing import Routing
from moeserve.quant.formats import format_named

DELAY = 2.0
PATIENCE = 0.5
WATCHED_PATIENCE = 120.0
CHECK_EVERY = 50  # steps between looks at the count of wrong rows

ABSENT, AWAY = 0.25, 0.005
"""How likely a lane is absent from a step, and from then on for up to AWAY_STEPS steps."""

AWAY_STEPS = 60

FAR = LAST // 40
"""The longest jump of a number: in some thousand steps sequence numbers go round."""


@dataclass(frozen=True)
class Planned:
    """One step, known to all members."""

    seed: int
    number: int
    rows: tuple[int, ...]  # by lane


class Plan:
    """Random steps: the same on every member that asks for all of them."""

    def __init__(self, spec: DispatchSpec) -> None:
        self._spec, self._random = spec, random.Random(0)
        self._back = [0] * spec.members.max_lanes  # from which step on each lane is there again
        self._number = 0

    def step(self, seed: int, *, alone: bool) -> Planned:
        """The next step. Steps under way together have numbers of different parity; `alone` it has any."""
        jump = 1
        if self._random.random() < 0.3:
            jump = self._random.choice((2, 3, self._random.randint(4, FAR)))
        self._number += jump if alone else jump | 1
        most = 4 if self._random.random() < 0.5 else self._spec.lane_rows
        rows = tuple(self._rows(seed, lane, most) for lane in range(len(self._back)))
        return Planned(seed, self._number, rows)

    def _rows(self, seed: int, lane: int, most: int) -> int:
        if self._random.random() < AWAY:
            self._back[lane] = seed + self._random.randint(2, AWAY_STEPS)
        here = self._spec.members.seat_of_lane[lane] is not None and self._back[lane] <= seed
        count = self._random.randint(1, most)
        return count if self._random.random() >= ABSENT and here else 0


class Steps:
    """Random steps of one dispatcher, up to `in_flight` of them under way."""

    def __init__(self, dispatcher: Dispatcher, spec: DispatchSpec, in_flight: int) -> None:
        self._dispatcher, self._spec, self._in_flight = dispatcher, spec, in_flight
        self._plan = Plan(spec)
        self._open: deque[tuple[Tensor, Routing, Dispatched] | None] = deque()
        self.wrong = torch.zeros((), dtype=torch.int64, device=spec.device)
        self.absent = 0
        """Steps of others that this member took no part in."""

    def run(self, seed: int) -> None:
        """Dispatches one step, and combines the oldest when enough are under way."""
        step = self._plan.step(seed, alone=not self._open)
        if self._spec.seat in self._spec.members.in_step(step.rows):
            hidden, routing = lane_rows(self._spec, seed, step.rows, step.number)
            self._open.append((hidden, routing, self._dispatcher.dispatch(hidden, routing)))
        else:
            self._open.append(None)
            self.absent += any(step.rows)
        if len(self._open) >= 1 + seed % self._in_flight:
            self.drain(1)

    def drain(self, steps: int | None = None) -> None:
        """Combines and checks the oldest `steps`, or all."""
        for _ in range(len(self._open) if steps is None else steps):
            if (under_way := self._open.popleft()) is None:
                continue
            hidden, routing, arrived = under_way
            answer = self._dispatcher.combine(compute(self._spec, arrived.batch), arrived.ticket)
            self.wrong += wrong_rows(self._spec, hidden, routing, answer)


@dataclass(frozen=True)
class Held:
    """What this process holds."""

    device: float  # MiB of the device in use; 0 on a CPU
    host: float  # MiB
    files: int
    threads: int

    @classmethod
    def now(cls, device: str) -> Held:
        """What it holds at this moment, caches emptied."""
        gc.collect()
        used = 0.0
        if device != "cpu":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            free, total = torch.cuda.mem_get_info()
            used = (total - free) / 2**20
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        files, threads = (len(os.listdir(f"/proc/self/{kind}")) for kind in ("fd", "task"))
        return cls(used, pages * os.sysconf("SC_PAGE_SIZE") / 2**20, files, threads)

    def since(self, before: Held) -> Held:
        """How much more it is than `before`."""
        pairs = zip(astuple(self), astuple(before), strict=True)
        return Held(*(now - then for now, then in pairs))


@dataclass(frozen=True)
class Soaked:
    """What came of the steps."""

    wrong: int  # rows of all members
    grown: Held  # of this member
    rate: float  # steps a second
    absent: int  # steps of others that this member took no part in
    late: tuple[int, ...]


def soak(spec: DispatchSpec, name: str, steps: int, group: ProcessGroup) -> Soaked:
    """So many steps over the dispatcher `name`. Collective over `group`."""
    entry = DISPATCHERS[name]
    dispatcher = entry.build(spec, group)
    running = Steps(dispatcher, spec, entry.in_flight)
    warm = min(200, steps // 4)
    before, began = Held.now(spec.device), time.monotonic()
    for seed in range(steps):
        if seed == warm:
            before, began = Held.now(spec.device), time.monotonic()
        running.run(seed)
        if seed % CHECK_EVERY == 0 and int(running.wrong):
            sys.exit(f"seat {spec.seat}: {int(running.wrong)} wrong rows by step {seed}")
    running.drain()
    wrong = running.wrong.clone()
    dist.all_reduce(wrong, group=group)
    rate = (steps - warm) / (time.monotonic() - began)
    grown = Held.now(spec.device).since(before)
    late = dispatcher.late()
    dist.barrier(group=group)
    dispatcher.close()
    return Soaked(int(wrong), grown, rate, running.absent, late)


def lateness(spec: DispatchSpec, name: str) -> tuple[bool, float]:
    """Whether all that wait for the second member name it when it comes 2 s late, and the longest that a step
    took there.
    """
    dispatcher = DISPATCHERS[name].build(replace(spec, patience=PATIENCE), dist.group.WORLD)
    present = spec.members.seat_of_lane
    rows = tuple(0 if seat is None else spec.lane_rows for seat in present)
    late = spec.members.present[1]
    for number in (1, 2):
        hidden, routing = lane_rows(spec, number, rows, number)
        if spec.device != "cpu":
            torch.cuda.synchronize()
        dist.barrier()
        if number == 2 and spec.member == late:
            time.sleep(DELAY)
        began = time.monotonic()
        arrived = dispatcher.dispatch(hidden, routing)
        dispatcher.combine(compute(spec, arrived.batch), arrived.ticket)
        if spec.device != "cpu":
            torch.cuda.synchronize()
    took = time.monotonic() - began
    named = dispatcher.late()
    print(f"seat {spec.seat}: the step took {took:.3f} s and names {list(named)} late", flush=True)
    seen: list[tuple[int, ...]] = [()] * spec.ranks
    times = [0.0] * spec.ranks
    dist.all_gather_object(seen, named)
    dist.all_gather_object(times, took)
    dispatcher.close()
    waiting = [
        position
        for position, member in enumerate(spec.members.present)
        if member != late and (late.owner is not None or member.owner is not None)
    ]
    return all(late.seat in seen[at] for at in waiting), max(times[at] for at in waiting)


def spec_for(args: argparse.Namespace, rank: int, world: int) -> DispatchSpec:
    """What the dispatcher of the member at position `rank` is built for."""
    members = members_named(args.members, world, args.room)
    member = members.present[rank]
    return DispatchSpec(
        members=members,
        seat=member.seat,
        slots=args.slots,
        hidden=args.hidden,
        top_k=4,
        lane_rows=args.lane_rows,
        dtype=torch.bfloat16,
        wire=format_named(args.wire),
        device=args.device,
        patience=WATCHED_PATIENCE if args.watched else 30.0,
        held=None if member.owner is None else held_by(members, member.owner, args.slots),
    )


def parsed(given: list[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dispatcher", default="nvlink_ll")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--members", default="", help="1x2: lanes x owners; or both,lane,owner; else ranks")
    parser.add_argument("--room", default="", help="lanes x owners that there is room for, as 12x4")
    parser.add_argument("--steps", type=int, default=10000)
    parser.add_argument("--slots", type=int, default=8, help="of an owner's place")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--lane-rows", type=int, default=64)
    parser.add_argument("--wire", default="bf16")
    parser.add_argument("--watched", action="store_true", help="by compute-sanitizer: steps alone")
    parser.add_argument("--record", action="store_true")
    return parser.parse_args(given)


def joined(args: argparse.Namespace) -> None:
    """Puts this process into the default group of its launch."""
    os.environ["NCCL_NVLS_ENABLE"] = "0"  # NVLink multicast stays off
    if args.device == "cpu":
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        return
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    if args.watched:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("nccl", device_id=torch.device("cuda", local))


def main() -> None:
    """Soaks, delays, prints, and fails on a wrong row or a late member that nobody names."""
    args = parsed()
    joined(args)
    spec = spec_for(args, dist.get_rank(), dist.get_world_size())
    group = dist.group.WORLD
    assert group is not None, "the default group is there"
    found = soak(spec, args.dispatcher, args.steps, group)
    said = f"seat {spec.seat}: {args.steps} steps of {args.dispatcher}, absent from {found.absent}"
    well = not found.wrong and not found.late
    verdict = "ok  " if well else "FAIL"  # written at once, so that two members' lines do not mix
    sys.stdout.write(f"{verdict} {said} {found.wrong} wrong rows, late {list(found.late)}\n")
    sys.stdout.flush()
    if args.watched:
        sys.exit(0 if well else 1)
    grown = most_grown(found.grown)
    named, longest = lateness(spec, args.dispatcher)
    if spec.rank == 0:
        who = f"members {args.members}" if args.members else f"{spec.ranks} ranks"
        room = f" in {args.room}" if args.room else ""
        head = f"{args.dispatcher}, {args.steps} steps, {who}{room} on {args.device}"
        print(f"{head}: {found.wrong} wrong rows, {found.rate:.0f} steps/s; at most grown: {grown}")
        print(f"second member {DELAY:g} s late, patience {PATIENCE:g} s: named {named}, {longest:.3f} s")
        if args.record:
            write(results(head, (found.wrong, longest), grown))
    dist.destroy_process_group()
    if not well or not named:
        sys.exit(1)


def most_grown(mine: Held) -> Held:
    """The most that any member grew by, of each thing. Collective."""
    every: list[tuple[float, ...]] = [()] * dist.get_world_size()
    dist.all_gather_object(every, astuple(mine))
    return Held(*map(max, zip(*every, strict=True)))


def results(head: str, seen: tuple[float, float], grown: Held) -> list[Result]:
    """What is kept: wrong rows and the longest step with a late member in `seen`, and growth."""
    wrong, longest = seen
    memory = grown.host if head.endswith("cpu") else grown.device
    return [
        Result("gpu_soak", f"{head}, wrong rows", wrong, "rows", "lower", 0.0),
        Result("gpu_soak", f"{head}, memory growth", memory, "MiB", "lower", 0.0),
        Result("gpu_soak", f"{head}, host memory growth", grown.host, "MiB", "lower"),
        Result(
            "gpu_soak", f"{head}, more open files and threads", grown.files + grown.threads, "", "lower", 0.0
        ),
        Result("gpu_soak", f"{head}, step with a late rank", longest, "s", "lower", 1.0),
    ]


if __name__ == "__main__":
    main()
