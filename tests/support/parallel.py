"""`parallel_launch`: one function in several processes of this host that form a group."""

from __future__ import annotations

import multiprocessing as mp
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from warm import WARM


class RankFailed(Exception):
    """A rank raised, died or did not finish in time; the text holds its traceback."""


def parallel_launch(
    world: int, worker: Callable[..., Any], *args: Any, timeout: float = 120.0, device: str = "cpu"
) -> list[Any]:
    """Results of `worker(rank, world, *args)` by rank, each in a process of its own with one torch thread.

    The processes share torch.distributed's default group: gloo, or with `device` "cuda" NCCL with one
    GPU a rank. Worker, arguments and results are pickled, so the worker stands at the top of a module
    that a fresh process can import (tests/support). A failure, or `timeout` seconds, ends them all and
    raises RankFailed.
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
    group = {
        "rank": rank,
        "world_size": world,
        "timeout": timedelta(seconds=60),
        "init_method": f"file://{store}",
    }
    try:
        if device == "cuda":
            torch.cuda.set_device(rank)
            dist.init_process_group("nccl", device_id=torch.device("cuda", rank), **group)
        else:
            dist.init_process_group("gloo", **group)
        pipe.send((worker(rank, world, *args), None))
        dist.barrier()
        dist.destroy_process_group()
    except Exception:
        pipe.send((None, traceback.format_exc()))
