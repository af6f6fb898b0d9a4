"""`RankExperts`: the experts of one rank's slots, read from the checkpoint of their version and prepared."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Literal

import torch
from torch import Tensor

from moeserve.checkpoints.checkpoint import Checkpoint, CheckpointError
from moeserve.experts.bank import Bank
from moeserve.experts.batch import ExpertBatch
from moeserve.experts.checksum import Slot
from moeserve.experts.kernel import Kernel, KernelSpec
from moeserve.experts.placement import EMPTY
from moeserve.experts.routing.gate import Gate
from moeserve.runtime.epoch import Epoch, folder_and_mark
from moeserve.runtime.planning.plan import Plan
from moeserve.runtime.rank.weights.copies import Copier
from moeserve.runtime.rank.weights.peers import HeldExpert
from moeserve.runtime.served import Served
from moeserve.runtime.step import Job

log = logging.getLogger(__name__)

LayerProgress = Callable[[Iterable[int]], Iterable[int]]

Held = tuple[tuple[int, ...], int]
"""Experts by slot, EMPTY where none, and the version of their weights."""

Source = Literal["held", "shadow", "disk"]
"""Where a layer's missing experts are: in their slots, all of them in host memory, or some on disk."""


class RankExperts:
    """What the member of seat `index` holds, layer by layer; `plans` say how each layer is prepared."""

    def __init__(self, index: int, served: Served, plans: dict[int, Plan], device: str) -> None:
        self._index, self._served, self._plans, self._device = index, served, plans, device
        self.bank = Bank()
        self.bytes_read = 0
        self._weights: tuple[str, ...] = ("",)  # names by weights version, the first is 1
        self._opened: dict[int, Checkpoint] = {}  # by weights version, from 2 on
        self._held: dict[int, Held] = {}  # by layer
        self._built: dict[KernelSpec, Kernel] = {}
        self.kernels: dict[int, Kernel] = {}  # by layer; none where this member has no slots
        self._part = (0, 1)  # which slice of every expert this member holds, and of how many
        # an expert of a layer and version, prepared, in host memory; None where there is no such shadow
        self.shadow: Callable[[int, int, int], Slot | None] = lambda layer, expert, version: None
        self.bytes_from_shadows = 0
        self.on_held: Callable[[Epoch], None] = lambda epoch: None  # what is held has changed, for that epoch

    def load(self, epoch: Epoch, progress: LayerProgress) -> None:
        """Reads what `epoch` gives this member and it does not hold, from disk, and prepares it.

        At first that is its experts of every layer, and only those; after a change, the slots that differ.
        A member without slots reads nothing.
        """
        self._take_part(epoch)
        self._read_ahead(epoch, 0)
        for layer in progress(self._served.layers):
            position = self._served.layers.index(layer)
            self._read_ahead(epoch, position + 1)
            self._fill(epoch, position, None)
        self.on_held(epoch)

    def use(self, epoch: Epoch) -> None:
        """What this member holds is looked at by `epoch` from now on; nothing is read.

        Layers that are `missing` keep what they hold until `restore` has filled them.
        """
        self._take_part(epoch)
        for position in range(len(self._served.layers)):
            if not self._lacks(epoch, position):
                self._keep(epoch, position)
        self.on_held(epoch)

    @property
    def layers(self) -> tuple[int, ...]:
        """Decoder indices of the layers that are served, by position."""
        return self._served.layers

    def missing(self, epoch: Epoch) -> tuple[int, ...]:
        """Positions of the layers in which this member has a slot that does not hold what `epoch` says, in
        the order in which they are best restored: those with shadows first.
        """
        missing = [at for at in range(len(self._served.layers)) if self._lacks(epoch, at)]
        return tuple(sorted(missing, key=lambda at: self.source(epoch, at) == "disk"))

    def source(self, epoch: Epoch, position: int) -> Source:
        """Where `restore` would find what this member lacks of the layer at `position`."""
        if not self._lacks(epoch, position):
            return "held"
        layer, version = self._served.layers[position], epoch.version(position)
        lacking = self.lacking(epoch, position)
        shadowed = layer in self._held and all(self.shadow(layer, one, version) for one in lacking)
        return "shadow" if shadowed else "disk"

    def lacking(self, epoch: Epoch, position: int) -> tuple[int, ...]:
        """Experts that slots of the layer at `position` are to hold by `epoch`, and do not."""
        wanted = self._held_in(epoch, position)
        held = self._held.get(self._served.layers[position], ((), 0))
        return tuple(wanted[0][slot] for slot in _differing(held, wanted))

    def holds(self, slot: int, which: HeldExpert) -> bool:
        """Whether a slot holds that expert, and nothing is being written there; from any thread."""
        experts, version = self._held.get(which.layer, ((), 0))
        return version == which.version and slot < len(experts) and experts[slot] == which.expert

    def overwrite(self, layer: int, slots: Sequence[int]) -> None:
        """Slots of `layer` (decoder index) are about to be written: what they held does not count."""
        if layer in self._held:
            for slot in slots:
                self._note(layer, slot, EMPTY)

    def restore(self, epoch: Epoch, position: int, by: Copier | None = None) -> None:
        """Fills the slots of the layer at `position` that do not hold what `epoch` says, and no others.

        One thread may do so while steps of other layers run; none of this layer may, nor a change of the
        placement. `by` brings the experts to their slots on a stream of its own, so that steps need not wait
        for them; they are there when this returns. What was filled stays known when it ends early. Raises
        Abandoned once `by` is told so, and what reading a checkpoint raises.
        """
        lacking, started = len(self.lacking(epoch, position)), time.perf_counter()
        read, shadowed = self.bytes_read, self.bytes_from_shadows
        self._fill(epoch, position, by)
        megabytes = (self.bytes_from_shadows - shadowed) / 1e6, (self.bytes_read - read) / 1e6
        log.info(
            "rank %d: layer %d has %d experts more, %.1f MB of host memory and %.1f MB of disk, in %.3f s",
            *(self._index, self._served.layers[position], lacking, *megabytes),
            time.perf_counter() - started,
        )
        self._checkpoint(epoch.version(position)).unmap()
        self.on_held(epoch)

    def adopt(self, epoch: Epoch, position: int) -> None:
        """The slots of the layer at `position` hold what `epoch` says: its change has been committed."""
        self._held[self._served.layers[position]] = self._held_in(epoch, position)
        self.on_held(epoch)

    def invalidate(self, layer: int) -> None:
        """Forgets what `layer` (decoder index) holds, so that it is read again at the next load."""
        self._held.pop(layer, None)

    def read(self, layer: int, expert: int, version: int) -> Slot:
        """One expert of `layer` (decoder index) from the checkpoint of a version, as a slot holds it."""
        checkpoint = self._as_begun(version)
        before = checkpoint.bytes_read
        weights = checkpoint.experts(layer, [expert], part=self._part)
        self.bytes_read += checkpoint.bytes_read - before
        return self.kernels[layer].prepare(weights.to(self._device)).slot(0)

    def gate(self, layer: int) -> Gate:
        """How `layer` (decoder index) routes, by the checkpoint of the version it holds now."""
        return self.gate_and_version(layer)[0]

    def gate_and_version(self, layer: int) -> tuple[Gate, int]:
        """The same with that version; from any thread."""
        held = self._held.get(layer)
        version = 1 if held is None else held[1]
        return self._checkpoint(version).gate(layer), version

    def reroute(self, job: Job, version: int) -> None:
        """Chooses a job's experts anew where the correction bias of another version has chosen them. Raises
        what opening that checkpoint does.
        """
        if job.routed is not None and job.routed.version != version:
            job.experts, job.weights = self._checkpoint(version).gate(job.layer).route(job.routed.logits)
            job.routed = job.routed._replace(version=version)

    def use_weights(self, names: Sequence[str]) -> None:
        """Sets the names of the versions (`Epoch.names`); each is opened when it is first read from.

        Those that no layer holds are closed: a version that was abandoned may come again from another folder.
        """
        held = {version for _, version in list(self._held.values())}
        self._opened = {version: opened for version, opened in self._opened.items() if version in held}
        self._weights = tuple(names)

    def compute(self, layer: int, batch: ExpertBatch) -> Tensor:
        """What the experts of `layer` make of `batch`, in its shape; zeros where this member holds none."""
        if layer in self.kernels:
            return self.kernels[layer].apply(self.bank[layer], batch)
        return torch.zeros(batch.tokens.shape, dtype=self._served.dtype, device=batch.counts.device)

    def kernel_spec(self, plan: Plan) -> KernelSpec:
        """What the kernel of a plan is built for; layers of the same sizes share one."""
        return KernelSpec(plan.problem.scheme, plan.problem.shape, self._served.dtype)

    def _take_part(self, epoch: Epoch) -> None:
        """Reads slices of experts from now on, where `epoch` has them."""
        owner = epoch.members.at(self._index).owner
        self._part = (owner, epoch.mesh.slices) if epoch.mesh.sliced and owner is not None else (0, 1)

    def _lacks(self, epoch: Epoch, position: int) -> bool:
        """Whether a slot of the layer at `position` does not hold what `epoch` says, or there is no slot."""
        wanted, held = self._held_in(epoch, position), self._held.get(self._served.layers[position])
        if held is None:
            return bool(wanted[0])
        return bool(_differing(held, wanted))

    def _keep(self, epoch: Epoch, position: int) -> None:
        """Notes that the layer at `position` lacks nothing; a slot given up keeps its expert meanwhile."""
        layer = self._served.layers[position]
        wanted = self._held_in(epoch, position)
        held = self._held.get(layer, wanted)
        if held[1] == wanted[1] and len(held[0]) == len(wanted[0]):
            kept = zip(held[0], wanted[0], strict=True)
            wanted = tuple(old if new == EMPTY else new for old, new in kept), wanted[1]
        self._held[layer] = wanted

    def _fill(self, epoch: Epoch, position: int, by: Copier | None) -> None:
        """Fills what differs at one layer; the whole layer, where it has no slots yet or others."""
        layer, wanted = self._served.layers[position], self._held_in(epoch, position)
        held = self._held.get(layer)
        if held is None or len(held[0]) != len(wanted[0]) or (by is None and held[1] != wanted[1]):
            self._held.pop(layer, None)
            with nullcontext() if by is None else by.stream():
                self._load_layer(layer, wanted)
            if by is not None:
                by.wait()
            self._held[layer] = wanted
            return
        slots = _differing(held, wanted)
        if held[1] != wanted[1]:
            self._held[layer] = (EMPTY,) * len(wanted[0]), wanted[1]
        if by is not None:
            self._read_missing_ahead(epoch, position)
        for slot in slots:
            self._fill_slot(layer, slot, wanted[0][slot], by)
        self._keep(epoch, position)

    def _fill_slot(self, layer: int, slot: int, expert: int, by: Copier | None) -> None:
        """Brings `expert` into a slot of `layer`, which holds none meanwhile."""
        version = self._held[layer][1]
        self._note(layer, slot, EMPTY)
        found = self.shadow(layer, expert, version)
        if found is None:
            with nullcontext() if by is None else by.stream():
                found = self.read(layer, expert, version)
        else:
            self.bytes_from_shadows += sum(tensor.nbytes for tensor in found.values())
        self.bank.write(layer, slot, found, None if by is None else by.copy)
        self._note(layer, slot, expert)

    def _note(self, layer: int, slot: int, expert: int) -> None:
        experts, version = self._held[layer]
        self._held[layer] = (*experts[:slot], expert, *experts[slot + 1 :]), version

    def _read_ahead(self, epoch: Epoch, position: int) -> None:
        """Asks for the experts of the layer at `position`, while those of the layer before are prepared.

        The first layer is asked for too: a disk brings all its shards at once, and not one window after
        another.
        """
        if position >= len(self._served.layers) or self._served.layers[position] in self._held:
            return
        slots, version = self._held_in(epoch, position)
        layer = self._served.layers[position]
        self._checkpoint(version).read_ahead(layer, [expert for expert in slots if expert != EMPTY])

    def _read_missing_ahead(self, epoch: Epoch, position: int) -> None:
        """Asks for what has to be read for the layer at `position`, and for the next that lacks experts."""
        following = [at for at in self.missing(epoch) if at != position]
        for at in (position, *following[:1]):
            layer, version = self._served.layers[at], epoch.version(at)
            lacking = self.lacking(epoch, at)
            unread = [expert for expert in lacking if self.shadow(layer, expert, version) is None]
            self._checkpoint(version).read_ahead(layer, unread)

    def _load_layer(self, layer: int, wanted: Held) -> None:
        slots, version = wanted
        if not slots:
            return
        checkpoint, plan = self._as_begun(version), self._plans[layer]
        before, spec = checkpoint.bytes_read, self.kernel_spec(plan)
        if spec not in self._built:
            self._built[spec] = plan.kernel.build(spec)
        self.kernels[layer] = self._built[spec]
        weights = checkpoint.experts(layer, [e for e in slots if e != EMPTY], part=self._part)
        self.bank.load(layer, self.kernels[layer], weights, slots, self._device)
        self.bytes_read += checkpoint.bytes_read - before

    def _held_in(self, epoch: Epoch, position: int) -> Held:
        """Experts in the slots that this member has at a layer, and the version of their weights."""
        member, sliced = epoch.members.at(self._index), epoch.mesh.sliced
        held = epoch.slots_of(member)
        place = epoch.placement.of_owner(position, 0 if sliced or member.owner is None else member.owner)
        return tuple(place[:held].tolist()), epoch.version(position)

    def _checkpoint(self, version: int) -> Checkpoint:
        """The checkpoint of a version, opened; from any thread. Raises ValueError for one that is not of the
        same shapes.
        """
        if version == 1:
            return self._served.checkpoint
        found = self._opened.get(version)  # once: `use_weights` may close it meanwhile
        if found is None:
            folder, _ = folder_and_mark(self._weights[version - 1])
            found = self._opened[version] = self._served.reloaded_from(folder)
        return found

    def _as_begun(self, version: int) -> Checkpoint:
        """The checkpoint of a version, to read experts from. Raises CheckpointError where it holds others by
        now than those that the version began with, which other members hold; and as `_checkpoint`.
        """
        found, (_, mark) = self._checkpoint(version), folder_and_mark(self._weights[version - 1])
        if mark and found.mark != mark:
            raise CheckpointError(
                f"{found.path}: its experts are not those that weights version {version} began with: they "
                "were changed meanwhile, or this host has others there; put back what was there, reload "
                "(`moeserve reload`) while the other members serve, or start the service again"
            )
        return found


def _differing(held: Held, wanted: Held) -> tuple[int, ...]:
    """Slots in which `wanted` has an expert that `held` does not have there, of that version."""
    same = held[1] == wanted[1] and len(held[0]) == len(wanted[0])
    before = held[0] if same else (EMPTY,) * len(wanted[0])
    return tuple(
        slot for slot, (old, new) in enumerate(zip(before, wanted[0], strict=True)) if new not in (old, EMPTY)
    )
