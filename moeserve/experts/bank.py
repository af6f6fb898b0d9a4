"""This rank's prepared experts by layer and slot: `Bank`. The one home of expert weights that changes.

Storage is allocated when a layer is loaded and then changed in place, so a captured CUDA graph stays valid.
New experts are staged beside the slots while steps run, and copied into them between two steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from moeserve.experts.batch import ExpertWeights
from moeserve.experts.kernel import Kernel, Prepared
from moeserve.experts.placement import EMPTY

Slot = Mapping[str, Tensor]
"""The tensors of one slot by name, as `Prepared.slot` gives them."""

STAGING_SLOTS = 2
"""Slots that may be staged at a time, unless the bank is told otherwise."""


class StagingFull(ValueError):
    """More slots were staged than there is room for; commit or abandon, or make the epoch smaller."""


class Bank:
    """Prepared experts: `bank[layer]` is what the kernel of the decoder layer `layer` takes."""

    def __init__(self, staging_slots: int = STAGING_SLOTS) -> None:
        self._staging_slots = staging_slots
        self._layers: dict[int, Prepared] = {}
        self._staged: dict[tuple[int, int], dict[str, Tensor]] = {}

    def __getitem__(self, layer: int) -> Prepared:
        """The experts of `layer`. KeyError, with the layers there are."""
        if layer not in self._layers:
            raise KeyError(f"layer {layer} is not in the bank; layers: {sorted(self._layers)}")
        return self._layers[layer]

    def __contains__(self, layer: int) -> bool:
        return layer in self._layers

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers loaded, in ascending order."""
        return tuple(sorted(self._layers))

    @property
    def nbytes(self) -> int:
        """Bytes of all slots and of what is staged."""
        staged = sum(tensor.nbytes for tensors in self._staged.values() for tensor in tensors.values())
        return staged + sum(prepared.nbytes for prepared in self._layers.values())

    def load(
        self, layer: int, kernel: Kernel, weights: ExpertWeights, slots: Sequence[int] | np.ndarray
    ) -> None:
        """Prepares `weights` into the slots of `layer`, one expert at a time.

        `slots [e]` are the experts of this rank's slots; `weights` holds, in slot order, one expert for
        each that is not EMPTY. An EMPTY slot is all zeros. A layer that is loaded again keeps its storage.
        ValueError: weights and slots of different number, or a second load of other shapes.
        """
        filled = [slot for slot, expert in enumerate(slots) if int(expert) != EMPTY]
        if len(filled) != weights.experts:
            raise ValueError(
                f"layer {layer}: {weights.experts} experts were given for {len(filled)} slots in use"
            )
        prepared = self._storage(layer, kernel.prepare(weights.rows(slice(0, 0))), len(slots))
        for position, slot in enumerate(filled):
            expert = kernel.prepare(weights.rows(slice(position, position + 1))).slot(0)
            for name, tensor in prepared.slot(slot).items():
                tensor.copy_(expert[name])
        for slot in set(range(len(slots))) - set(filled):
            for tensor in prepared.slot(slot).values():
                tensor.zero_()
        self._layers[layer] = prepared

    def _storage(self, layer: int, like: Prepared, slots: int) -> Prepared:
        """Storage for `slots` slots shaped as `like`: the layer's own where it is loaded, else new."""
        if layer not in self._layers:
            storage = {name: t.new_empty((slots, *t.shape[1:])) for name, t in like.per_slot.items()}
            return Prepared(storage, like.shared)
        own = self._layers[layer]
        found, wanted = ({n: (t.dtype, *t.shape[1:]) for n, t in p.per_slot.items()} for p in (like, own))
        if found != wanted or slots != own.slots:
            raise ValueError(
                f"layer {layer} is loaded with {own.slots} slots of {wanted}; found {slots} of {found}"
            )
        return own

    def stage(self, layer: int, slot: int, tensors: Slot) -> str:
        """Copies one expert's prepared `tensors` beside slot `slot` of `layer` and returns its checksum.

        Staging a slot again replaces what was staged. StagingFull: no room. ValueError: no such slot, or a
        tensor that is missing, unknown, or of another dtype or shape than the slot's.
        """
        target = self._slot(layer, slot)
        if (layer, slot) not in self._staged and len(self._staged) >= self._staging_slots:
            raise StagingFull(
                f"slot {slot} of layer {layer} cannot be staged: staging_slots={self._staging_slots} "
                "are in use; commit or abandon them, or raise staging_slots"
            )
        where = f"slot {slot} of layer {layer}"
        if tensors.keys() != target.keys():
            raise ValueError(f"{where} holds {sorted(target)}; found {sorted(tensors)}")
        for name, own in target.items():
            given = tensors[name]
            if given.dtype != own.dtype or given.shape != own.shape:
                expected = f"{own.dtype} {list(own.shape)}"
                raise ValueError(
                    f"{name} of {where} must be {expected}; found {given.dtype} {list(given.shape)}"
                )
        copies = {name: torch.empty_like(own).copy_(tensors[name]) for name, own in target.items()}
        self._staged[layer, slot] = copies
        return slot_checksum(copies)

    @property
    def staged(self) -> tuple[tuple[int, int], ...]:
        """(layer, slot) of everything staged."""
        return tuple(sorted(self._staged))

    def commit(self) -> int:
        """Copies everything staged into its slot, in place; between steps only. Returns the slots changed."""
        for (layer, slot), tensors in self._staged.items():
            for name, own in self._slot(layer, slot).items():
                own.copy_(tensors[name])
        committed = len(self._staged)
        self._staged = {}
        return committed

    def abandon(self) -> None:
        """Drops everything staged; the slots were never touched."""
        self._staged = {}

    def checksum(self, layer: int, slot: int) -> str:
        """Checksum over every tensor of a slot; equal on ranks that hold the same expert in the same form."""
        return slot_checksum(self._slot(layer, slot))

    def _slot(self, layer: int, slot: int) -> dict[str, Tensor]:
        prepared = self[layer]
        if not 0 <= slot < prepared.slots:
            raise ValueError(f"slot {slot} of layer {layer} must be between 0 and {prepared.slots - 1}")
        return prepared.slot(slot)


def slot_checksum(tensors: Slot) -> str:
    """BLAKE2b-128, in hex, of names, dtypes, shapes and raw bytes (codes, scales, biases), on any device."""
    digest = blake2b(digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.view(-1).view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest()
