"""A program that owns torch's default group, as a model server does, and runs a rank of moeserve inside."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from houses import Alone, house_config
from parallel import group, kind_of
from torch import Tensor

from moeserve.runtime.launch.torchrun import HostedRank, join_torchrun, leave_torchrun
from moeserve.runtime.step import LaneInput

LANES = (3, 0, 5, 1)
"""Rows of each rank in a step."""

BESIDE = 300
"""Collectives of the host program's thread while steps run."""


class HostProgram:
    """One process of the program: its default group, a part of it, and a group that its thread uses."""

    def __init__(self, rank: int, world: int, device: str) -> None:
        self.rank, self.world, self.device = rank, world, device
        kind = kind_of(rank, device)
        store = dist.PrefixStore("host", group().get_group_store())
        dist.init_process_group(kind.backend, store=store, rank=rank, world_size=world)
        self.whole = dist.group.WORLD
        halves = [dist.new_group(list(part)) for part in (range(world // 2), range(world // 2, world))]
        self.half = halves[rank >= world // 2]
        self.threads = dist.new_group(backend="gloo")
        self.made = 0  # collectives of its thread

    def collect(self) -> None:
        """The program's own collectives, on all its groups. Raises AssertionError where one is wrong."""
        found = [self._sum(over, self.device) for over in (None, self.half)] + [
            self._sum(self.threads, "cpu")
        ]
        if found != [self.world, self.world - self.world // 2, self.world]:
            raise AssertionError(f"the host program's groups of {self.world} add up to {found}")
        if dist.group.WORLD is not self.whole or dist.get_rank() != self.rank:
            raise AssertionError("the default group is another")

    def _sum(self, over: dist.ProcessGroup | None, device: str) -> int:
        total = torch.ones(1, device=device)
        dist.all_reduce(total, group=over)
        return int(total)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Meanwhile a thread of the program has collectives of its own, BESIDE at least."""
        self.made, failed = 0, list[BaseException]()

        def work() -> None:
            try:
                for _ in range(BESIDE):
                    if (found := self._sum(self.threads, "cpu")) != self.world:
                        raise AssertionError(f"the thread's group adds up to {found}")
                    self.made += 1
            except BaseException as error:
                failed.append(error)
                raise

        thread = threading.Thread(target=work, name="host program", daemon=True)
        thread.start()
        yield
        thread.join(60)
        if failed or thread.is_alive():
            raise AssertionError(f"the host program's thread did not end well: {failed}")


def hosted(rank: int, world: int, path: Path, backend: str, device: str) -> list[int]:
    """Worker: joins, steps, leaves and joins again beside the program's collectives; how many met steps."""
    torch.set_num_threads(1)
    host, alone, during = HostProgram(rank, world, device), Alone(path), list[int]()
    config = house_config(
        path,
        parallel__data_parallel_size=world,
        parallel__enable_expert_parallel=True,
        plan__device=device,
        plan__all2all_backend=backend,
    )
    for time in range(2):
        host.collect()
        member = join_torchrun(config)
        host.collect()
        with host.busy():
            for seed in range(10):
                check_step(member, alone, 10 * time + seed)
            during.append(host.made)
        for seed in range(3):
            check_step(member, alone, seed)
            host.collect()
        leave_torchrun(member)
        host.collect()
    check_ended_by_host(join_torchrun(config), alone)
    return during


def check_step(member: HostedRank, alone: Alone, seed: int) -> None:
    """One step of both layers, against what one process computes."""
    lanes = LANES[-member.served.mesh.ranks :]
    for layer in (0, 1):
        hidden, experts, weights = alone.batch(lanes[member.index], seed=100 * member.index + seed)
        valid = torch.ones(len(hidden), dtype=torch.bool)
        sent = hidden.to(member.served.dtype)
        answer: Tensor = member.step(layer, LaneInput(sent, experts, weights, valid), lanes)[0].cpu().float()
        expected = alone.forward(layer, sent.float(), experts, weights)
        loose = 1e-4 if member.served.dtype == torch.float32 else 2e-2
        if (answer - expected).norm() > loose * expected.norm():
            raise AssertionError(f"layer {layer}, seed {seed}: found {answer}, expected {expected}")


def check_ended_by_host(member: HostedRank, alone: Alone) -> None:
    """The program ends its default group, and so every group of its processes; leaving is still right."""
    check_step(member, alone, 7)
    if member.device != "cpu":
        torch.cuda.synchronize()
    member.leave()
    dist.barrier(group=group())
    dist.destroy_process_group()
    leave_torchrun(member)
    if dist.is_initialized() or member.group is not None:
        raise AssertionError("a group is left")
