"""The nouns an expert kernel works on: `ExpertShape`, `ExpertWeights`, `ExpertBatch`.

Letters used everywhere in moeserve: T tokens, K experts a token, H hidden, I inner (an expert's intermediate
size), E logical experts, S slots over all ranks, e slots of this rank, R rows received, C padded
capacity, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from moeserve.experts.activation import Activation
from moeserve.quant.format import Packed


class Grouping(Enum):
    """How rows of different experts stand in one tensor."""

    RAGGED = "ragged"
    """`[Rmax, H]` in slot order, `offsets [e + 1]` on the device; each segment starts at a multiple of the
    kernel's `row_align`, and rows outside the segments are undefined."""
    PADDED = "padded"
    """`[e, C, H]` with `counts [e]`; C is ranks x lane capacity, so it cannot overflow."""


@dataclass(frozen=True)
class ExpertShape:
    """What one expert of a layer looks like on one rank; `inner` is the slice's where experts are sliced."""

    hidden: int
    inner: int
    activation: Activation
    bias: bool = False

    @property
    def gate_up_rows(self) -> int:
        """Output rows of the first GEMM: 2I for a gated activation, else I."""
        return self.inner * (2 if self.activation.gated else 1)


@dataclass(frozen=True, eq=False)
class ExpertWeights:
    """Canonical weights of `e` experts: gate rows first, then up rows, never interleaved.

    Static activation scales (`input_scale`, `inner_scale`) travel with the expert, or are None.
    """

    gate_up: Packed  # [e, 2I, H]; [e, I, H] when the activation has no gate
    down: Packed  # [e, H, I]
    gate_up_bias: Tensor | None = None  # [e, 2I] float32
    down_bias: Tensor | None = None  # [e, H] float32; zero in every slice but slice 0
    input_scale: Tensor | None = None  # [e] float32
    inner_scale: Tensor | None = None  # [e] float32

    @property
    def experts(self) -> int:
        """How many experts these are."""
        return self.gate_up.shape[0]

    @property
    def hidden(self) -> int:
        """H, the size of a hidden state."""
        return self.gate_up.shape[-1]

    @property
    def inner(self) -> int:
        """I, the intermediate size of an expert, or of this rank's slice of it."""
        return self.down.shape[-1]

    @property
    def nbytes(self) -> int:
        """Bytes of every tensor, scales and biases included."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by name: `gate_up.codes`, `gate_up.scale`, `down.codes`, ..., `down_bias`."""
        named = {
            f"{side}.{part.name}": tensor
            for side, packed in (("gate_up", self.gate_up), ("down", self.down))
            for part, tensor in zip(packed.format.parts, packed.parts, strict=True)
        }
        loose = ((f.name, getattr(self, f.name)) for f in fields(self)[2:])
        return named | {name: tensor for name, tensor in loose if tensor is not None}

    def rows(self, index: Tensor | slice) -> ExpertWeights:
        """The experts that `index` picks, in its order."""
        loose = {f.name: getattr(self, f.name) for f in fields(self)[2:]}
        picked = {name: None if tensor is None else tensor[index] for name, tensor in loose.items()}
        return replace(self, gate_up=self.gate_up.rows(index), down=self.down.rows(index), **picked)

    def to(self, device: torch.device | str) -> ExpertWeights:
        """These experts with every tensor on `device`."""
        loose = {f.name: getattr(self, f.name) for f in fields(self)[2:]}
        moved = {name: None if tensor is None else tensor.to(device) for name, tensor in loose.items()}
        return replace(self, gate_up=self.gate_up.to(device), down=self.down.to(device), **moved)


class Tally(NamedTuple):
    """Rows of a step by slot, int32 `[e]`, and the sums of all steps to which they are yet to be added, int64
    `[e]`. taken: int64 `[1]`, likewise of rows of callers that a kernel took, whose number no host knows.
    """

    counts: Tensor
    totals: Tensor
    taken: Tensor

    def add(self) -> None:
        """Counts them: one small kernel."""
        self.totals.add_(self.counts)


@dataclass(frozen=True, eq=False)
class ExpertBatch:
    """Rows that arrived for this rank's slots. Nothing on the token path reads a count on the host."""

    tokens: Packed  # RAGGED [Rmax, H], PADDED [e, C, H]
    grouping: Grouping
    counts: Tensor  # [e] int32, valid rows a slot
    offsets: Tensor  # [e + 1] int32; slot i owns rows offsets[i] : offsets[i] + counts[i], PADDED: of [e * C]
    likely: float | None = None  # rows of a slot on average, as far as the host knows without counting

    @property
    def slots(self) -> int:
        """e, the slots that this rank holds."""
        return self.counts.shape[0]

    @property
    def rows_a_slot(self) -> float:
        """What tiles are chosen for: the rows a slot likely has; where that is not known, its room."""
        room = self.tokens.shape[:-1].numel() / max(1, self.slots)
        return room if self.likely is None else min(self.likely, room)

    @property
    def likely_rows(self) -> float:
        """What kernels are chosen for: rows that all slots likely have; where that is not known, their room.

        It says nothing of the rows that came, so that every step of a size runs the same kernel.
        """
        return self.tokens.shape[:-1].numel() if self.likely is None else self.likely * self.slots
