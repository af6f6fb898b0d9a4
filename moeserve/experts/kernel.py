"""The expert kernel contract: `Kernel`, its `Prepared` weights, and `KernelEntry`, what a kernel can do.

Kernels that compute on the same prepared weights have one `form`. Those of them that serve together are a
`KernelFamily`; which one serves steps of how many rows is the plan's choice (`spans.py`), never a kernel's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import inf
from typing import Protocol

import torch
from torch import Tensor

from moeserve.device.machine import Machine
from moeserve.experts.activation import Activation
from moeserve.experts.batch import ExpertBatch, ExpertShape, ExpertWeights, Grouping
from moeserve.quant.format import Format, Packed, Scheme
from moeserve.quant.formats.floats import FLOATS

PLAIN = frozenset(FLOATS.values())
"""Formats without scales, which cast into each other."""


@dataclass(frozen=True)
class Problem:
    """What a plan is asked for: one layer's experts, and how tokens reach them."""

    scheme: Scheme
    model_format: Format  # of hidden states and answers
    shape: ExpertShape  # of this rank: inner is the slice's size when experts are sliced
    experts: int  # E
    lanes: int  # most that bring rows, reserved ones counted
    owners: int  # most that hold experts, reserved ones counted; every member when experts are sliced
    top_k: int
    lane_rows: int  # most rows one lane brings to a step
    sliced: bool = (
        False  # every rank holds a slice of every expert (tensor parallel) instead of whole experts
    )
    redundant: int = 0  # slots for replicas, over all owners
    reserved_lanes: int = 0  # of `lanes`: that no member has yet
    reserved_owners: int = 0  # of `owners`: that no member is yet
    split: bool = False  # some members only bring rows, or only hold experts

    def __post_init__(self) -> None:
        if self.reserved_owners >= self.owners or self.reserved_lanes > self.lanes:
            raise ValueError(
                f"{self.reserved_lanes} of {self.lanes} lanes and {self.reserved_owners} of {self.owners} "
                "owners are reserved; at least one owner must be there"
            )

    @property
    def equal(self) -> bool:
        """Whether every member is both a lane and an owner, and no place is reserved."""
        reserved = self.reserved_lanes or self.reserved_owners
        return self.lanes == self.owners and not (reserved or self.split)

    @property
    def slots(self) -> int:
        """Most experts an owner holds, replicas counted and staging not."""
        return self.experts if self.sliced else -(-(self.experts + self.redundant) // self.owners_here)

    @property
    def lanes_here(self) -> int:
        """Lanes that are not only reserved."""
        return self.lanes - self.reserved_lanes

    @property
    def owners_here(self) -> int:
        """Owners that are not only reserved."""
        return self.owners - self.reserved_owners

    @property
    def step_rows(self) -> int:
        """Most rows that all lanes bring to a step together."""
        return self.lanes * self.lane_rows

    @property
    def pairs_a_row(self) -> Fraction:
        """(token, expert) pairs that one owner likely computes for each row that a lane brings to a step."""
        return Fraction(self.top_k, 1 if self.sliced else self.owners_here)


@dataclass(frozen=True, eq=False)
class Prepared:
    """Weights in a kernel's own form. Storage is allocated once and changed in place, slot by slot.

    Law: `prepare(w).slot(i)` equals `prepare(w.rows([i])).slot(0)`, so an expert moves and is checksummed
    alone; `prepare` takes zero experts too.
    """

    per_slot: Mapping[str, Tensor]  # each [slots, ...]
    shared: Mapping[str, Tensor] = field(default_factory=dict)

    def slot(self, index: int) -> dict[str, Tensor]:
        """The tensors of one slot, as views."""
        return {name: tensor[index] for name, tensor in self.per_slot.items()}

    @property
    def slots(self) -> int:
        """How many experts it has storage for."""
        return next(iter(self.per_slot.values())).shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, per slot and shared."""
        return sum(t.nbytes for t in (*self.per_slot.values(), *self.shared.values()))


class Kernel(Protocol):
    """Computes experts: row in, row out, unweighted (router weights belong to the dispatcher's combine)."""

    def prepare(self, weights: ExpertWeights) -> Prepared:
        """Brings canonical weights into this kernel's form, on their device."""

    def apply(self, prepared: Prepared, batch: ExpertBatch) -> Tensor:
        """Runs the experts: RAGGED -> [Rmax, H], PADDED -> [e, C, H], dtype `out_dtype`.

        Rows outside the segments are undefined in the batch and in the answer.
        """


@dataclass(frozen=True)
class KernelSpec:
    """What a kernel is built for: scheme, shape, and the dtype of its outputs (the model's)."""

    scheme: Scheme
    shape: ExpertShape
    out_dtype: torch.dtype

    def fit(self, weights: ExpertWeights) -> ExpertWeights:
        """`weights` in the scheme's format, checked against the shape; what `prepare` starts from.

        Plain floats are cast to the scheme's plain float: a checkpoint is served in the dtype that was
        asked for. Raises ValueError for any other format, a wrong shape, and biases or static activation
        scales that are missing or too many.
        """
        gate_up = self._fit("gate_up", weights.gate_up, (self.shape.gate_up_rows, self.shape.hidden))
        down = self._fit("down", weights.down, (self.shape.hidden, self.shape.inner))
        for name, bias in (("gate_up_bias", weights.gate_up_bias), ("down_bias", weights.down_bias)):
            if (bias is not None) != self.shape.bias:
                found = "missing" if bias is None else "given"
                raise ValueError(f"{name} is {found}, and the expert's shape says bias={self.shape.bias}")
        self._check_static_scales(weights)
        return replace(weights, gate_up=gate_up, down=down)

    def _check_static_scales(self, weights: ExpertWeights) -> None:
        activations = self.scheme.activations
        for name, scale in (("input_scale", weights.input_scale), ("inner_scale", weights.inner_scale)):
            if activations.given is None and scale is not None:
                found = f"{activations} activations scale each row themselves"
                raise ValueError(f"static activation scales were given, and {found}")
            if activations.given is not None and (scale is None or scale.shape != (weights.experts,)):
                found = "missing" if scale is None else f"of shape {list(scale.shape)}"
                raise ValueError(f"{activations} activations need {name} [{weights.experts}]; it is {found}")

    def _fit(self, side: str, packed: Packed, size: tuple[int, int]) -> Packed:
        wanted = self.scheme.weights
        if tuple(packed.shape[1:]) != size:
            raise ValueError(f"{side} must be [e, {size[0]}, {size[1]}]; found {list(packed.shape)}")
        if packed.format == wanted:
            return packed
        if not {packed.format, wanted} <= PLAIN:
            raise ValueError(f"{side} is stored as {packed.format}; scheme {self.scheme} needs {wanted}")
        return wanted.quantize(packed.parts[0])


@dataclass(frozen=True)
class KernelRange:
    """The steps that a kernel was measured to be the fastest of its family with.

    They are told by their pairs: the (token, expert) pairs that a rank computes, as far as the host knows
    without counting. Pairs a slot are these over the rank's slots. All bounds belong to the range.
    """

    kernel: str
    from_slot_pairs: float = 0.0
    up_to_slot_pairs: float = inf
    up_to_pairs: float = inf

    def bounds(self, slots: int) -> tuple[float, float]:
        """Fewest and most pairs of a rank of `slots` slots."""
        return self.from_slot_pairs * slots, min(self.up_to_slot_pairs * slots, self.up_to_pairs)


@dataclass(frozen=True)
class KernelFamily:
    """Kernels on one prepared form that serve together, under the name by which all of them are pinned.

    `ranges` gives, for a device's name, what was measured: the first range that covers a step and whose
    kernel serves here decides. A kernel of another family may stand among them, if it has the same form.
    """

    name: str
    ranges: Callable[[str], Sequence[KernelRange]]


@dataclass(frozen=True)
class KernelEntry:
    """What one kernel can do, as data. `refuses` is the join's condition, and says why in one line.

    A kernel computes steps of any number of rows rightly; a family's ranges say where it is the fastest.
    """

    name: str
    build: Callable[[KernelSpec], Kernel]
    schemes: frozenset[Scheme]
    eats: frozenset[Format]  # wire formats it takes as they arrive
    groupings: frozenset[Grouping]
    activations: frozenset[str]
    archs: frozenset[str]
    modules: frozenset[str] = frozenset()
    multiple_of: tuple[int, int] = (1, 1)  # of hidden and inner: what suits every scheme
    looser: Mapping[Scheme, tuple[int, int]] = field(default_factory=dict)  # of schemes that ask for less
    row_align: int = 1
    fewer_activations: Mapping[Scheme, frozenset[str]] = field(default_factory=dict)  # of schemes without all
    settings: Mapping[Scheme, frozenset[Activation]] = field(default_factory=dict)  # where fixed
    unbiased: frozenset[Scheme] = frozenset()  # schemes that it has no biases with
    most_slots: int = 0  # of a rank; 0: any number
    bf16_sums: bool = False  # of the first GEMM, before they are activated and rounded again
    bf16_answers: bool = False  # whatever dtype is asked for
    e4m3_sums: frozenset[Scheme] = frozenset()  # whose products are of E4M3, which Hopper adds with few bits
    rounded_products: Mapping[Scheme, Format] = field(
        default_factory=dict
    )  # floats that decoded weights or rows are rounded to, where products lose by it
    fewer_schemes: Mapping[str, frozenset[Scheme]] = field(
        default_factory=dict
    )  # by arch, where not all of them
    apart: bool = False  # keeps nothing between launches that those of two tracks would share
    reference: bool = False  # judges the others; on a GPU it wins only when named
    verified: tuple[str, ...] = ()  # architectures it has really run on
    form: str = ""  # of prepared weights, the same tensors for all kernels of one; empty: nobody else's
    family: KernelFamily | None = None  # None: it serves alone

    @property
    def pinned_as(self) -> str:
        """The name that a plan tries it under: its family's, or its own."""
        return self.name if self.family is None else self.family.name

    def refuses(self, problem: Problem, machine: Machine) -> str | None:
        """Why this kernel cannot serve `problem` on `machine`, or None."""
        shape = problem.shape
        if machine.arch not in self.archs:
            return f"runs on {_names(self.archs)}, not on {machine.arch}"
        if missing := self.modules - machine.modules:
            return f"needs the package {_names(missing)}"
        schemes = self.fewer_schemes.get(machine.arch, self.schemes)
        if problem.scheme not in schemes:
            return f"computes {_names(schemes)} on {machine.arch}, not {problem.scheme}"
        if shape.activation.name not in self.fewer_activations.get(problem.scheme, self.activations):
            return f"has no activation {shape.activation.name}{self._for(problem.scheme)}"
        if shape.activation not in self.settings.get(problem.scheme, {shape.activation}):
            return f"computes {problem.scheme} with fixed parameters, not {shape.activation}"
        if shape.bias and problem.scheme in self.unbiased:
            return f"adds no biases to {problem.scheme} experts"
        if self.most_slots and problem.slots > self.most_slots:
            return f"holds at most {self.most_slots} experts a rank, not {problem.slots}"
        h, i = self.looser.get(problem.scheme, self.multiple_of)
        if shape.hidden % h or shape.inner % i:
            return f"H={shape.hidden} and I={shape.inner} must be multiples of {h} and {i}"
        return None

    def _for(self, scheme: Scheme) -> str:
        return f" for {scheme}" if scheme in self.fewer_activations else ""


def _names(values: object) -> str:
    return ", ".join(sorted(str(v) for v in values))  # type: ignore[attr-defined]
