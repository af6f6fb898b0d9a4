"""Measuring the dispatchers of a configuration on this machine, with a process a rank and no service."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]  # torch forgets to export it

from moeserve.dispatch.costs.costs import Costs
from moeserve.dispatch.group import GroupKind, end_group, form_group
from moeserve.proto.host import usable_cores
from moeserve.runtime.config import Config
from moeserve.runtime.launch import openmp
from moeserve.runtime.launch.environment import machine_for, own_device, set_environment
from moeserve.runtime.planning.costing import CostBook, costing_of
from moeserve.runtime.planning.layers import Place, dispatch_spec, first_epoch, plans_for
from moeserve.runtime.planning.plan import DispatchSpan, Plan
from moeserve.runtime.sections import ConfigError
from moeserve.runtime.served import served_from

LAST_WORDS_SECONDS = 2.0  # for the others once one rank has failed: theirs may be the cause


class MeasuringFailed(RuntimeError):
    """A rank could not measure; the text has what each said."""


@dataclass(frozen=True)
class _Job:
    """What a process is told; picklable."""

    config: Config
    rank: int
    store: str  # file where the group meets
    seconds: float  # of measuring, for all dispatchers of a problem


def measured_here(config: Config, seconds: float) -> list[Costs]:
    """Costs of the dispatchers that could serve `config` with its ranks as processes of this host, by
    setting.

    No weights are loaded. Whatever was kept is measured again, and kept. Raises MeasuringFailed,
    and ConfigError where the host has fewer GPUs than ranks.
    """
    ranks = config.parallel.mesh.ranks
    machine = machine_for(config)
    if machine.device == "cuda" and torch.cuda.device_count() < ranks:
        raise ConfigError(
            f"{ranks} ranks are to be measured, and this host has {torch.cuda.device_count()} GPUs; "
            "use fewer (--ranks), or --device cpu"
        )
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
        processes = [
            context.Process(target=_measure, args=(_Job(config, rank, store, seconds), end), daemon=True)
            for rank, (_, end) in enumerate(pipes)
        ]
        try:
            for process, (_, end) in zip(processes, pipes, strict=True):
                with openmp.for_ranks():  # what is measured is what ranks do
                    process.start()
                end.close()  # so that a dead child reads as end of file
            limit = config.plan.measure_timeout_seconds
            found: list[Costs] = _collected([mine for mine, _ in pipes], limit)[0]
            return found
        finally:
            for process in processes:
                if process.pid is not None:
                    process.join(timeout=LAST_WORDS_SECONDS)
                    process.kill()
                    process.join()


def _collected(pipes: Sequence[Connection], limit: float) -> list[Any]:
    """What every rank sent within so many seconds. Raises MeasuringFailed with what failed, by rank."""
    deadline = time.monotonic() + limit
    answers: dict[int, Any] = {}
    failures: dict[int, str] = {}
    waiting = dict(enumerate(pipes))
    while waiting:
        ready = wait(list(waiting.values()), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            within = "in time" if failures else f"within plan.measure_timeout_seconds = {limit:g}"
            failures |= dict.fromkeys(waiting, f"did not finish {within}")
            break
        for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
            try:
                answers[rank], error = waiting.pop(rank).recv()
            except EOFError:
                error = "ended without a word"
            if error:
                failures[rank] = error
                deadline = min(deadline, time.monotonic() + LAST_WORDS_SECONDS)
    if failures:
        raise MeasuringFailed("; ".join(f"rank {rank}: {text}" for rank, text in sorted(failures.items())))
    return [answers[rank] for rank in range(len(pipes))]


def _measure(job: _Job, pipe: Connection) -> None:
    """Measures as one rank of the group, and sends what it found through `pipe`."""
    config, ranks = job.config, job.config.parallel.mesh.ranks
    set_environment("127.0.0.1")
    torch.set_num_threads(config.cluster.threads_per_rank or max(1, usable_cores() // ranks))
    try:
        served, machine = served_from(config), machine_for(config)
        device = own_device(config, machine, job.rank)
        plans = plans_for(served, machine, config.plan.wanted)
        place = Place.at(first_epoch(served), job.rank, device)
        kind = GroupKind("gloo" if device == "cpu" else "nccl", config.step.timeout_seconds, device)
        group = form_group(FileStore(job.store, ranks), "measuring", job.rank, ranks, kind)

        def spec_of(plan: Plan, span: DispatchSpan) -> Any:
            return dispatch_spec(served, plan, span, place)

        book = CostBook(replace(costing_of(config), measure="always", anew=True, seconds=job.seconds))
        book.choose(plans, spec_of, group)
        pipe.send((list(book.known.values()), ""))
        dist.barrier(group=group)
        end_group(group)
    except Exception as error:
        first_line = (str(error).splitlines() or [""])[0]
        pipe.send((None, f"{type(error).__name__}: {first_line}"))
