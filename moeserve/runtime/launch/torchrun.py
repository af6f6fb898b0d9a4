"""A rank hosted by the caller's own process: under torchrun, or inside a model server, with no hop at all.

The group is the rank's own, beside whatever groups the process has: those of a model server may come and go,
and are never used. One exception is torch's: a program that ends its default group ends every group.

rank = join_torchrun(config)                       # RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT from torchrun
mixed, phases = rank.step(layer, rows, lane_rows)  # collective: every rank calls it in one order
                                                   # rows: LaneInput, or LaneLogits for the layer's gate
rank.late(layer)                                   # once `mixed` is on the host: raises where a peer was late
leave_torchrun(rank)                               # its process may join again
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]  # torch forgets to export them
    ProcessGroup,
    Store,
    TCPStore,
    rendezvous,
)

from moeserve.checkpoints.store import CheckpointError
from moeserve.dispatch.group import GroupKind, default_store, end_group, form_group, group_beside
from moeserve.runtime.config import Config
from moeserve.runtime.epoch import marked
from moeserve.runtime.launch.environment import machine_for, own_device
from moeserve.runtime.planning.costing import costing_of
from moeserve.runtime.planning.layers import first_epoch, plans_for
from moeserve.runtime.rank.rank import Rank
from moeserve.runtime.sections import ConfigError
from moeserve.runtime.served import served_from
from moeserve.runtime.step import LaneRows


class HostedRank(Rank):
    """A rank in its caller's process, and the group that it has there; None where it is alone."""

    group: ProcessGroup | None = None
    kind: GroupKind  # of its groups


def join_torchrun(config: Config) -> HostedRank:
    """Loads this rank's experts and joins a group of all processes that torchrun's environment names.

    They meet where the process's default group has met, if one is up, else where the environment says. Raises
    ConfigError when the world is not the configured mesh, and CheckpointError, on all of them, when one has
    read other experts than the first rank.
    """
    index, world = _place()
    mesh = config.parallel.mesh
    if world != mesh.ranks:
        raise ConfigError(f"torchrun started {world} processes; the configured mesh has {mesh.ranks} ranks")
    served, machine = served_from(config), machine_for(config)
    device = own_device(config, machine, int(os.environ.get("LOCAL_RANK", index)))
    plans = plans_for(served, machine, config.plan.wanted)
    rank = HostedRank(index, served, plans, device, costing_of(config))
    rank.kind = GroupKind("gloo" if device == "cpu" else "nccl", config.step.timeout_seconds, device)
    rank.load(first_epoch(served).with_names([marked("", served.checkpoint.mark)]))
    if world > 1:
        store = _meeting(config.step.timeout_seconds)
        joined = store.add(f"moeserve/joined/{index}", 1)  # ranks join together, and so count alike
        rank.group = form_group(store, f"moeserve-{joined}", index, world, rank.kind)
        try:
            _check_alike(rank, rank.group)
        except BaseException:
            end_group(rank.group)
            raise
    rank.join(rank.group)
    return rank


def _check_alike(rank: HostedRank, group: ProcessGroup) -> None:
    """Raises CheckpointError, on all ranks, where experts of two checkpoints would answer. Collective."""
    checkpoint = rank.served.checkpoint
    mark = torch.tensor(list(bytes.fromhex(checkpoint.mark)), dtype=torch.uint8, device=rank.device)
    marks = [torch.empty_like(mark) for _ in range(group.size())]
    dist.all_gather(marks, mark, group=group)
    others = [at for at, one in enumerate(marks) if not torch.equal(one, marks[0])]
    if others:
        raise CheckpointError(
            f"{checkpoint.path}: ranks {others} have read other experts there than rank 0; all hosts need "
            "the same checkpoint at this path"
        )


def leave_torchrun(rank: HostedRank) -> None:
    """Closes the rank's dispatchers and ends its group; other groups of the process stay as they are.

    No rank may be in a step any more. Not collective.
    """
    rank.leave()
    group, rank.group = rank.group, None
    if group is not None:
        end_group(group)


def _place() -> tuple[int, int]:
    """This process's rank and how many there are: by the environment, else by the default group."""
    up = dist.is_initialized()
    index, world = (dist.get_rank(), dist.get_world_size()) if up else (0, 1)
    return int(os.environ.get("RANK", index)), int(os.environ.get("WORLD_SIZE", world))


_met: list[Store] = []
"""Where the environment says that processes meet, once they have. The first rank may be its server, and is so
until its process ends: others could still meet there when it leaves."""


def _meeting(seconds: float) -> Store:
    """A store that all processes reach."""
    if dist.is_initialized():
        return default_store()
    if not _met:
        limit = timedelta(seconds=seconds)
        _met.append(_on_loopback(limit) or next(rendezvous("env://", timeout=limit))[0])
    return _met[0]


def _on_loopback(limit: timedelta) -> Store | None:
    """The store that the first rank serves where the environment names loopback; None where it is another's.

    It is the one that torch's rendezvous makes, but for its socket, which torch binds to every interface.
    """
    named = {key: os.environ.get(key, "") for key in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")}
    served_by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    address, port, rank, world = named.values()
    if served_by_torchrun or rank != "0" or address not in ("127.0.0.1", "localhost") or "" in (port, world):
        return None
    try:
        listener = socket.create_server(("127.0.0.1", int(port)))
    except OSError:
        return None  # this process may serve a store there already, and torch finds it
    return TCPStore(
        address,
        int(port),
        int(world),
        is_master=True,
        timeout=limit,
        multi_tenant=True,  # the program's own rendezvous at this port finds it, too
        master_listen_fd=listener.detach(),  # the store closes it
    )


class SequenceParallel:
    """Steps for tensor-parallel attention ranks, which hold the same rows: each is dispatched once.

    Every rank of an engine brings its `Mesh.sequence_rows` of the rows to the layer, and the answers are
    gathered over the engine's ranks, so that all hold all of them again. Built collectively by all ranks.
    """

    def __init__(self, rank: HostedRank) -> None:
        self._rank = rank
        mesh = rank.served.mesh
        self._mesh, self._tp_rank = mesh, rank.index % mesh.tp
        first = rank.index - self._tp_rank
        self._group: ProcessGroup | None = None
        if rank.group is not None:
            self._group = group_beside(rank.group, rank.kind, range(first, first + mesh.tp))

    def close(self) -> None:
        """Ends the engine's group; the rank keeps its own."""
        group, self._group = self._group, None
        if group is not None:
            end_group(group)

    def step(self, layer: int, rows: LaneRows, engine_rows: tuple[int, ...]) -> Tensor:
        """Runs one layer: `rows` are the same on an engine's ranks, `engine_rows` counts every engine's.

        Returns `[T, H]` for all of the engine's rows, on each of its ranks.
        """
        mesh, total = self._mesh, rows.hidden.shape[0]
        parts = [mesh.sequence_rows(total, at) for at in range(mesh.tp)]
        lanes = tuple(
            part.stop - part.start
            for count in engine_rows
            for part in (mesh.sequence_rows(count, at) for at in range(mesh.tp))
        )
        answer, _ = self._rank.step(layer, rows.rows(parts[self._tp_rank]), lanes)
        width = parts[0].stop
        padded = answer.new_zeros((width, answer.shape[1]))
        padded[: answer.shape[0]] = answer
        if self._group is None:
            return answer
        gathered = [torch.empty_like(padded) for _ in range(mesh.tp)]
        dist.all_gather(gathered, padded, group=self._group)
        return torch.cat([g[: part.stop - part.start] for g, part in zip(gathered, parts, strict=True)])
