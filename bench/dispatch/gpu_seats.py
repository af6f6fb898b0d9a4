"""A seat that is taken and left under load: nobody compiles, records or allocates for it, or waits long.

    python -m bench.dispatch.gpu_seats [--dispatcher nvlink_ll] [--rounds 200] [--record]     (two GPUs)
    python -m bench.dispatch.gpu_seats --device cpu --rounds 20                               # the CPU twin

Member A, on the first GPU, has a lane and owns all experts. It steps without a pause, by launches and by
replays of one CUDA graph that was recorded before anybody else was there. Member B, another process on the
second GPU, takes a lane-only seat, brings rows to some steps, and leaves; then it does so again. Every answer
of both is checked byte by byte. Afterwards: programs that A compiled since the first round, growth of the
memory in use on A's device, and how long A's steps without B's rows took while the seat changed hands (with
`admit` and `dismiss` in them) beside those without a change.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from bench.dispatch.exact_steps import compute, lane_rows, wrong_rows
from bench.lib.record import Result, write
from moeserve.device import nvrtc
from moeserve.dispatch.backends import DISPATCHERS
from moeserve.dispatch.dispatcher import DispatchSpec
from moeserve.dispatch.members import Member, Members
from moeserve.dispatch.peers.dispatcher import PeerDispatcher
from moeserve.dispatch.routing import Routing
from moeserve.quant.formats import format_named

A, B = Member(0, lane=0, owner=0), Member(1, lane=1)
LANES, OWNERS = 4, 2
"""Seats that there is room for."""

ROWS_A, ROWS_B = 24, 16
SHARED, APART = 6, 12
"""Steps that B brings rows to while it is seated, and steps of A between two rounds."""

ANSWER = 60.0
"""Seconds that B may take to answer."""

LONGER = 20.0
"""Milliseconds that a step of A may take beyond the usual ones' longest while the seat changes hands."""


def spec_for(members: Members, member: Member, args: argparse.Namespace) -> DispatchSpec:
    """What a member's dispatcher is built for."""
    return DispatchSpec(
        members=members,
        seat=member.seat,
        slots=8,
        hidden=args.hidden,
        top_k=4,
        lane_rows=32,
        dtype=torch.bfloat16,
        wire=format_named("bf16"),
        device=args.device,
        patience=10.0,
        held=None if member.owner is None else 8,
    )


def rows_of(mine: int, other: int) -> tuple[int, ...]:
    """Rows of all lanes."""
    return (mine, other, *(0 for _ in range(LANES - 2)))


@dataclass
class Holder:
    """Member A: its steps, what they took, and how many rows were wrong."""

    dispatcher: PeerDispatcher
    spec: DispatchSpec
    number: int = 0
    wrong: int = 0
    milliseconds: list[float] = field(default_factory=list)
    _last: float = 0.0
    _replay: Callable[[], None] | None = None

    def record(self) -> None:
        """Records one step of both lanes in a CUDA graph; nobody else is there yet."""
        self.alone()
        if self.spec.device == "cpu":
            return
        self._kept = lane_rows(self.spec, 1, rows_of(ROWS_A, ROWS_B), self.number + 1)
        hidden, routing = self._kept
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            arrived = self.dispatcher.dispatch(hidden, routing)
            self._answer = self.dispatcher.combine(compute(self.spec, arrived.batch), arrived.ticket)
        self._replay = graph.replay

    def alone(self, *, replayed: bool = False) -> None:
        """One step that B does not bring rows to, and how long it took since the last ended."""
        self.number += 1 + self.number % 3
        if replayed and self._replay:
            self.dispatcher.expect(self.number, (1,))
            self._replay()
            self._check(*self._kept, self._answer)
        else:
            self._launched(rows_of(1 + self.number % ROWS_A, 0))
        now = time.perf_counter()
        self.milliseconds.append((now - self._last) * 1e3)
        self._last = now

    def shared(self, tell: Callable[[Any], None], *, replayed: bool) -> None:
        """One step of both lanes, which B is told of."""
        self.number += 1
        rows = rows_of(ROWS_A, ROWS_B)
        tell((self.number, rows))
        if replayed and self._replay:
            self.dispatcher.expect(self.number)
            self._replay()
            self._check(*self._kept, self._answer)
        else:
            self._launched(rows)
        self._last = time.perf_counter()

    def _launched(self, rows: tuple[int, ...]) -> None:
        hidden, routing = lane_rows(self.spec, self.number % 1000, rows, self.number)
        arrived = self.dispatcher.dispatch(hidden, routing)
        answer = self.dispatcher.combine(compute(self.spec, arrived.batch), arrived.ticket)
        self._check(hidden, routing, answer)

    def _check(self, hidden: Tensor, routing: Routing, answer: Tensor) -> None:
        """Counts wrong rows, and so waits for the device."""
        self.wrong += int(wrong_rows(self.spec, hidden, routing, answer))

    def taken(self) -> list[float]:
        """Milliseconds of the steps since this was last asked."""
        found, self.milliseconds = self.milliseconds, []
        return found


@dataclass(frozen=True)
class Seats:
    """What came of the rounds."""

    wrong: int  # rows of A and B
    late: tuple[int, ...]
    compiled: int  # programs of A since the first round
    grown: float  # MiB in use on A's device, since the first round
    changing: list[float]  # milliseconds of A's own steps while the seat changed hands
    usual: list[float]  # and of those while it did not


def take_and_leave(args: argparse.Namespace) -> Seats:
    """Member A through all rounds; B is a process that ends with them."""
    grouping = DISPATCHERS[args.dispatcher].grouping
    if args.device == "cuda":
        torch.cuda.set_device(0)
    spec = spec_for(Members((A,), LANES, OWNERS), A, args)
    dispatcher = PeerDispatcher.seated(spec, grouping, ())
    holder = Holder(dispatcher, spec)
    holder.record()
    changing: list[float] = []
    usual: list[float] = []
    wrong, loaded, used = 0, 0, 0.0
    with other_process(args) as pipe:
        for number in range(args.rounds):
            wrong += _round(holder, pipe, changing, usual)
            if number == 0:
                loaded, used = programs(), in_use(args.device)
                changing.clear()
                usual.clear()
        fresh, grown = programs() - loaded, in_use(args.device) - used
    found = Seats(holder.wrong + wrong, dispatcher.late(), fresh, grown, changing, usual)
    dispatcher.close()
    return found


def _round(holder: Holder, pipe: Connection, changing: list[float], usual: list[float]) -> int:
    """B takes its seat, brings rows to some steps, and leaves. Wrong rows that B saw."""
    for step in range(APART):
        holder.alone(replayed=step % 2 == 0)
    usual += holder.taken()
    pipe.send(holder.dispatcher.offer())
    holder.dispatcher.admit(_meanwhile(holder, pipe))
    _some(holder)
    changing += holder.taken()
    for step in range(SHARED):
        holder.shared(pipe.send, replayed=step % 2 == 0)
        holder.alone(replayed=step % 3 == 0)
    usual += holder.taken()[1:]
    pipe.send(None)
    wrong = int(_meanwhile(holder, pipe))
    holder.dispatcher.dismiss(B.seat)
    pipe.send("dismissed")
    _meanwhile(holder, pipe)  # B has closed its dispatcher: its seat is free
    _some(holder)
    changing += holder.taken()
    return wrong


def _some(holder: Holder) -> None:
    for step in range(4):
        holder.alone(replayed=step % 2 == 0)


def _meanwhile(holder: Holder, pipe: Connection) -> Any:
    """What B says; A steps until then. Raises RuntimeError when B says nothing for ANSWER seconds."""
    deadline = time.monotonic() + ANSWER
    while not pipe.poll():
        if time.monotonic() > deadline:
            raise RuntimeError(f"seat {B.seat} has not answered for {ANSWER:g} s")
        holder.alone(replayed=holder.number % 2 == 0)
    return pipe.recv()


def come_and_go(pipe: Connection, args: argparse.Namespace) -> None:
    """Member B, until the other end of `pipe` closes."""
    torch.set_num_threads(1)
    if args.device == "cuda":
        torch.cuda.set_device(1)
    spec = spec_for(Members((A, B), LANES, OWNERS), B, args)
    grouping = DISPATCHERS[args.dispatcher].grouping
    while True:
        try:
            offer = pipe.recv()
        except EOFError:
            return
        dispatcher, wrong = PeerDispatcher.seated(spec, grouping, (offer,)), 0
        pipe.send(dispatcher.offer())
        while (told := pipe.recv()) is not None:
            number, rows = told
            hidden, routing = lane_rows(spec, number % 1000, rows, number)
            arrived = dispatcher.dispatch(hidden, routing)
            answer = dispatcher.combine(compute(spec, arrived.batch), arrived.ticket)
            wrong += int(wrong_rows(replace(spec, held=None), hidden, routing, answer))
        if late := dispatcher.late():
            raise RuntimeError(f"seats {list(late)} were late")
        pipe.send(wrong)
        pipe.recv()  # dismissed: A stores nothing here any more
        dispatcher.close()
        pipe.send("closed")


@contextmanager
def other_process(args: argparse.Namespace) -> Iterator[Connection]:
    """B's process, and a pipe to it; it ends with the block."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=come_and_go, args=(there, args), daemon=True)
    process.start()
    there.close()
    try:
        yield here
    finally:
        here.close()
        process.join(5.0)
        if process.is_alive():
            process.kill()
            process.join()


def programs() -> int:
    """How many programs of CUDA text this process has compiled and loaded."""
    return int(nvrtc._module.cache_info().misses)


def in_use(device: str) -> float:
    """MiB in use on the first GPU; 0 on a CPU."""
    if device == "cpu":
        return 0.0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(0)
    return (total - free) / 2**20


def spread(times: list[float]) -> tuple[float, float, float]:
    """The median, the 99th percentile and the longest."""
    ordered = sorted(times)
    return ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.99)], ordered[-1]


def parsed(given: list[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dispatcher", default="nvlink_ll", choices=["nvlink_ll", "nvlink_ht"])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--record", action="store_true")
    return parser.parse_args(given)


def main() -> None:
    """Prints what it saw, and fails where a row was wrong or the seat cost anything."""
    args = parsed()
    if args.device == "cuda" and torch.cuda.device_count() < 2:
        sys.exit("this needs two GPUs of one host")
    found = take_and_leave(args)
    head = f"{args.dispatcher}, a seat taken and left {args.rounds} times on {args.device}"
    print(
        f"{head}: {found.wrong} wrong rows, late {list(found.late)}, {found.compiled} programs compiled, "
        f"{found.grown:+.1f} MiB in use"
    )
    times = {"changing hands": spread(found.changing), "usual": spread(found.usual)}
    for name, (median, most, longest) in times.items():
        print(f"A's steps, {name}: p50 {median:.3f}, p99 {most:.3f}, longest {longest:.3f} ms")
    longest, bound = times["changing hands"][2], times["usual"][2] + LONGER
    if args.record:
        peers = {"usual, longest": times["usual"][2], "p99": times["changing hands"][1]}
        write(
            [
                Result("gpu_seats", f"{head}, wrong rows", found.wrong, "rows", "lower", 0.0),
                Result("gpu_seats", f"{head}, programs compiled", found.compiled, "", "lower", 0.0),
                Result("gpu_seats", f"{head}, memory growth", found.grown, "MiB", "lower", 0.0),
                Result("gpu_seats", f"{head}, longest step", longest, "ms", "lower", bound, peers),
            ]
        )
    if found.wrong or found.late or found.compiled or found.grown > 0 or longest > bound:
        sys.exit(1)


if __name__ == "__main__":
    main()
