"""Process groups of our own, formed from a store and ended alone, beside whatever groups a process has.

torch.distributed forms groups only as parts of its default group, which belongs to the program that a member
may live in. What is done here instead is private in torch: a `ProcessGroup` is made with its backend and
listed where the public collectives look groups up, as torch does it for its own (2.11 and 2.13). No other
file uses private API of torch.distributed.

Public functions that take a group's own ranks serve it: `group.rank()`, `group.size()`, and collectives with
`group=` and `group_src=`, `group_dst=` or `group_peer=`. `dist.get_rank(group)` asks the default group first,
so ours never use it; where every member has a default group, it answers right nevertheless.

A program that ends its default group by `dist.destroy_process_group()` ends every group of its process, also
ours, and `end_group` then finds nothing left to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, Store, distributed_c10d  # type: ignore[attr-defined]  # not exported

from moeserve.dispatch.fence import close_to_strangers, listeners

c10d: Any = distributed_c10d  # whose private names have no types

TAG = "user:moeserve"
"""Under which torch lists our groups: one name for all, since torch never drops a name from its lists."""


@dataclass(frozen=True)
class GroupKind:
    """How a group communicates."""

    backend: str  # gloo, nccl
    timeout: float  # seconds of one collective
    device: str = "cpu"  # of this member; NCCL's communicator is formed on it at once
    # whether nothing else begins to listen here meanwhile: gloo then accepts nobody once the group is formed
    own_process: bool = False


def form_group(store: Store, name: str, rank: int, size: int, kind: GroupKind) -> ProcessGroup:
    """The group `name` of `size` members that meet in `store`, for the member at `rank`. Collective.

    A store that is written in Python is kept by the caller until the group has ended: torch does not keep it.
    No group with that name may have met in `store` before. Neither needs nor changes any other group. A NCCL
    communicator is formed here by all members, because its first use must not be a message between two.
    Raises ValueError for a name that a group of this process has, and RuntimeError when members stay away.
    """
    world = c10d._world
    if name in world.pg_names.values():
        raise ValueError(f"this process has a group named {name!r} already; end it first, or name another")
    if not 0 <= rank < size:
        raise ValueError(f"rank={rank} must be one of {size} members of group {name!r}, counted from 0")
    limit = timedelta(seconds=kind.timeout)
    met = PrefixStore(name, store)
    ranks = _default_ranks(met, (rank, size), limit)
    group: Any = ProcessGroup(met, rank, size)
    if kind.backend == "nccl":
        device, carrier = _numbered(kind.device), _nccl(met, name, (rank, size), limit)
        group._set_default_backend(ProcessGroup.BackendType.NCCL)
        group._register_backend(torch.device("cuda"), ProcessGroup.BackendType.NCCL, carrier)
        group.bound_device_id = device
    elif kind.backend == "gloo":
        before = listeners() if kind.own_process else None
        carrier = c10d.ProcessGroupGloo(met, rank, size, timeout=limit)
        if before is not None:
            close_to_strangers(but=before)  # all members are connected
        carrier._set_sequence_number_for_group()
        group._set_default_backend(ProcessGroup.BackendType.GLOO)
        group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, carrier)
    else:
        raise ValueError(f"backend {kind.backend!r} of group {name!r}: found neither gloo nor nccl")
    group._set_group_name(name)
    group._set_group_desc("moeserve")
    if kind.backend == "nccl":
        carrier.eager_connect_single_device(device)
    world.pg_map[group] = (kind.backend, met)
    world.pg_names[group] = name
    world.pg_group_ranks[group] = {there: at for at, there in enumerate(ranks)}
    world.pg_backend_config[group] = str(c10d.BackendConfig(c10d.Backend(kind.backend)))
    world.pg_to_tag[group] = TAG
    world.tags_to_pg.setdefault(TAG, []).append(group)
    c10d._register_process_group(name, group)
    formed: ProcessGroup = group
    return formed


def _numbered(device: str) -> torch.device:
    """`device` with its index, which is the current one's where it names none."""
    named = torch.device(device)
    return named if named.index is not None else torch.device(named.type, torch.cuda.current_device())


def _nccl(store: Store, name: str, place: tuple[int, int], limit: timedelta) -> Any:
    options = c10d.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = False
    options._timeout = limit
    options.group_name = name
    options.global_ranks_in_group = list(range(place[1]))
    carrier = c10d.ProcessGroupNCCL(store, *place, options)
    carrier._set_sequence_number_for_group()
    return carrier


def _default_ranks(store: Store, place: tuple[int, int], limit: timedelta) -> list[int]:
    """The members' ranks in their default groups, where each has one of its own; numbers of no rank else.

    torch translates ranks of the default group to a group's through them. Wrong ones would be believed.
    """
    rank, size = place
    keys = [f"default/{at}" for at in range(size)]
    store.set(keys[rank], str(dist.get_rank() if dist.is_initialized() else -1))
    store.wait(keys, limit)
    found = [int(value) for value in store.multi_get(keys)]
    told = min(found) >= 0 and len(set(found)) == size
    return found if told else [-1 - at for at in range(size)]


def end_group(group: ProcessGroup) -> None:
    """Closes the connections of `group` and takes it off torch's lists; nothing else changes. Not collective.

    Nobody may be in one of its collectives any more. Ending it again does nothing.
    """
    world = c10d._world
    if group not in world.pg_map:
        return
    dist.destroy_process_group(group)
    if not world.tags_to_pg.get(TAG, True):
        del world.tags_to_pg[TAG]


def abort_group(group: ProcessGroup) -> None:
    """Ends the collectives of `group` that are under way, where its backend can. From any thread.

    NCCL's wait for ever for a dead peer. gloo's see by themselves that a peer is gone, and have no abort.
    Raises RuntimeError for a group that has ended.
    """
    if dist.get_backend(group) == "nccl":
        group.abort()


def group_beside(group: ProcessGroup, kind: GroupKind, ranks: Sequence[int] = ()) -> ProcessGroup:
    """One more group of the members at `ranks`, this one among them, or of all, who meet where `group` met.

    Collective over `group`, whose members may take their places in different parts of it at once.
    """
    world = c10d._world
    _, store = world.pg_map[group]
    taken = list(ranks) or list(range(group.size()))
    count = store.add(f"beside/{group.rank()}", 1)  # every member counts alike
    name = f"{group.group_name}/beside-{count}-{taken[0]}"
    return form_group(store, name, taken.index(group.rank()), len(taken), kind)


def default_store() -> Store:
    """Where the default group of this process met: for a launcher inside a program that owns one."""
    store: Store = c10d._get_default_store()
    return store
