"""The experts of one decoder layer as they lie in the file: `StoredLayer` finds and checks their matrices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from moeserve.experts.dialects.dialect import Storage, StoredMatrix, bias_name
from moeserve.experts.dialects.family import Family
from moeserve.experts.dialects.names import LayerNames
from moeserve.experts.dialects.store import CheckpointError, TensorStore


@dataclass(frozen=True)
class ExpertMatrices:
    """The projections of one expert or its slice: gate and up, or one matrix that has their rows in turn."""

    gate_up: tuple[StoredMatrix, ...]
    down: StoredMatrix

    @property
    def interleaved(self) -> bool:
        """Whether gate and up rows stand as g0, u0, g1, u1, ... in one matrix."""
        return len(self.gate_up) == 1

    def __iter__(self) -> Iterator[StoredMatrix]:
        return iter((*self.gate_up, self.down))


@dataclass(frozen=True)
class StoredLayer:
    """How and where one layer stores its experts."""

    store: TensorStore
    names: LayerNames
    family: Family
    storage: Storage
    experts: int  # E
    hidden: int  # H
    inner: int  # I, whole

    def expert(self, expert: int, inner: slice) -> ExpertMatrices:
        """The matrices of `expert`, cut to `inner`: rows of gate and up, columns of down."""
        gate, up, down = self.names.projections(expert)
        hidden, one, other = slice(0, self.hidden), (self.inner, self.hidden), (self.hidden, self.inner)
        if not self.names.stacked:
            halves = tuple(StoredMatrix(self.store, name, one, inner, hidden) for name in (gate, up))
            return ExpertMatrices(halves, StoredMatrix(self.store, down, other, hidden, inner))
        both, stack = (2 * self.inner, self.hidden), (expert, self.experts)
        rows = [inner, slice(self.inner + inner.start, self.inner + inner.stop)]
        if self.family.interleaved:
            rows = [slice(2 * inner.start, 2 * inner.stop)]
        cut = (StoredMatrix(self.store, gate, both, each, hidden, stack, self.transposed) for each in rows)
        last = StoredMatrix(self.store, down, other, hidden, inner, stack, self.transposed)
        return ExpertMatrices(tuple(cut), last)

    @cached_property
    def transposed(self) -> bool:
        """Whether stacked tensors stand as [E, H, 2I] and [E, I, H]: as their shapes say, or the family if
        square.

        CheckpointError: one of them says yes and the other, or for a square gate_up the family, says no.
        """
        gate_up, _, down = self.names.projections(0)
        of_gate_up = self._orientation(gate_up, (2 * self.inner, self.hidden))
        of_down = self._orientation(down, (self.hidden, self.inner))
        settled = self.family.transposed if of_gate_up is None else of_gate_up
        if of_down is not None and of_down != settled:
            shapes = f"E={self.experts}, H={self.hidden}, I={self.inner}"
            raise CheckpointError(
                f"{gate_up} and {down} contradict each other: one of them is transposed ({shapes})"
            )
        return settled

    def _orientation(self, projection: str, shape: tuple[int, int]) -> bool | None:
        """Whether a stacked tensor is transposed; None where its shape does not tell, or is neither."""
        codes, whole, stack = self.storage.tensors[0], slice(0, 0), (0, self.experts)
        found = self.store.entries[codes.name(projection, stacked=True)].shape
        fits = [
            StoredMatrix(self.store, projection, shape, whole, whole, stack, way).expected(codes) == found
            for way in (False, True)
        ]
        return fits[1] if fits[0] != fits[1] else None

    @property
    def nbytes(self) -> int:
        """Bytes that one whole expert takes in the file, scales and biases included."""
        projections = self.expert(0, slice(0, self.inner))
        # the two halves of a stacked gate_up are one tensor
        matrices = {matrix.projection: matrix for matrix in projections}.values()
        weights = sum(matrix.nbytes(tensor) for matrix in matrices for tensor in self.storage.tensors)
        return weights + (sum(matrix.bias_nbytes for matrix in matrices) if self.family.bias else 0)

    def check(self, layer: int) -> None:
        """Compares all tensors of the layer with what its family and dialect say; reads headers only.

        CheckpointError names the tensor: missing, unexpected, of another dtype or shape; or an expert too
        many.
        """
        beyond = sorted(expert for expert in self.names.experts if expert >= self.experts)
        if beyond:
            stray = f"{self.names.module}.experts.{beyond[0]}"
            raise CheckpointError(f"{stray} is one too many: config.json declares {self.experts} experts")
        self._check_names(f"layer {layer} ({self.storage.scheme.weights})")
        for expert in range(1 if self.names.stacked else self.experts):
            for matrix in self.expert(expert, slice(0, self.inner)):
                for tensor in self.storage.tensors:
                    matrix.entry(tensor)
                if self.family.bias:
                    matrix.bias_entry()

    def _check_names(self, layer: str) -> None:
        expected = set(self._expected_names())
        for missing in sorted(expected - self.names.tensors):
            raise CheckpointError(f"{layer} misses tensor {missing}")
        for stray in sorted(self.names.tensors - expected):
            reads = ", ".join(tensor.suffix for tensor in self.storage.tensors)
            raise CheckpointError(f"{layer} has the unexpected tensor {stray}; a projection has {reads}")

    def _expected_names(self) -> Iterable[str]:
        for expert in range(1 if self.names.stacked else self.experts):
            for projection in self.names.projections(expert):
                yield from (
                    tensor.name(projection, stacked=self.names.stacked) for tensor in self.storage.tensors
                )
                if self.family.bias:
                    yield bias_name(projection, stacked=self.names.stacked)
