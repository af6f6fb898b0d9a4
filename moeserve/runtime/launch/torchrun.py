"""A rank hosted by the caller's own process: under torchrun, or inside a model server, with no hop at all.

rank = join_torchrun(config)                       # RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT from torchrun
mixed, phases = rank.step(layer, rows, lane_rows)  # collective: every rank calls it in one order
                                                   # rows: LaneInput, or LaneLogits for the layer's gate
rank.late(layer)                                   # once `mixed` is on the host: raises where a peer was late
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from moeserve.runtime.config import Config, ConfigError
from moeserve.runtime.launch.environment import machine_for, own_device
from moeserve.runtime.planning.costing import costing_of
from moeserve.runtime.planning.layers import first_epoch, plans_for
from moeserve.runtime.rank.rank import Rank
from moeserve.runtime.served import served_from
from moeserve.runtime.step import LaneRows


def join_torchrun(config: Config) -> Rank:
    """Loads this rank's experts and joins the group that torchrun's environment names, unless one is up.

    Raises ConfigError when the environment's world is not the configured mesh.
    """
    world, index = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    mesh = config.parallel.mesh
    if world != mesh.ranks:
        raise ConfigError(f"torchrun started {world} processes; the configured mesh has {mesh.ranks} ranks")
    served, machine = served_from(config), machine_for(config)
    device = own_device(config, machine, int(os.environ.get("LOCAL_RANK", index)))
    if not dist.is_initialized():
        limit = timedelta(seconds=config.step.timeout_seconds)
        dist.init_process_group("gloo" if device == "cpu" else "nccl", timeout=limit)
    plans = plans_for(served, machine, config.plan.wanted)
    rank = Rank(index, served, plans, device, costing_of(config))
    rank.load(first_epoch(served))
    rank.join()
    return rank


class SequenceParallel:
    """Steps for tensor-parallel attention ranks, which hold the same rows: each is dispatched once.

    Every rank of an engine brings its `Mesh.sequence_rows` of the rows to the layer, and the answers are
    gathered over the engine's ranks, so that all hold all of them again. Built collectively by all ranks.
    """

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        mesh = rank.served.mesh
        self._mesh, self._tp_rank = mesh, rank.index % mesh.tp
        engines = [[first + at for at in range(mesh.tp)] for first in range(0, mesh.ranks, mesh.tp)]
        groups = [dist.new_group(ranks) for ranks in engines]
        self._group = groups[rank.index // mesh.tp]

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
        gathered = [torch.empty_like(padded) for _ in range(mesh.tp)]
        dist.all_gather(gathered, padded, group=self._group)
        return torch.cat([g[: part.stop - part.start] for g, part in zip(gathered, parts, strict=True)])
