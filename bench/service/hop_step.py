"""The step of the hop without the service: `Rank.step` called in processes that share a gloo group."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

from moeserve.runtime.launch import openmp


class BareStep:
    """Rank processes that step when they are told to."""

    def __init__(self, checkpoint: Path, rows: int, ranks: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        pipes = [context.Pipe() for _ in range(ranks)]
        self._pipes = [ours for ours, _ in pipes]
        self._processes = [
            context.Process(target=_rank, args=((rank, ranks), checkpoint, rows, store, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        with openmp.for_ranks():
            for process, (_, theirs) in zip(self._processes, pipes, strict=True):
                process.start()
                theirs.close()

    def run(self, calls: int, pause: float) -> list[float]:
        """Seconds of each of `calls` steps on rank 0, which alone brings rows.

        `pause` seconds lie between the end of a step and the start of the next, on all ranks at once.
        """
        for pipe in self._pipes:
            pipe.send((calls, pause))
        seconds = [pipe.recv() for pipe in self._pipes]
        return list(seconds[0])

    def close(self) -> None:
        """Ends the rank processes."""
        for pipe in self._pipes:
            pipe.send((0, 0.0))
        for process in self._processes:
            process.join(10)
            process.kill()
        self._folder.cleanup()


def _rank(place: tuple[int, int], path: Path, rows: int, store: str, pipe: Connection) -> None:
    index, ranks = place
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    from moeserve.checkpoints.checkpoint import Checkpoint
    from moeserve.device.machine import machine_named
    from moeserve.dispatch.group import GroupKind, end_group, form_group
    from moeserve.proto.heap import keep_freed_memory
    from moeserve.proto.host import usable_cores
    from moeserve.runtime.epoch import Epoch
    from moeserve.runtime.mesh import Mesh
    from moeserve.runtime.planning.layers import plans_for
    from moeserve.runtime.rank.host_threads import HostThreads
    from moeserve.runtime.rank.rank import Rank
    from moeserve.runtime.sections import Wanted
    from moeserve.runtime.served import Served
    from moeserve.runtime.step import LaneInput, empty_input

    threads = HostThreads(max(1, usable_cores() // ranks))  # as a rank of the service
    torch.set_num_threads(threads.most)
    keep_freed_memory()
    group = form_group(dist.FileStore(store, ranks), "hop", index, ranks, GroupKind("gloo", 60.0))
    mesh, checkpoint = Mesh.flatten(ranks, 1, expert_parallel=True), Checkpoint(path)
    served = Served(checkpoint, checkpoint.layers, mesh, checkpoint.dtype, 4096)
    rank = Rank(index, served, plans_for(served, machine_named("cpu", ()), Wanted()), "cpu")
    rank.load(Epoch.first(mesh, len(served.layers), checkpoint.num_experts))
    rank.join(group)
    lane = empty_input(checkpoint.hidden, checkpoint.top_k, served.dtype)
    if index == 0:
        random = torch.Generator().manual_seed(0)
        experts = torch.rand(rows, checkpoint.num_experts, generator=random).argsort(dim=1)
        lane = LaneInput(
            torch.randn(rows, checkpoint.hidden, generator=random).to(served.dtype),
            experts[:, : checkpoint.top_k].int().contiguous(),
            torch.full((rows, checkpoint.top_k), 1 / checkpoint.top_k),
            torch.ones(rows, dtype=torch.bool),
        )
    while (order := pipe.recv())[0]:
        calls, pause = order
        dist.barrier(group=group)
        seconds = []
        for _ in range(calls):
            if pause:
                dist.barrier(group=group)
                time.sleep(pause)
            started = time.perf_counter()
            with threads.computing(rank.plans[served.layers[0]].problem, (rows,)):
                rank.step(served.layers[0], lane, (rows,) + (0,) * (ranks - 1))
            seconds.append(time.perf_counter() - started)
        pipe.send(seconds)
    rank.leave()
    end_group(group)
