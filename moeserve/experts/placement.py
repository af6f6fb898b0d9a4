"""Placement as a value: which slot holds which logical expert, and the `AddressBook` that turns experts into
slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

EMPTY = -1
"""A slot that holds no expert, and an id that chooses none."""


class Move(NamedTuple):
    """One expert copied into one slot of one layer; `source` holds it now, EMPTY: from disk."""

    layer: int  # position among the served layers
    slot: int
    expert: int
    source: int


@dataclass(frozen=True, eq=False)
class Placement:
    """Which logical expert each slot holds: `slots [L, S]`, S = owners x stride, EMPTY where none.

    An owner is a place that holds experts. Owner o has the slot numbers `o * S / owners` to `(o + 1) * S /
    owners`, of which the first `room[o]` exist; the others are EMPTY for ever. An owner without room (0) is a
    reserved place, or one whose member is lost. An expert in several slots is replicated. When experts are
    sliced (tensor parallel), the group is the one owner and every member holds its slice of every slot.

    `room` is () where every owner has all its numbers, and is then filled in. Raises ValueError when S does
    not divide by owners, an expert of a layer has no slot, or a slot beyond an owner's room holds one.
    """

    slots: NDArray[np.int32]
    owners: int
    experts: int  # E
    room: tuple[int, ...] = ()  # by owner: slots that it really has

    def __post_init__(self) -> None:
        slots = np.array(self.slots, dtype=np.int32)
        if slots.ndim != 2 or self.owners < 1 or slots.shape[1] % self.owners:
            raise ValueError(
                f"slots {list(slots.shape)} must be [layers, slots], "
                f"with slots a multiple of owners={self.owners}"
            )
        if slots.size and (slots.min() < EMPTY or slots.max() >= self.experts):
            raise ValueError(
                f"slots hold experts {slots.min()} to {slots.max()}; "
                f"a layer has experts 0 to {self.experts - 1}"
            )
        if slots.shape[0] and self.experts > slots.shape[1]:
            raise ValueError(f"{slots.shape[1]} slots hold no {self.experts} experts; every expert needs one")
        stride = slots.shape[1] // self.owners
        object.__setattr__(self, "room", tuple(self.room) or (stride,) * self.owners)
        self._check_room(slots, stride)
        for layer, row in enumerate(slots):
            if missing := sorted(set(range(self.experts)) - set(row.tolist())):
                raise ValueError(
                    f"layer {layer} has no slot for experts {missing[:8]}; every expert needs one"
                )
        slots.setflags(write=False)
        object.__setattr__(self, "slots", slots)

    def _check_room(self, slots: NDArray[np.int32], stride: int) -> None:
        if len(self.room) != self.owners or not all(0 <= room <= stride for room in self.room):
            raise ValueError(
                f"room {list(self.room)} must be 0 to {stride} slots for each of {self.owners} owners"
            )
        beyond = np.argwhere(~slots_within(self.room, stride) & (slots != EMPTY))
        if len(beyond):
            layer, slot = beyond[0].tolist()
            owner = slot // stride
            raise ValueError(
                f"owner {owner} has room for {self.room[owner]} experts, "
                f"and slot {slot} beyond it holds expert {slots[layer, slot]} at layer {layer}"
            )

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Placement)
            and (self.owners, self.room) == (other.owners, other.room)
            and np.array_equal(self.slots, other.slots)
        )

    def __hash__(self) -> int:
        return hash((self.owners, self.room, self.slots.tobytes()))

    @classmethod
    def even(cls, layers: int, experts: int, owners: int, reserved: int = 0) -> Placement:
        """Contiguous blocks in order; the first E mod owners hold one more, and an owner past E holds none.

        `reserved` more owners have no room.
        """
        width = -(-experts // owners)
        return cls.blocks(layers, experts, width, (width,) * owners + (0,) * reserved)

    @classmethod
    def blocks(cls, layers: int, experts: int, stride: int, room: tuple[int, ...]) -> Placement:
        """Contiguous blocks in order, as even as `room` lets them be, the first ones larger; others EMPTY.

        `stride` is how many slot numbers an owner has. Raises ValueError where `room` does not hold them.
        """
        if sum(room) < experts:
            raise ValueError(
                f"{experts} experts need a slot each, and the room of {len(room)} owners, {list(room)}, "
                f"is {sum(room)}"
            )
        row, first = np.full((len(room), stride), EMPTY, dtype=np.int32), 0
        for owner, count in enumerate(even_shares(experts, room)):
            row[owner, :count] = np.arange(first, first + count)
            first += count
        return cls(np.tile(row.ravel(), (layers, 1)), len(room), experts, room)

    def with_slots(self, slots: NDArray[np.int32]) -> Placement:
        """Other experts in the slots, `[L, S]`, of the same owners and room."""
        return replace(self, slots=slots)

    @property
    def usable(self) -> NDArray[np.bool_]:
        """Which slot numbers are slots that their owner has: [S]."""
        return slots_within(self.room, self.slots_per_owner)

    @property
    def layers(self) -> int:
        """L, the layers that are placed."""
        return int(self.slots.shape[0])

    @property
    def slots_per_owner(self) -> int:
        """The stride: slot numbers of one owner at one layer, of which it has the first `room`."""
        return int(self.slots.shape[1]) // self.owners

    def of_owner(self, layer: int, owner: int) -> NDArray[np.int32]:
        """Experts in the slots that `owner` has at `layer`: [room], EMPTY where none."""
        first = owner * self.slots_per_owner
        return self.slots[layer, first : first + self.room[owner]]

    def replicas(self, layer: int, expert: int) -> NDArray[np.int64]:
        """Slots that hold `expert` at `layer`, ascending."""
        return np.flatnonzero(self.slots[layer] == expert)

    def moves_to(self, other: Placement) -> tuple[Move, ...]:
        """What has to be copied to get to `other`: one move for each slot that gets another expert."""
        if self.slots.shape != other.slots.shape or self.owners != other.owners:
            raise ValueError(
                f"placements differ in size: {list(self.slots.shape)} on {self.owners} owners, "
                f"{list(other.slots.shape)} on {other.owners}"
            )
        changed = zip(*np.nonzero((self.slots != other.slots) & (other.slots != EMPTY)), strict=True)
        return tuple(
            Move(
                int(layer),
                int(slot),
                int(other.slots[layer, slot]),
                int(self.replicas(layer, other.slots[layer, slot])[0]),
            )
            for layer, slot in changed
        )

    def owner_load(self, load: NDArray[np.float64]) -> NDArray[np.float64]:
        """Tokens each owner gets, an expert's load `[L, E]` split evenly over its replicas: [L, owners]."""
        filled = self.slots != EMPTY
        copies = np.stack([np.bincount(row[row != EMPTY], minlength=self.experts) for row in self.slots])
        share = np.asarray(load, dtype=np.float64) / copies
        per_slot = np.where(filled, np.take_along_axis(share, np.where(filled, self.slots, 0), axis=1), 0.0)
        owners: NDArray[np.float64] = per_slot.reshape(self.layers, self.owners, -1).sum(axis=2)
        return owners

    def imbalance(self, load: NDArray[np.float64]) -> NDArray[np.float64]:
        """Largest over mean load of the owners that have room, of each layer under `load [L, E]`: [L].

        1 is even.
        """
        owners = self.owner_load(load)[:, np.array(self.room) > 0]
        mean = owners.mean(axis=1)
        return np.where(mean > 0, owners.max(axis=1) / np.where(mean > 0, mean, 1.0), 1.0)


def slots_within(room: Sequence[int], stride: int) -> NDArray[np.bool_]:
    """Which of `stride` slot numbers of each owner its `room` covers: [owners * stride]."""
    return np.asarray((np.arange(stride) < np.array(room, dtype=np.int64)[:, None]).ravel())


def even_shares(count: int, room: Sequence[int]) -> list[int]:
    """How many of `count` things each place of `room` gets: none above its room, else as even as they can be.

    The first places get one more where it does not divide. `room` must hold them.
    """
    level, left = 0, count
    while left > 0 and (wider := [at for at, each in enumerate(room) if each > level]):
        if left < len(wider):
            return [min(each, level) + (at in wider[:left]) for at, each in enumerate(room)]
        level, left = level + 1, left - len(wider)
    return [min(each, level) for each in room]
