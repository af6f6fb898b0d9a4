"""What workers do with groups of their own, beside default groups that they form as a host program does."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from parallel import group, kind_of

from moeserve.dispatch.group import GroupKind, default_store, end_group, form_group, group_beside


class Left(NamedTuple):
    """What a process has that groups could leave behind."""

    files: int
    threads: int
    listed: tuple[int, ...]  # entries of torch's lists of groups


def used(over: dist.ProcessGroup, device: str = "cpu") -> None:
    """Every collective that dispatchers use, over a group. Raises AssertionError where one is wrong."""
    rank, size = over.rank(), over.size()
    found: list[object] = [None] * size
    dist.all_gather_object(found, rank, group=over)
    mine, theirs = (torch.arange(size, device=device) + at * 10 for at in (rank, 0))
    dist.all_to_all_single(theirs, mine, group=over)
    told = torch.full((2,), rank, device=device)
    dist.broadcast(told, group_src=size - 1, group=over)
    right = found == list(range(size)) and theirs.tolist() == [10 * at + rank for at in range(size)]
    if not right or told.tolist() != [size - 1] * 2:
        raise AssertionError(f"rank {rank}: {found}, {theirs.tolist()}, {told.tolist()}")
    if rank < 2:  # between two, while the others go on
        sent, come = torch.full((5,), rank, device=device), torch.empty(5, dtype=torch.int64, device=device)
        pairs = [dist.P2POp(dist.isend, sent, group=over, group_peer=1 - rank)]
        pairs += [dist.P2POp(dist.irecv, come, group=over, group_peer=1 - rank)]
        for under_way in dist.batch_isend_irecv(pairs):
            under_way.wait()
        if come.tolist() != [1 - rank] * 5:
            raise AssertionError(f"rank {rank}: found {come.tolist()}")
    dist.barrier(group=over)


def left() -> Left:
    """What this process has now."""
    gc.collect()
    world = dist.distributed_c10d._world
    lists = (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.pg_to_tag)
    tags = sum(map(len, world.tags_to_pg.values())), len(world.tags_to_pg)
    return Left(count("fd"), count("task"), (*map(len, lists), *tags))


def count(what: str) -> int:
    """How many files ("fd") or threads ("task") this process has."""
    return len(list(Path(f"/proc/{os.getpid()}/{what}").iterdir()))


def without_default(rank: int, world: int) -> bool:
    """Worker: whether the launch's group works and no default group is up."""
    used(group())
    return not dist.is_initialized()


def beside_default(rank: int, world: int, times: int) -> tuple[Left, Left]:
    """Worker: forms, uses and ends groups beside a default group; what is left of early ones, and of all."""
    on_gpu = dist.get_backend(group()) == "nccl"
    device = f"cuda:{rank}" if on_gpu else "cpu"
    kind = kind_of(rank, device)
    bound = torch.device(device) if on_gpu else None
    store = dist.PrefixStore("host", group().get_group_store())
    dist.init_process_group(kind.backend, store=store, rank=rank, world_size=world, device_id=bound)
    part = dist.new_group([0, 1])
    seen: list[Left] = []
    for time in range(times):
        mine = form_group(default_store(), f"mine-{time}", rank, world, kind)
        used(mine, device)
        total = torch.ones(1, device=device)
        dist.all_reduce(total)  # the host program's
        if rank < 2:
            dist.all_reduce(total, group=part)
        if int(total) != (2 * world if rank < 2 else world):
            raise AssertionError(f"the host program's groups: found {int(total)}")
        end_group(mine)
        end_group(mine)  # nothing is left to do
        dist.barrier()
        if time in (times // 5, times - 1):
            seen.append(left())
    dist.destroy_process_group(part)
    dist.all_reduce(total)
    return seen[0], seen[1]


def several(rank: int, world: int) -> list[int]:
    """Worker: three groups at once, used in turn and ended in another order; what one of them gathered."""
    store = group().get_group_store()
    kind = kind_of(rank, "cpu")
    formed = [form_group(store, f"g{at}", (rank + at) % world, world, kind) for at in range(3)]
    for over in (*formed, *reversed(formed)):
        used(over)
    end_group(formed[1])
    used(formed[0])
    beside = group_beside(formed[2], kind)
    pair = group_beside(beside, kind, [0, 1]) if beside.rank() < 2 else group_beside(beside, kind, [2])
    if pair.size() != (2 if beside.rank() < 2 else 1):
        raise AssertionError(f"found a part of {pair.size()}")
    used(beside)
    found: list[int] = [0] * world
    dist.all_gather_object(found, rank, group=formed[0])
    for over in (pair, beside, formed[2], formed[0]):
        end_group(over)
    used(group())
    return found


def crossed(rank: int, world: int) -> tuple[int, int]:
    """Worker: its rank in a default group in which ranks run the other way, and in a group of its own."""
    store = dist.PrefixStore("host", group().get_group_store())
    dist.init_process_group("gloo", store=store, rank=world - 1 - rank, world_size=world)
    mine = form_group(default_store(), "mine", rank, world, kind_of(rank, "cpu"))
    used(mine)
    places = dist.get_rank(), dist.get_rank(mine)
    if places[1] != mine.rank():
        raise AssertionError(f"torch says rank {places[1]} of a group where this is {mine.rank()}")
    end_group(mine)
    return places


def for_ever_absent(rank: int, world: int) -> str:
    """Worker: what is said of a group whose second member never comes."""
    try:
        form_group(group().get_group_store(), "waiting", 0, 2, GroupKind("gloo", 0.5))
    except RuntimeError as error:
        return str(error)
    return ""
