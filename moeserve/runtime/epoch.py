"""`Epoch`: the one way the world changes. First load, rebalance, lost or joined rank: each is epoch n -> n +
1.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moeserve.experts.balance.room import even_with_room
from moeserve.experts.placement import EMPTY, Move, Placement
from moeserve.runtime.mesh import Mesh


@dataclass(frozen=True)
class Epoch:
    """A numbered state of the group: its mesh, where every expert is, and which weights are served.

    Weights are reloaded layer by layer, so each layer has a version of its own: `versions [L]`, or () while
    all are at 1. Version v was read from the checkpoint folder `weights[v - 1]`; the empty name is the
    configured one, which is the first; names of versions that no layer is at any more are empty too.
    """

    number: int
    mesh: Mesh
    placement: Placement
    versions: tuple[int, ...] = ()
    weights: tuple[str, ...] = ("",)

    @classmethod
    def first(cls, mesh: Mesh, layers: int, experts: int, redundant: int = 0) -> Epoch:
        """Epoch 1, the load: experts spread evenly, and the slots of `redundant` replicas left empty.

        Raises ValueError where they do not divide over the ranks, or experts are sliced.
        """
        if redundant and mesh.sliced:
            raise ValueError(
                f"{redundant} redundant experts: ranks hold slices of every expert, which have no replicas"
            )
        return cls(1, mesh, even_with_room(layers, experts, mesh.owners, redundant))

    def moved(self, layer: int, slots: NDArray[np.int32]) -> Epoch:
        """The epoch with `slots [S]` at `layer` (a position), and every other layer as it is."""
        rows = self.placement.slots.copy()
        rows[layer] = slots
        return self._next(placement=self.placement.with_slots(rows))

    def reloaded(self, layer: int, version: int) -> Epoch:
        """This placement with the weights of `version`, one of `weights`, at `layer` (a position)."""
        if not 1 <= version <= len(self.weights):
            raise ValueError(f"weights version {version} is not one of 1 to {len(self.weights)}")
        versions = [self.version(at) for at in range(self.placement.layers)]
        versions[layer] = version
        return self._next(versions=tuple(versions))

    def with_weights(self, path: str) -> Epoch:
        """This epoch with one more version of the weights known; no layer is at it yet.

        Folders of versions that no layer is at are forgotten: every message of a change holds the names.
        """
        served = {self.version(layer) for layer in range(self.placement.layers)}
        kept = (folder if at in served else "" for at, folder in enumerate(self.weights, start=1))
        return replace(self, weights=(*kept, path))

    def version(self, layer: int) -> int:
        """The version of the weights at `layer` (a position)."""
        return self.versions[layer] if self.versions else 1

    @property
    def weights_version(self) -> int:
        """The oldest version of the weights that any layer is at."""
        return min(self.versions, default=1)

    def without(self, lost: Collection[int]) -> Epoch:
        """The survivors of `lost` ranks: experts that lost their last replica move into spare slots.

        Raises ValueError when experts are sliced (a lost slice can only return), or when the survivors have
        too few spare slots (empty ones, and second replicas).
        """
        if self.mesh.sliced:
            raise ValueError(
                f"ranks {sorted(lost)} hold slices of every expert; the group cannot serve without them"
            )
        keep = [rank for rank in range(self.mesh.ranks) if rank not in set(lost)]
        if not keep:
            raise ValueError("no rank survives")
        rows = [
            np.concatenate([self.placement.of_owner(layer, rank) for rank in keep])
            for layer in range(self.placement.layers)
        ]
        slots = np.stack([_fill(row, self.placement.experts, layer) for layer, row in enumerate(rows)])
        return self._next(
            mesh=_expert_mesh(len(keep)), placement=Placement(slots, len(keep), self.placement.experts)
        )

    def joined(self, ranks: int) -> Epoch:
        """`ranks` more ranks at the end, their slots filled with replicas of the experts that have fewest."""
        if self.mesh.sliced:
            raise ValueError("a group whose ranks hold slices of every expert cannot grow")
        total, width = self.mesh.ranks + ranks, self.placement.slots_per_owner
        slots = np.full((self.placement.layers, total * width), EMPTY, dtype=np.int32)
        slots[:, : self.placement.slots.shape[1]] = self.placement.slots
        for row in slots:
            copies = np.bincount(row[row != EMPTY], minlength=self.placement.experts)
            for slot in range(self.placement.slots.shape[1], total * width):
                row[slot] = copies.argmin()
                copies[row[slot]] += 1
        return self._next(mesh=_expert_mesh(total), placement=Placement(slots, total, self.placement.experts))

    def _next(self, **changes: object) -> Epoch:
        return replace(self, number=self.number + 1, **changes)  # type: ignore[arg-type]


def _expert_mesh(ranks: int) -> Mesh:
    return Mesh(dp=ranks, tp=1, ep=ranks)


def _fill(row: np.ndarray, experts: int, layer: int) -> np.ndarray:
    """Puts experts without a slot into empty slots first, then over second replicas."""
    row = row.copy()
    missing = sorted(set(range(experts)) - set(row.tolist()))
    seen: set[int] = set()
    spare = [slot for slot, expert in enumerate(row) if expert == EMPTY]
    for slot, expert in enumerate(row.tolist()):
        if expert in seen:
            spare.append(slot)
        elif expert != EMPTY:
            seen.add(expert)
    if len(missing) > len(spare):
        raise ValueError(
            f"layer {layer}: {len(missing)} experts lost their last replica, "
            f"and the survivors have {len(spare)} spare slots"
        )
    for slot, expert in zip(spare, missing, strict=False):
        row[slot] = expert
    return row


@dataclass(frozen=True)
class Change:
    """One epoch to the next: one layer's slots, or its weights; and what has to be copied for it."""

    epoch: Epoch  # the one to become
    layer: int  # position among the served layers
    moves: tuple[Move, ...]  # `source` EMPTY: from disk, in the version of the epoch
