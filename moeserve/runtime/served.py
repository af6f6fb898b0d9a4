"""`Served`: what a service serves, agreed by all ranks, and the problem that each layer is for a plan."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from moeserve.checkpoints.checkpoint import Checkpoint
from moeserve.checkpoints.hub import HubId, repository_of
from moeserve.dispatch.members import Members
from moeserve.experts.cover.slots import check_cover
from moeserve.experts.kernel import Problem
from moeserve.quant.format import Format, Scheme
from moeserve.quant.formats import format_named
from moeserve.quant.formats.floats import FLOATS
from moeserve.runtime.config import Config
from moeserve.runtime.mesh import Mesh
from moeserve.runtime.sections import AUTO, FAIL, ConfigError


@dataclass(frozen=True)
class Served:
    """What is served, agreed by all ranks: the checkpoint, its layers, the mesh, and a step's bounds."""

    checkpoint: Checkpoint
    layers: tuple[int, ...]  # decoder indices
    mesh: Mesh
    dtype: torch.dtype
    lane_rows: int
    replica_choice: str = "hash"  # of `REPLICA_CHOICES`
    patience: float = 30.0  # seconds a dispatcher waits for a rank before it names it late
    on_late: str = FAIL  # or "drop": a step goes on without a late rank's rows
    graph_rows: int = 2048  # of the fullest lane, up to which a GPU's steps are CUDA graphs; 0: none are
    redundant: int = 0  # slots for replicas, over all ranks
    max_lanes: int = 0  # that the group has room for; 0: as many as ranks
    max_owners: int = 0
    cover_owners: int = 0  # owners whose loss the first load stands, 0 or 1

    @property
    def lane_nbytes(self) -> int:
        """Bytes of the most hidden states that one lane brings to a step."""
        return self.lane_rows * self.checkpoint.hidden * self.dtype.itemsize

    @property
    def members(self) -> Members:
        """The members that the service starts with, its ranks, and the room that is reserved for others."""
        return self.mesh.members(self.max_lanes, self.max_owners)

    def droppable(self, seat: int) -> tuple[int, ...]:
        """The seats without whose rows a step of `seat` may go on, reserved ones with them; none where it
        fails.
        """
        members = self.members
        seats = {*members.seats, *range(max(members.max_lanes, members.max_owners))}
        return () if self.on_late == FAIL else tuple(sorted(seats - {seat}))

    def scheme(self, layer: int) -> Scheme:
        """How `layer` computes: whatever the checkpoint leaves in plain floats is in the served dtype."""
        scheme, plain = self.checkpoint.scheme(layer), FLOATS.values()
        weights = self.model_format if scheme.weights in plain else scheme.weights
        return Scheme(weights, self.model_format if scheme.activations in plain else scheme.activations)

    @property
    def model_format(self) -> Format:
        """The served dtype as a format."""
        return FLOATS[self.dtype]

    def reloaded_from(self, path: str) -> Checkpoint:
        """The checkpoint in `path`, when its experts and correction biases can take these' place. ValueError
        names what differs.
        """
        new = self.checkpoint.sibling(path)
        for layer in self.layers:
            if layer not in new.layers:
                raise ValueError(f"{path}: layer {layer} has no experts, and is served")
            for what, old, found in (
                ("experts", self.checkpoint.num_experts, new.num_experts),
                ("experts a token", self.checkpoint.top_k, new.top_k),
                ("shape", self.checkpoint.shape(layer), new.shape(layer)),
                ("scheme", self.checkpoint.scheme(layer), new.scheme(layer)),
            ):
                if old != found:
                    raise ValueError(f"{path}: layer {layer} has {what} {found}, and {old} is served")
            served, there = self.checkpoint.gate(layer).constants, new.gate(layer).constants
            for name, value in served.items():
                if value != there[name]:
                    differs = f"layer {layer} has routing.{name} = {there[name]}, and {value} is served"
                    raise ValueError(f"{path}: {differs}; its router is another")
        return new

    def problem(self, layer: int) -> Problem:
        """The problem that a plan has to solve for `layer`."""
        members, ranks = self.members, self.mesh.ranks
        return Problem(
            scheme=self.scheme(layer),
            model_format=self.model_format,
            shape=self.checkpoint.shape(layer, self.mesh.slices),
            experts=self.checkpoint.num_experts,
            lanes=members.max_lanes,
            owners=members.max_owners,
            top_k=self.checkpoint.top_k,
            lane_rows=self.lane_rows,
            sliced=self.mesh.sliced,
            redundant=self.redundant,
            reserved_lanes=members.max_lanes - ranks,
            reserved_owners=members.max_owners - ranks,
        )


def served_from(config: Config) -> Served:
    """What a configuration serves. Raises CheckpointError or ConfigError."""
    checkpoint = Checkpoint(config.model.checkpoint, load_as=config.model.load_as or None)
    layers = config.model.layers or checkpoint.layers
    if unknown := sorted(set(layers) - set(checkpoint.layers)):
        raise ConfigError(
            f"model.layers: {unknown} have no experts in this checkpoint; {list(checkpoint.layers)} have"
        )
    if config.balance.cover_owners:
        try:
            check_cover(checkpoint.num_experts, config.parallel.mesh.ranks, config.balance.redundant_experts)
        except ValueError as error:
            raise ConfigError(f"balance.cover_owners = {config.balance.cover_owners}: {error}") from error
    dtype = checkpoint.dtype if config.model.dtype == AUTO else format_named(config.model.dtype).dtype
    return Served(
        checkpoint,
        tuple(sorted(layers)),
        config.parallel.mesh,
        dtype,
        config.step.lane_rows,
        config.balance.replica_choice,
        config.step.patience,
        config.step.on_late,
        config.step.graph_rows,
        config.balance.redundant_experts,
        config.members.max_lanes,
        config.members.max_owners,
        config.balance.cover_owners,
    )


def model_name(config: Config) -> str:
    """The name clients may give: the one configured, else `org/name` of a hub, else the folder's."""
    named = config.model.checkpoint
    repository = HubId.of(named)
    of_hub = repository.repository if repository else repository_of(Path(named).resolve())
    return config.model.name or of_hub or Path(named).resolve().name
