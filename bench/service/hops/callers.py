"""`Callers`: threads that call a service, in processes of their own: few share an interpreter."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from bench.service.hops.sizes import Sizes
from moeserve.proto.client import Choice, MoeClient, Patience
from moeserve.proto.errors import MoeError
from moeserve.proto.heap import keep_freed_memory
from moeserve.proto.host import usable_cores
from moeserve.proto.passes.attached import AttachedLane, Wanted
from moeserve.proto.passes.lane_client import LaneClient
from moeserve.proto.tensors import as_torch
from moeserve.runtime.doors.passes.looking import COMPANY_SECONDS

KINDS = ("placed", "plain", "inline", "inline any lane", "lane placed", "lane", "pass placed", "pass")
PASS_STEPS = 40  # of a standing pass, about, before it begins again
WARM_UP_CALLS = 12
START_SECONDS = 0.3  # from the order to the first call, so that all begin together
MOST_KEPT = 512  # answers of a caller, of which a few rows wait to be compared
LARGEST_ERROR = 2e-2  # of a row against the same call's first answer; steps of other rows sum otherwise


@dataclass(frozen=True)
class Load:
    """What every caller does: `kind` is one of KINDS; layers are called in turn."""

    kind: str
    rows: int
    layers: int = 1
    lanes: int = 1  # callers are spread over so many
    seconds: float = 5.0
    most_calls: int = 1 << 30
    begin: float = 0.0  # time.monotonic() seconds
    beside: int = 0  # other callers at the same time


@dataclass(frozen=True)
class Called:
    """What callers saw: seconds of each call, how many answers were wrong, and what failed."""

    seconds: list[float] = field(default_factory=list)
    wrong: int = 0
    failed: list[str] = field(default_factory=list)
    lasted: float = 0.0
    each: list[int] = field(default_factory=list)  # calls of each caller

    def plus(self, other: Called) -> Called:
        """Both together."""
        return Called(
            self.seconds + other.seconds,
            self.wrong + other.wrong,
            self.failed + other.failed,
            max(self.lasted, other.lasted),
            self.each + other.each,
        )


class Callers:
    """Up to `most` processes that wait for orders; a context. spin: as `Patience` has it."""

    def __init__(self, address: str, sizes: Sizes, most: int, spin: float = 0.0) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(most):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, address, sizes, spin), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, load: Load, callers: int) -> Called:
        """Has so many threads call, spread over the processes, and returns what they saw together."""
        used = self._pipes[: min(callers, len(self._pipes))]
        timed = replace(load, begin=0.0, beside=callers - 1)
        for at, pipe in enumerate(used):
            pipe.send((timed, list(range(at, callers, len(used)))))
        for pipe in used:  # all are warm
            self._answer(pipe)
        begin = time.monotonic() + START_SECONDS
        for pipe in used:
            pipe.send(begin)
        total = Called()
        for pipe in used:
            total = total.plus(self._answer(pipe))
        return total

    def _answer(self, pipe: Connection) -> Called:
        answer = pipe.recv()
        if isinstance(answer, str):
            raise RuntimeError(f"a process of callers failed: {answer}")
        return answer if isinstance(answer, Called) else Called()

    def __enter__(self) -> Callers:
        return self

    def __exit__(self, *ended: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()


MOST_THREADS = 16  # of torch in a process of callers


def copying_threads(callers: int) -> int:
    """Threads of torch in a process of one caller of many rows, whose copies use them: half of the cores over
    all such callers. More would spin for work on all cores, and hold up the ranks too.
    """
    return max(1, min(MOST_THREADS, usable_cores() // (2 * callers)))


COPYING_BYTES = 1 << 20  # of a call's rows, from which its copies are worth them


def _serve(pipe: Connection, address: str, sizes: Sizes, spin: float) -> None:
    keep_freed_memory()
    with (
        MoeClient(address, timeout=Patience(60.0, spin=spin)) as shared,
        MoeClient(address, timeout=60, transport="inline") as inline,
    ):
        while True:
            try:
                load, numbers = pipe.recv()
            except EOFError:
                return
            try:
                client = inline if load.kind.startswith("inline") else shared
                _run(pipe, client, sizes, load, numbers)
            except Exception as error:  # told to whoever gave the order
                pipe.send(f"{type(error).__name__}: {error}")


def _run(pipe: Connection, client: MoeClient, sizes: Sizes, load: Load, numbers: list[int]) -> None:
    many = len(numbers) == 1 and sizes.nbytes(load.rows) >= COPYING_BYTES
    torch.set_num_threads(copying_threads(1 + load.beside) if many else 1)
    with ExitStack() as stack:
        callers = [_Caller(client, sizes, load, number, stack) for number in numbers]
        _all([caller.warm_up for caller in callers])
        pipe.send(None)
        begin = pipe.recv()
        _all([lambda caller=caller: caller.call_until(begin) for caller in callers])  # type: ignore[misc]
        total = Called()
        for caller in callers:
            total = total.plus(caller.called)
    pipe.send(total)  # when all regions are given back


def _all(acts: list[Callable[[], None]]) -> None:
    """Runs each in a thread; raises what one raised."""
    raised: list[BaseException] = []

    def guarded(act: Callable[[], None]) -> None:
        try:
            act()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=guarded, args=(act,)) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]


class _Caller:
    """One thread's calls: always the same rows, whose first answers the others are compared with."""

    def __init__(self, client: MoeClient, sizes: Sizes, load: Load, number: int, stack: ExitStack) -> None:
        self._load, self.called = load, Called()
        hidden, experts, weights = sizes.batch(load.rows, 1000 + number)
        lane = number % load.lanes
        self._probe = torch.tensor(sorted({0, load.rows // 2, load.rows - 1}))
        self._first: dict[int, Tensor] = {}
        self._kept: Tensor | None = None  # rows of answers that are not compared yet
        if load.kind.startswith("lane"):
            self._rest()
            client = stack.enter_context(LaneClient(client.address, lane=lane))
        if load.kind.endswith("placed") and not load.kind.startswith("pass"):
            if isinstance(client, LaneClient):
                placed, answer = client.place(lane, load.rows)
            else:
                placed, answer = (client.allocate(lane, (load.rows, sizes.hidden)) for _ in range(2))
            stack.callback(placed.close)
            stack.callback(answer.close)
            placed.tensor.copy_(hidden)
            there = answer.tensor

            def call(layer: int) -> Tensor:
                client.forward(layer, placed, experts, weights, output=answer)
                return there

        elif load.kind in ("pass placed", "pass"):
            batch = hidden, experts, weights
            call = self._by_pass(client.address, f"{load.rows}-{number}", batch, lane, stack)
        else:
            named = None if load.kind.endswith("any lane") else lane

            def call(layer: int) -> Tensor:
                found = client.forward(layer, hidden, experts, weights, lane=named)
                assert isinstance(found, Tensor)
                return found

        self._call = call

    def _by_pass(
        self,
        address: str,
        named: str,
        batch: tuple[Tensor, Tensor, Tensor],
        lane: int,
        stack: ExitStack,
    ) -> Callable[[int], Tensor]:
        """Calls that are steps of a standing pass; `pass placed`: rows and answers stay where they lie."""
        load = self._load
        name = f"{load.kind.replace(' ', '-')}-{named}"
        self._rest()
        wanted = Wanted(name, rows=load.rows, rank=lane)
        attached = stack.enter_context(AttachedLane.attach(address, wanted))
        order = [at % load.layers for at in range(PASS_STEPS - PASS_STEPS % load.layers)]
        run = stack.enter_context(attached.begin(order, standing=True))
        hidden, route = batch[0], Choice(*batch[1:])
        own = torch.empty_like(hidden)

        def call(layer: int) -> Tensor:
            run.post(0, hidden, route)
            run.take_plain(0, out=own)
            return own

        def placed(layer: int) -> Tensor:
            run.send(0, load.rows)
            found = run.arrived(0)
            return as_torch(found.storage, found.spec)

        if load.kind == "pass":
            return call
        call(0)  # which leaves its rows there
        for layer in range(1, load.layers):
            placed(layer)
        return placed

    def _rest(self) -> None:
        """Waits until calls before count as company no more."""
        if not self._load.beside:
            time.sleep(1.2 * COMPANY_SECONDS)

    def warm_up(self) -> None:
        """Calls every layer some times, and keeps what a few rows come back as."""
        for _ in range(WARM_UP_CALLS):
            for layer in range(self._load.layers):
                answer = self._call(layer)
                if layer not in self._first:
                    self._first[layer] = answer[self._probe].float()
            self._keep(0, answer)

    def call_until(self, begin: float) -> None:
        """Calls one after another from `begin` on; each answer is compared, many at once: a caller is to
        call, and to compare takes as long as a third of a call.
        """
        load, seconds, wrong, failed = self._load, list[float](), 0, list[str]()
        layers = list[int]()  # of the answers that are kept
        time.sleep(max(0.0, begin - time.monotonic()))
        end, at = begin + load.seconds, 0
        while time.monotonic() < end and at < load.most_calls:
            layer, at = at % load.layers, at + 1
            started = time.perf_counter()
            try:
                answer = self._call(layer)
            except MoeError as error:
                failed.append(str(error)[:200])
                continue
            seconds.append(time.perf_counter() - started)
            self._keep(len(layers), answer)
            layers.append(layer)
            if len(layers) == MOST_KEPT:
                wrong += self._wrong(layers)
                layers.clear()
        lasted = time.monotonic() - begin
        wrong += self._wrong(layers)
        self.called = Called(seconds, wrong, failed, lasted, [len(seconds)])

    def _keep(self, at: int, answer: Tensor) -> None:
        """Keeps a few rows of an answer, to be compared."""
        if self._kept is None:
            self._kept = answer.new_empty((MOST_KEPT, len(self._probe), answer.shape[1]))
        torch.index_select(answer, 0, self._probe, out=self._kept[at])

    def _wrong(self, layers: list[int]) -> int:
        """How many of the answers of these layers that are kept are wrong."""
        if self._kept is None or not layers:
            return 0
        found = self._kept[: len(layers)].float()
        first = torch.stack([self._first[layer] for layer in layers])
        right = (found - first).norm(dim=2) <= LARGEST_ERROR * first.norm(dim=2)
        return int((~right.all(dim=1)).sum())
