"""`parallel_launch`: one function in several processes of this host, and `group`, which they form.

Workers have no default group of torch.distributed: what needs one by mistake fails in every test that runs
here. A worker hands `group()` to what takes a process group, and names it to collectives of its own.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from warm import WARM

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from moeserve.dispatch.group import GroupKind

_formed: list[ProcessGroup] = []
"""This worker's group, once it has one."""


class RankFailed(Exception):
    """A rank raised, died or did not finish in time; the text holds its traceback."""


def group() -> ProcessGroup:
    """The group of all workers of this launch: gloo on the CPU, NCCL on GPUs, on device `rank` of each.

    Its ranks are the workers'. Raises RuntimeError outside a worker.
    """
    if not _formed:
        raise RuntimeError("only a worker of parallel_launch has a group")
    return _formed[0]


def parallel_launch(
    world: int, worker: Callable[..., Any], *args: Any, timeout: float = 120.0, device: str = "cpu"
) -> list[Any]:
    """Results of `worker(rank, world, *args)` by rank, each in a process of its own with one torch thread.

    The processes share `group()`: gloo, or with `device` "cuda" NCCL with one GPU a rank. They have no
    default group of torch.distributed, and may form one. Worker, arguments and results are pickled, so the
    worker stands at the top of a module that a fresh process can import (tests/support). A failure, or
    `timeout` seconds, ends them all and raises RankFailed.
    """
    context = WARM if device == "cpu" else mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        pipes = [context.Pipe(duplex=False) for _ in range(world)]
        processes = [
            context.Process(
                target=_run, args=(rank, world, device, store, pipes[rank][1], worker, args), daemon=True
            )
            for rank in range(world)
        ]
        try:
            for process, (_, child_end) in zip(processes, pipes, strict=True):
                process.start()
                child_end.close()  # so that a dead child reads as end of file
            return _collect([parent_end for parent_end, _ in pipes], time.monotonic() + timeout)
        finally:
            for process in processes:
                if process.pid is not None:
                    process.join(timeout=0.5)
                    process.kill()
                    process.join()


def _collect(pipes: list[Connection], deadline: float) -> list[Any]:
    """What every rank sent. After a failure the others get two seconds for theirs: it may be the cause."""
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    while len(results) + len(failures) < len(pipes):
        waiting = {id(pipe): rank for rank, pipe in enumerate(pipes) if rank not in results | failures}
        ready = wait(
            [pipes[rank] for rank in waiting.values()], timeout=max(0.0, deadline - time.monotonic())
        )
        if not ready:
            failures |= dict.fromkeys(waiting.values(), "did not finish in time")
        for pipe in ready:
            rank = waiting[id(pipe)]
            try:
                value, error = pipes[rank].recv()
            except EOFError:
                value, error = None, "died without a word"
            if error is None:
                results[rank] = value
            else:
                failures[rank] = error
                deadline = min(deadline, time.monotonic() + 2.0)
    if failures:
        raise RankFailed("\n".join(f"rank {rank}: {text}" for rank, text in sorted(failures.items())))
    return [results[rank] for rank in range(len(pipes))]


def _run(
    rank: int,
    world: int,
    device: str,
    store: str,
    pipe: Connection,
    worker: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["NCCL_NVLS_ENABLE"] = "0"  # NVLink multicast stays off
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    from moeserve.dispatch.group import end_group, form_group

    try:
        if device == "cuda":
            torch.cuda.set_device(rank)
        kind, met = kind_of(rank, device), dist.FileStore(store, world)
        _formed.append(form_group(met, "workers", rank, world, kind))
        pipe.send((worker(rank, world, *args), None))
        with suppress(ValueError):  # a worker that ended its default group has ended this one with it
            dist.get_backend(group())
            dist.barrier(group=group())
        end_group(_formed.pop())
    except Exception:
        pipe.send((None, traceback.format_exc()))


def kind_of(rank: int, device: str, timeout: float = 60.0) -> GroupKind:
    """How a group of workers communicates: gloo on "cpu", NCCL on "cuda"."""
    from moeserve.dispatch.group import GroupKind

    return GroupKind("gloo", timeout) if device == "cpu" else GroupKind("nccl", timeout, f"cuda:{rank}")
