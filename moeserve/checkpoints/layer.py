"""The experts of one decoder layer as they lie in the file: `StoredLayer` finds and checks their matrices."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import isinf

import torch

from moeserve.checkpoints.dialects.dialect import Storage
from moeserve.checkpoints.families.family import ModelFamily
from moeserve.checkpoints.load_as import check_groups, keeps
from moeserve.checkpoints.names import LayerNames
from moeserve.checkpoints.nearest import in_its_place
from moeserve.checkpoints.read_ahead import Span
from moeserve.checkpoints.store import CheckpointError, TensorStore
from moeserve.checkpoints.stored import StoredMatrix, StoredTensor, bias_name
from moeserve.quant.format import WHOLE, Scheme

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExpertMatrices:
    """Projections of one expert or slice: down, and gate and up, one matrix of both, or up alone."""

    gate_up: tuple[StoredMatrix, ...]
    down: StoredMatrix
    interleaved: bool = False  # gate and up rows stand as g0, u0, g1, u1, ... in one matrix

    def __iter__(self) -> Iterator[StoredMatrix]:
        return iter((*self.gate_up, self.down))


@dataclass(frozen=True)
class StoredLayer:
    """How and where one layer stores its experts."""

    store: TensorStore
    names: LayerNames
    family: ModelFamily
    storage: Storage
    experts: int  # E
    hidden: int  # H
    inner: int  # I, whole
    gated: bool = True  # experts have a gate beside up
    load_as: Scheme | None = None  # what experts become while they are loaded

    @property
    def scheme(self) -> Scheme:
        """The formats that experts of this layer have once they are loaded."""
        stored = self.storage.scheme
        if self.load_as is None:
            return stored
        weights = stored.weights if self.load_as.weights == stored.weights else self.load_as.weights
        return Scheme(weights, self.load_as.activations)

    def expert(self, expert: int, inner: slice) -> ExpertMatrices:
        """Returns the matrices of `expert`, cut to `inner`: rows of gate and up, columns of down."""
        gate, up, down = self.names.projections(expert)
        hidden, one, other = slice(0, self.hidden), (self.inner, self.hidden), (self.hidden, self.inner)
        both, stack = (2 * self.inner, self.hidden), (expert, self.experts)
        rows = [inner, slice(self.inner + inner.start, self.inner + inner.stop)]
        if not self.gated:
            both, rows = one, [inner]
        if not self.names.stacked:
            stacks = self.names.stacks()
            places = [StoredMatrix(self.store, stacks[0], both, each, hidden, stack) for each in rows]
            places.append(StoredMatrix(self.store, stacks[1], other, hidden, inner, stack))
            halves = tuple(
                StoredMatrix(self.store, name, one, inner, hidden, beside=place)
                for name, place in zip((gate, up), places[:-1], strict=False)
            )
            return ExpertMatrices(
                halves, StoredMatrix(self.store, down, other, hidden, inner, beside=places[-1])
            )
        return self._stacked(expert, inner, both, rows)

    def _stacked(self, expert: int, inner: slice, both: tuple[int, int], rows: list[slice]) -> ExpertMatrices:
        """The matrices of an expert where one tensor holds all experts."""
        gate, up, down = self.names.projections(expert)
        hidden, stack, flat = slice(0, self.hidden), (expert, self.experts), self.names.form.flat
        first = (expert, self._experts_in(gate))
        turned = self.transposed
        last = StoredMatrix(
            *(self.store, down, (self.hidden, self.inner), hidden, inner, stack, turned or flat), flat=flat
        )
        if gate != up:
            one = (self.inner, self.hidden)
            apart = (
                StoredMatrix(self.store, name, one, inner, hidden, first, turned, flat=flat)
                for name in (gate, up)
            )
            return ExpertMatrices(tuple(apart), last)
        if self.interleaved:
            rows = [slice(2 * inner.start, 2 * inner.stop)]
        cut = (StoredMatrix(self.store, gate, both, each, hidden, first, turned) for each in rows)
        return ExpertMatrices(tuple(cut), last, self.interleaved)

    def _experts_in(self, name: str) -> int:
        """Experts that a stacked tensor holds: E, or more where others come after them."""
        if not self.family.others_after or name not in self.store:
            return self.experts
        return max(self.experts, self.store.entries[name].shape[0])

    @property
    def interleaved(self) -> bool:
        """Whether stacked gate and up rows stand as g0, u0, g1, u1, ... in one tensor."""
        return self.family.interleaved or self.names.form.interleaved

    @cached_property
    def transposed(self) -> bool:
        """Whether stacked tensors are [E, H, 2I] and [E, I, H], by their shapes or, if square, the family.

        Raises CheckpointError where down contradicts gate_up, or the family if gate_up is square.
        """
        if not self.storage.turns or self.names.form.flat:
            return False
        gate_up, up, down = self.names.projections(0)
        halves = 2 if self.gated and gate_up == up else 1
        of_gate_up = self._orientation(gate_up, (halves * self.inner, self.hidden))
        of_down = self._orientation(down, (self.hidden, self.inner))
        settled = self.family.transposed if of_gate_up is None else of_gate_up
        if of_down is not None and of_down != settled:
            shapes = f"E={self.experts}, H={self.hidden}, I={self.inner}"
            raise CheckpointError(
                f"{gate_up} and {down} contradict each other: one of them is transposed ({shapes})"
            )
        return settled

    def _orientation(self, projection: str, shape: tuple[int, int]) -> bool | None:
        """Whether a stacked tensor is transposed; None where both ways or none fit its shape."""
        codes, whole, stack = self.storage.tensors[0], slice(0, 0), (0, self._experts_in(projection))
        name = codes.name(projection, stacked=True)
        if name not in self.store:
            raise CheckpointError(
                f"tensor {name} is missing from the checkpoint{in_its_place(name, self.store.entries)}"
            )
        found = self.store.entries[name].shape
        fits = [
            found in StoredMatrix(self.store, projection, shape, whole, whole, stack, way).expected(codes)
            for way in (False, True)
        ]
        return fits[1] if fits[0] != fits[1] else None

    def spans(self, experts: Iterable[int]) -> Iterator[Span]:
        """Returns where the tensors of `experts` lie: those of each, and its part of those of all experts."""
        wanted = sorted(set(experts))
        apart = {self.names.projections(e)[0].rpartition(".")[0] + "." for e in wanted}
        for name in self.names.tensors:
            entry = self.store.entries[name]
            if not self.names.stacked and name.startswith(tuple(apart)):
                yield Span(entry.file, entry.start, entry.start + entry.nbytes)
            elif self.names.stacked and entry.shape and not entry.shape[0] % self.experts:
                each = entry.nbytes // (self.experts if self.names.form.flat else entry.shape[0])
                for expert in wanted:
                    yield Span(entry.file, entry.start + expert * each, entry.start + (expert + 1) * each)

    @property
    def nbytes(self) -> int:
        """Bytes that one whole expert takes in the file, scales and biases included."""
        projections = self.expert(0, slice(0, self.inner))
        # the two halves of a stacked gate_up are one tensor
        matrices = {matrix.projection: matrix for matrix in projections}.values()
        weights = sum(matrix.nbytes(tensor) for matrix in matrices for tensor in self.storage.everything)
        return weights + (sum(matrix.bias_nbytes for matrix in matrices) if self.family.bias else 0)

    @cached_property
    def static_scales(self) -> tuple[float, float] | None:
        """Static scales of the inputs of gate_up and of down, the largest of all experts; None without.

        Raises CheckpointError for a scale that is not positive, and for gate and up that differ by more than
        the dialect allows.
        """
        static = self.storage.static
        if static is None or self.scheme.activations.given is None:
            return None
        found = [
            [self._static_scale(matrix) for matrix in self.expert(expert, slice(0, self.inner))]
            for expert in range(self.experts)
        ]
        for *halves, _ in found:
            if static.tolerance is not None and max(halves) - min(halves) > static.tolerance:
                listed = " and ".join(map(str, halves))
                raise CheckpointError(
                    f"{static.suffix} of gate and up of an expert in {self.names.module} differ: {listed}"
                )
        gate_up = {scale for *halves, _ in found for scale in halves}
        down = {last for *_, last in found}
        for side, scales in (("gate and up", gate_up), ("down", down)):
            if len(scales) > 1:
                text = "%s: %s of %s is between %g and %g; all experts are served with the largest"
                log.warning(text, self.names.module, static.suffix, side, min(scales), max(scales))
        return max(gate_up), max(down)

    def _static_scale(self, matrix: StoredMatrix) -> float:
        static = self.storage.static
        if static is None:
            raise ValueError(f"{matrix.projection} has no static scale")
        value = float(matrix.read(static.tensor).item())
        if value <= 0:
            raise CheckpointError(f"scale {matrix.name(static.tensor)} must be positive, found {value}")
        given = torch.tensor(value).reciprocal().item() if static.reciprocal else value
        if isinf(given):
            raise CheckpointError(
                f"scale {matrix.name(static.tensor)} divides, and {value:g} has no reciprocal in float32"
            )
        return given

    def check(self, layer: int) -> None:
        """Compares all tensors of the layer with what its family and dialect say; reads headers only.

        Raises CheckpointError, which names a tensor that is missing, unexpected or of another dtype or shape,
        or an expert beyond those that the config declares.
        """
        beyond = sorted(expert for expert in self.names.experts if expert >= self.experts)
        if beyond:
            stray = f"{self.names.module}.experts.{beyond[0]}"
            raise CheckpointError(f"{stray} is one too many: config.json declares {self.experts} experts")
        self._check_sizes()
        self._check_names(f"layer {layer} ({self.storage.scheme.weights})")
        for expert in range(1 if self.names.stacked else self.experts):
            for matrix in self.expert(expert, slice(0, self.inner)):
                for tensor in self.storage.everything:
                    if not tensor.optional or matrix.has(tensor):
                        matrix.entry(tensor)
                if self.family.bias:
                    matrix.bias_entry()

    def _check_sizes(self) -> None:
        """Raises CheckpointError where H or I is no multiple of a group, of the file or of what experts are
        loaded as; 128x128 blocks may be cut short.
        """
        form = self.storage.scheme.weights
        groups = {tensor.columns for tensor in self.storage.tensors if tensor.rows == 1} - {1, WHOLE}
        for part in form.parts:
            if part.rows == 1 and part.columns in groups:
                for letter, size in (("H", self.hidden), ("I", self.inner)):
                    if size % Fraction(part.columns).numerator:
                        raise CheckpointError(
                            f"{letter}={size} must be a multiple of {part.columns}, a group of {form}"
                        )
        loaded = self.scheme.weights
        if not keeps(form, loaded):
            for letter, size in (("H", self.hidden), ("I", self.inner)):
                check_groups(letter, size, loaded)

    def _check_names(self, layer: str) -> None:
        everything = self.storage.everything
        expected = set(self._expected_names([tensor for tensor in everything if not tensor.optional]))
        for missing in sorted(expected - self.names.tensors):
            rest = self.store.entries.keys() - expected
            raise CheckpointError(f"{layer} misses tensor {missing}{in_its_place(missing, rest)}")
        for stray in sorted(self.names.tensors - set(self._expected_names(everything))):
            reads = ", ".join(tensor.suffix for tensor in everything)
            raise CheckpointError(f"{layer} has the unexpected tensor {stray}; a projection has {reads}")

    def _expected_names(self, tensors: Sequence[StoredTensor]) -> Iterable[str]:
        stacked, (gate_up, down) = self.names.stacked, self.names.stacks()
        stacks = self.names.projections(0) if stacked else (gate_up, gate_up, down)
        for expert in range(1 if stacked else self.experts):
            for projection, stack in zip(self.names.projections(expert), stacks, strict=True):
                for tensor in tensors:
                    beside = tensor.beside and not stacked
                    yield tensor.name(stack if beside else projection, stacked=beside or stacked)
                if self.family.bias:
                    yield bias_name(projection, stacked=stacked)
