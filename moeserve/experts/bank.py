"""This rank's prepared experts by layer and slot: `Bank`. The one home of expert weights that changes.

Storage is allocated when a layer is loaded and then changed in place, so a captured CUDA graph stays valid.
New experts are staged beside the slots while steps run, and copied into them between two steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from moeserve.device.huge_pages import empty_in_huge_pages
from moeserve.experts.batch import ExpertWeights
from moeserve.experts.checksum import Slot, slot_checksum, slot_checksums
from moeserve.experts.kernel import Kernel, Prepared
from moeserve.experts.placement import EMPTY

STAGING_SLOTS = 2
"""Slots that may be staged at a time, unless the bank is told otherwise."""


class StagingFull(ValueError):
    """More slots were staged than there is room for; commit or abandon, or make the epoch smaller."""


class Bank:
    """Prepared experts: `bank[layer]` is what the kernel of the decoder layer `layer` takes.

    One thread may stage and abandon while another reads slots; `commit` belongs to the reader, and comes when
    staging has ended.
    """

    def __init__(self, staging_slots: int = STAGING_SLOTS) -> None:
        self._staging_slots = staging_slots
        self._layers: dict[int, Prepared] = {}
        self._staged: dict[tuple[int, int], dict[str, Tensor]] = {}
        self._spare: list[dict[str, Tensor]] = []  # staging storage that is free again
        self._checksums: dict[tuple[int, int], str] = {}  # (layer, slot), of those read since they changed
        self._changes: Counter[tuple[int, int]] = Counter()  # by (layer, slot): that began, and that ended
        self._committed: torch.cuda.Event | None = None  # when the last commit's copies are done

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
        """Bytes of all slots and of the storage for staging."""
        return self.slots_nbytes + self.staging_nbytes

    @property
    def slots_nbytes(self) -> int:
        """Bytes of all slots of all layers."""
        return sum(prepared.nbytes for prepared in list(self._layers.values()))

    @property
    def staging_nbytes(self) -> int:
        """Bytes of the storage for staging, in use or kept for the next epoch."""
        staging = (*list(self._staged.values()), *self._spare)
        return sum(tensor.nbytes for tensors in staging for tensor in tensors.values())

    def load(
        self,
        layer: int,
        kernel: Kernel,
        weights: ExpertWeights,
        slots: Sequence[int] | np.ndarray,
        device: torch.device | str | None = None,
    ) -> None:
        """Prepares `weights` into the slots of `layer` on `device`, by default theirs, one expert at a time.

        `slots [e]` are the experts of this rank's slots; `weights`, in host memory or there, holds, in slot
        order, one expert for each that is not EMPTY. One expert at a time is brought to the device, so beside
        its slots it holds no more than that. An EMPTY slot is all zeros. A layer that is loaded again keeps
        its storage. ValueError: weights and slots of different number, or a second load of other shapes.
        """
        filled = [slot for slot, expert in enumerate(slots) if int(expert) != EMPTY]
        if len(filled) != weights.experts:
            raise ValueError(
                f"layer {layer}: {weights.experts} experts were given for {len(filled)} slots in use"
            )
        there = weights.gate_up.parts[0].device if device is None else device
        prepared = self._storage(layer, kernel.prepare(weights.rows(slice(0, 0)).to(there)), len(slots))
        for position, slot in enumerate(filled):
            expert = kernel.prepare(weights.rows(slice(position, position + 1)).to(there)).slot(0)
            for name, tensor in prepared.slot(slot).items():
                tensor.copy_(expert[name])
        for slot in set(range(len(slots))) - set(filled):
            for tensor in prepared.slot(slot).values():
                tensor.zero_()
        self._layers[layer] = prepared
        for slot in range(len(slots)):
            self._changed(layer, slot)

    def _storage(self, layer: int, like: Prepared, slots: int) -> Prepared:
        """Storage for `slots` slots shaped as `like`: the layer's own where it is loaded, else new."""
        if layer not in self._layers:
            storage = {name: _room_like(t, slots) for name, t in like.per_slot.items()}
            return Prepared(storage, like.shared)
        own = self._layers[layer]
        found, wanted = ({n: (t.dtype, *t.shape[1:]) for n, t in p.per_slot.items()} for p in (like, own))
        if found != wanted or slots != own.slots:
            raise ValueError(
                f"layer {layer} is loaded with {own.slots} slots of {wanted}; found {slots} of {found}"
            )
        return own

    def write(
        self,
        layer: int,
        slot: int,
        tensors: Slot,
        copy: Callable[[Sequence[tuple[Slot, Slot]]], None] | None = None,
    ) -> None:
        """Copies one expert's prepared `tensors` into slot `slot` of `layer`; while no step of it runs.

        `copy` brings pairs of a source and a target over, and returns when they are there; by default the
        tensors are copied in the order of the current stream. ValueError: no such slot, or tensors of another
        form.
        """
        target = self.slot(layer, slot)
        check_fits(f"slot {slot} of layer {layer}", tensors, target)
        self._changed(layer, slot)
        if copy is None:
            for name, own in target.items():
                own.copy_(tensors[name])
        else:
            copy([(tensors, target)])
        self._changed(layer, slot)

    def room(self, layer: int, slot: int) -> Slot:
        """Storage beside slot `slot` of `layer`, of its tensors' dtypes and shapes, for a mover to fill.

        What was staged there before is overwritten; the storage is kept for the next epoch. StagingFull: no
        room. ValueError: no such slot.
        """
        target = self.slot(layer, slot)
        if (layer, slot) not in self._staged:
            if len(self._staged) >= self._staging_slots:
                raise StagingFull(
                    f"slot {slot} of layer {layer} cannot be staged: staging_slots={self._staging_slots} "
                    "are in use; commit or abandon them, or raise staging_slots"
                )
            self._staged[layer, slot] = self._storage_like(target)
        return self._staged[layer, slot]

    def _storage_like(self, target: Slot) -> dict[str, Tensor]:
        for at, spare in enumerate(self._spare):
            if _forms(spare) == _forms(target):
                return self._spare.pop(at)
        return {name: torch.empty_like(own) for name, own in target.items()}

    def stage(self, layer: int, slot: int, tensors: Slot) -> str:
        """Copies one expert's prepared `tensors` beside slot `slot` of `layer` and returns its checksum.

        Staging a slot again replaces what was staged. StagingFull: no room. ValueError: no such slot, or a
        tensor that is missing, unknown, or of another dtype or shape than the slot's.
        """
        check_fits(f"slot {slot} of layer {layer}", tensors, self.slot(layer, slot))
        room = self.room(layer, slot)
        for name, own in room.items():
            own.copy_(tensors[name])
        return slot_checksum(room)

    @property
    def staged(self) -> tuple[tuple[int, int], ...]:
        """(layer, slot) of everything staged."""
        return tuple(sorted(self._staged))

    def commit(self) -> int:
        """Copies everything staged into its slot, in place; between steps only. Returns the slots changed."""
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for (layer, slot), tensors in self._staged.items():
            self._changed(layer, slot)
            own = self.slot(layer, slot)
            targets += own.values()
            sources += [tensors[name] for name in own]
        if targets:
            torch._foreach_copy_(targets, sources, non_blocking=True)
        committed = len(self._staged)
        if targets and targets[0].is_cuda:
            self._committed = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._committed.record()
        self.abandon()
        return committed

    def after_commit(self, stream: torch.cuda.Stream) -> None:
        """Whatever comes next on `stream` sees the slots, and may overwrite staging, as the last commit left
        them.
        """
        if self._committed is not None:
            stream.wait_event(self._committed)

    def abandon(self) -> None:
        """Drops everything staged; the slots were never touched. Its storage serves the next epoch."""
        kept = (*self._spare, *self._staged.values())
        self._spare = list(kept[: self._staging_slots])
        self._staged = {}

    def allow(self, staging_slots: int) -> None:
        """How many slots may be staged from now on; storage beyond it is given back."""
        self._staging_slots = staging_slots
        del self._spare[staging_slots:]

    def checksum(self, layer: int, slot: int) -> str:
        """Checksum over every tensor of a slot; equal on ranks that hold the same expert in the same form."""
        return slot_checksum(self.slot(layer, slot))

    def checksums(self, layer: int, slots: Sequence[int]) -> list[str]:
        """Checksums of several slots; each slot is read once after it was written, however often one asks."""
        unknown = [slot for slot in slots if (layer, slot) not in self._checksums]
        changes = [self._changes[layer, slot] for slot in unknown]
        found = dict(zip(unknown, slot_checksums([self.slot(layer, slot) for slot in unknown]), strict=True))
        known = {slot: self._checksums.get((layer, slot)) for slot in slots}
        for slot, before in zip(unknown, changes, strict=True):
            if self._changes[layer, slot] == before:  # else it was written meanwhile, and is read again
                self._checksums[layer, slot] = found[slot]
        return [found.get(slot) or known[slot] or self.checksum(layer, slot) for slot in slots]

    def checksums_now(self, layer: int, slots: Sequence[int]) -> list[str]:
        """Checksums of several slots as they are now, which may be written meanwhile; none is remembered."""
        return slot_checksums([self.slot(layer, slot) for slot in slots])

    def _changed(self, layer: int, slot: int) -> None:
        """A slot is about to be written, or has been: what was read of it does not count."""
        self._changes[layer, slot] += 1
        self._checksums.pop((layer, slot), None)

    def slot(self, layer: int, slot: int) -> Slot:
        """The tensors of slot `slot` of `layer`, in place. ValueError: no such slot."""
        prepared = self[layer]
        if not 0 <= slot < prepared.slots:
            raise ValueError(f"slot {slot} of layer {layer} must be between 0 and {prepared.slots - 1}")
        return prepared.slot(slot)


def check_fits(where: str, tensors: Slot, target: Slot) -> None:
    """ValueError where `tensors` lacks one of `target`'s, has another, or one of another dtype or shape."""
    if tensors.keys() != target.keys():
        raise ValueError(f"{where} holds {sorted(target)}; found {sorted(tensors)}")
    for name, own in target.items():
        given = tensors[name]
        if given.dtype != own.dtype or given.shape != own.shape:
            expected = f"{own.dtype} {list(own.shape)}"
            raise ValueError(f"{name} of {where} must be {expected}; found {given.dtype} {list(given.shape)}")


def _room_like(tensor: Tensor, slots: int) -> Tensor:
    """Storage for so many slots, of each of which `tensor` has one."""
    shape = (slots, *tensor.shape[1:])
    if tensor.device.type != "cpu":
        return tensor.new_empty(shape)
    return empty_in_huge_pages(shape, tensor.dtype)


def _forms(tensors: Slot) -> dict[str, tuple[object, ...]]:
    return {name: (t.dtype, *t.shape, t.device) for name, t in tensors.items()}
