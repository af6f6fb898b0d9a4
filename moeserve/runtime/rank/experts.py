"""`RankExperts`: the experts of one rank's slots, read from the checkpoint of their version and prepared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from moeserve.checkpoints.checkpoint import Checkpoint
from moeserve.experts.bank import Bank
from moeserve.experts.batch import ExpertBatch
from moeserve.experts.checksum import Slot
from moeserve.experts.kernel import Kernel, KernelSpec
from moeserve.experts.placement import EMPTY
from moeserve.experts.routing.gate import Gate
from moeserve.runtime.epoch import Epoch
from moeserve.runtime.planning.plan import Plan
from moeserve.runtime.served import Served

LayerProgress = Callable[[Iterable[int]], Iterable[int]]

Held = tuple[tuple[int, ...], int]
"""Experts by slot, EMPTY where none, and the version of their weights."""


class RankExperts:
    """What the member of seat `index` holds, layer by layer; `plans` say how each layer is prepared."""

    def __init__(self, index: int, served: Served, plans: dict[int, Plan], device: str) -> None:
        self._index, self._served, self._plans, self._device = index, served, plans, device
        self.bank = Bank()
        self.bytes_read = 0
        self._weights: tuple[str, ...] = ("",)  # checkpoint folders by weights version, the first is 1
        self._opened: dict[int, Checkpoint] = {}  # by weights version, from 2 on
        self._held: dict[int, Held] = {}  # by layer
        self._built: dict[KernelSpec, Kernel] = {}
        self.kernels: dict[int, Kernel] = {}  # by layer; none where this member has no slots
        self._part = (0, 1)  # which slice of every expert this member holds, and of how many

    def load(self, epoch: Epoch, progress: LayerProgress) -> None:
        """Reads what `epoch` gives this member and it does not hold, from disk, and prepares it.

        At first that is its experts of every layer, and only those; after a change, the slots that differ.
        A member without slots reads nothing.
        """
        owner = epoch.members.at(self._index).owner
        self._part = (owner, epoch.mesh.slices) if epoch.mesh.sliced and owner is not None else (0, 1)
        self._read_ahead(epoch, 0)
        for layer in progress(self._served.layers):
            self._read_ahead(epoch, self._served.layers.index(layer) + 1)
            wanted = self._held_in(epoch, self._served.layers.index(layer))
            held = self._held.pop(layer, None)
            if held is None or held[1] != wanted[1] or len(held[0]) != len(wanted[0]):
                self._load_layer(layer, wanted)
            else:
                for slot, (old, new) in enumerate(zip(held[0], wanted[0], strict=True)):
                    if new not in (old, EMPTY):
                        self.bank.write(layer, slot, self.read(layer, new, wanted[1]))
            self._held[layer] = wanted

    def adopt(self, epoch: Epoch, position: int) -> None:
        """The slots of the layer at `position` hold what `epoch` says: its change has been committed."""
        self._held[self._served.layers[position]] = self._held_in(epoch, position)

    def invalidate(self, layer: int) -> None:
        """Forgets what `layer` (decoder index) holds, so that it is read again at the next load."""
        self._held.pop(layer, None)

    def read(self, layer: int, expert: int, version: int) -> Slot:
        """One expert of `layer` (decoder index) from the checkpoint of a version, as a slot holds it."""
        checkpoint = self._checkpoint(version)
        before = checkpoint.bytes_read
        weights = checkpoint.experts(layer, [expert], part=self._part)
        self.bytes_read += checkpoint.bytes_read - before
        return self.kernels[layer].prepare(weights.to(self._device)).slot(0)

    def gate(self, layer: int) -> Gate:
        """How `layer` (decoder index) routes, by the checkpoint of the version it holds now."""
        held = self._held.get(layer)
        return self._checkpoint(1 if held is None else held[1]).gate(layer)

    def use_weights(self, paths: Sequence[str]) -> None:
        """Sets the folder of each version's checkpoint; each is opened when it is first read from.

        Those that no layer holds are closed: a version that was abandoned may come again from another folder.
        """
        held = {version for _, version in list(self._held.values())}
        self._opened = {version: opened for version, opened in self._opened.items() if version in held}
        self._weights = tuple(paths)

    def compute(self, layer: int, batch: ExpertBatch) -> Tensor:
        """What the experts of `layer` make of `batch`, in its shape; zeros where this member holds none."""
        if layer in self.kernels:
            return self.kernels[layer].apply(self.bank[layer], batch)
        return torch.zeros(batch.tokens.shape, dtype=self._served.dtype, device=batch.counts.device)

    def kernel_spec(self, plan: Plan) -> KernelSpec:
        """What the kernel of a plan is built for; layers of the same sizes share one."""
        return KernelSpec(plan.problem.scheme, plan.problem.shape, self._served.dtype)

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

    def _load_layer(self, layer: int, wanted: Held) -> None:
        slots, version = wanted
        if not slots:
            return
        checkpoint, plan = self._checkpoint(version), self._plans[layer]
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
        """The checkpoint of a version, opened. Raises ValueError for one that is not of the same shapes."""
        if version == 1:
            return self._served.checkpoint
        if version not in self._opened:
            self._opened[version] = self._served.reloaded_from(self._weights[version - 1])
        return self._opened[version]
