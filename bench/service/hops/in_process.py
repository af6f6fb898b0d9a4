"""`InProcess`: the steps of the service without the service: `Rank.step` in a process for each rank."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from bench.service.hops.sizes import Sizes
from moeserve.dispatch.group import GroupKind, end_group, form_group
from moeserve.runtime.config import Config
from moeserve.runtime.epoch import Epoch
from moeserve.runtime.launch.environment import machine_for, own_device, set_environment, tune_process
from moeserve.runtime.planning.costing import costing_of
from moeserve.runtime.planning.layers import plans_for
from moeserve.runtime.rank.rank import Rank
from moeserve.runtime.served import served_from
from moeserve.runtime.step import FIRST_NUMBER, LaneInput, Phases

WARM_UP_STEPS = 8
ORDER_SECONDS = 300.0
NEVER = 1 << 40  # steps of which one is timed, where none is to be
BUSY_CYCLES = 2_000_000  # of the GPU's clock, about 1 ms


def end_all(pipes: Sequence[Connection], processes: Sequence[BaseProcess]) -> None:
    """Closes the pipes, at which the processes end, and kills those that do not within 20 s each."""
    for pipe in pipes:
        pipe.close()
    for process in processes:
        process.join(20)
        if process.is_alive():
            process.kill()
            process.join()


class InProcess:
    """One or two ranks that step when they are told to; a context."""

    def __init__(self, config: Config, sizes: Sizes, ranks: int = 2) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        pairs = [context.Pipe() for _ in range(ranks)]
        self._pipes = [ours for ours, _ in pairs]
        self._processes = [
            context.Process(target=_rank, args=(index, ranks, config, sizes, store, theirs), daemon=True)
            for index, (_, theirs) in enumerate(pairs)
        ]
        for process, (_, theirs) in zip(self._processes, pairs, strict=True):
            process.start()
            theirs.close()

    def ask(self, what: str, *given: object) -> Any:
        """What rank 0 answers to an order that all get. Raises RuntimeError where one fails."""
        for pipe in self._pipes:
            pipe.send((what, given))
        answers = []
        for index, pipe in enumerate(self._pipes):
            if not pipe.poll(ORDER_SECONDS):
                raise RuntimeError(f"rank {index} in process does not answer {what} within {ORDER_SECONDS} s")
            answers.append(pipe.recv())
        for answer in answers:
            if isinstance(answer, str):
                raise RuntimeError(answer)
        return answers[0]

    def __enter__(self) -> InProcess:
        return self

    def __exit__(self, *ended: object) -> None:
        end_all(self._pipes, self._processes)
        self._folder.cleanup()


class _Stepper:
    """One rank and what it is asked to do. Every order is collective."""

    def __init__(self, index: int, ranks: int, config: Config, sizes: Sizes, store: str) -> None:
        self._index, self._ranks, self._sizes = index, ranks, sizes
        machine = machine_for(config)
        self._device = own_device(config, machine, index)
        served = served_from(config)
        plans = plans_for(served, machine, config.plan.wanted)
        self._rank = Rank(index, served, plans, self._device, costing_of(config))
        self._rank.load(Epoch.first(served.mesh, len(served.layers), served.checkpoint.num_experts))
        backend = "gloo" if self._device == "cpu" else "nccl"
        kind = GroupKind(backend, 60.0, self._device)
        self._number = FIRST_NUMBER  # of the steps of `truth`, the last orders
        self._group = form_group(dist.FileStore(store, ranks), "in-process", index, ranks, kind)
        self._rank.join(self._group)

    def _synchronize(self) -> None:
        if self._device != "cpu":
            torch.cuda.synchronize()

    def _steps(self, lane_rows: tuple[int, ...]) -> Callable[[int], None]:
        hidden, experts, weights = self._sizes.batch(lane_rows[self._index], 7 + self._index)
        valid = torch.ones(len(hidden), dtype=torch.bool)
        rows = LaneInput(hidden, experts, weights, valid).to(self._device)
        layers = self._rank.served.layers

        def step(at: int) -> None:
            self._rank.step(layers[at % len(layers)], rows, lane_rows)

        for at in range(WARM_UP_STEPS * len(layers)):
            step(at)
            self._synchronize()
        return step

    def time(self, rows: int, steps: int) -> list[float]:
        """Seconds of each of `steps` steps to which lane 0 alone brings `rows`, launch to end."""
        step, found = self._steps((rows, 0)[: self._ranks]), []
        for at in range(steps):
            started = time.perf_counter()
            step(at)
            self._synchronize()
            found.append(time.perf_counter() - started)
        return found

    def rate(self, rows: int, steps: int) -> float:
        """Rows a second of steps to which all lanes bring `rows` together, one launched after another."""
        step = self._steps(self._shared(rows))
        started = time.perf_counter()
        for at in range(steps):
            step(at)
        self._synchronize()
        return rows * steps / (time.perf_counter() - started)

    def truth(self, rows: int, steps: int, rounds: int) -> dict[str, float]:
        """What the device tells of its steps, beside what is known of them otherwise; empty on a CPU.

        All lanes bring `rows` together. told: seconds of a step's phases by the device's timestamps, over
        those between one timestamp before the step and one behind it. cost: seconds of a step where every
        n-th is timed, as in a service, over those where none is. Both are medians. counted: rows that this
        rank's device counted, over those that were chosen of its experts.
        """
        if self._device == "cpu":
            return {}
        lane_rows, usual = self._shared(rows), self._rank.timed_every
        hidden, experts, weights = self._sizes.batch(lane_rows[self._index], 7 + self._index)
        lane = LaneInput(hidden, experts, weights, torch.ones(len(hidden), dtype=torch.bool)).to(self._device)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        layer, before = self._rank.served.layers[0], self._counted()

        def run(every: int, count: int) -> tuple[float, Phases]:
            self._rank.timed_every = every
            dist.barrier(self._group)
            torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]  # until all is launched
            begin.record()  # type: ignore[no-untyped-call]
            for _ in range(count):
                self._number += 1
                phases = self._rank.step(layer, lane, lane_rows, self._number)[1]
            end.record()  # type: ignore[no-untyped-call]
            self._synchronize()
            return begin.elapsed_time(end) / 1e3 / count, phases

        for every in (1, NEVER):
            for _ in range(WARM_UP_STEPS):  # recorded with timestamps and without
                run(every, 1)
        told = []
        for _ in range(steps):
            seconds, phases = run(1, 1)
            measured = phases.measured()
            told.append((measured.dispatch + measured.compute + measured.combine) / seconds)
        costs = [run(usual, steps)[0] / run(NEVER, steps)[0] for _ in range(rounds)]
        self._rank.timed_every = usual
        ran = 2 * WARM_UP_STEPS + steps + 2 * steps * rounds
        counted = (self._counted() - before) / (ran * self._chosen(lane_rows))
        return {"told": median(told), "cost": median(costs), "counted": counted}

    def _shared(self, rows: int) -> tuple[int, ...]:
        """`rows` of a step, divided among the lanes."""
        return (rows,) if self._ranks == 1 else (rows // 2, rows - rows // 2)

    def _chosen(self, lane_rows: tuple[int, ...]) -> int:
        """(token, expert) rows of a step of `truth` that this rank computes; experts lie in order."""
        share = self._sizes.experts // self._ranks
        own, chosen = range(self._index * share, (self._index + 1) * share), 0
        for lane, rows in enumerate(lane_rows):
            _, experts, _ = self._sizes.batch(rows, 7 + lane)
            chosen += int(((experts >= own.start) & (experts < own.stop)).sum())
        return chosen

    def _counted(self) -> int:
        self._rank.count()
        reading = self._rank.rows_computed()
        return 0 if reading is None else sum(reading.read())

    def dma(self, rows: int, times: int) -> float:
        """Seconds in which the engines bring `rows` from pinned memory and back, one after the other."""
        if self._device == "cpu":
            return 0.0
        host = torch.zeros((rows, self._sizes.hidden), dtype=torch.bfloat16).pin_memory()
        there = host.to(self._device)
        found = []
        for _ in range(times):
            self._synchronize()
            started = time.perf_counter()
            there.copy_(host, non_blocking=True)
            host.copy_(there, non_blocking=True)
            self._synchronize()
            found.append(time.perf_counter() - started)
        return sorted(found)[len(found) // 2]

    def close(self) -> None:
        """Ends the rank's part in the group."""
        self._rank.leave()
        end_group(self._group)


def _rank(index: int, ranks: int, config: Config, sizes: Sizes, store: str, pipe: Connection) -> None:
    set_environment("127.0.0.1")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    tune_process()
    try:
        stepper = _Stepper(index, ranks, config, sizes, store)
    except Exception as error:
        pipe.send(f"rank {index}: {type(error).__name__}: {error}")
        raise
    while True:
        try:
            what, given = pipe.recv()
        except EOFError:
            break
        try:
            pipe.send(getattr(stepper, what)(*given))
        except Exception as error:  # told to whoever asked
            pipe.send(f"rank {index}, {what}{given}: {type(error).__name__}: {error}")
    stepper.close()
