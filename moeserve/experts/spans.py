"""Which kernels serve steps of how many rows: `KernelSpan`, and `KernelSpans`, what a plan chose.

A step's rows are those that all lanes bring together. Every rank knows them from the step's header, so
nothing is read on a device, and a step that is replayed from a graph runs the kernel it was recorded with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor, inf

from torch import Tensor

from moeserve.experts.batch import ExpertBatch, ExpertWeights, Grouping
from moeserve.experts.kernel import Kernel, KernelEntry, KernelRange, KernelSpec, Prepared, Problem
from moeserve.quant.format import Format

ROUNDING = 1e-6
"""By so much may a step's rows be off when they are told from the rows that its slots likely have."""


@dataclass(frozen=True)
class KernelSpan:
    """A kernel, for steps to which all lanes together bring up to so many rows."""

    up_to: int
    kernel: KernelEntry

    def __str__(self) -> str:
        ran = ", ".join(self.kernel.verified) or "nowhere yet"
        return f"{self.kernel.name} up to {self.up_to} rows of all lanes (verified: {ran})"


@dataclass(frozen=True)
class KernelSpans:
    """Kernels on one prepared form by rising rows; the last one takes whatever is above, too."""

    name: str  # of their family, or of the one kernel
    spans: tuple[KernelSpan, ...]
    pairs_a_row: Fraction  # (token, expert) pairs that a rank likely computes for each row of a step

    @property
    def entries(self) -> tuple[KernelEntry, ...]:
        """The kernels, each once."""
        return tuple({span.kernel.name: span.kernel for span in self.spans}.values())

    @property
    def names(self) -> str:
        """The names of the kernels that serve, by rising rows, as one label."""
        return "+".join(entry.name for entry in self.entries)

    @property
    def eats(self) -> frozenset[Format]:
        """Wire formats that all of them take as they arrive."""
        return frozenset.intersection(*(entry.eats for entry in self.entries))

    @property
    def groupings(self) -> frozenset[Grouping]:
        """Groupings that all of them take."""
        return frozenset.intersection(*(entry.groupings for entry in self.entries))

    @property
    def row_align(self) -> int:
        """Rows that segments are aligned to."""
        return max(entry.row_align for entry in self.entries)

    @property
    def verified(self) -> tuple[str, ...]:
        """Architectures that all of them have run on."""
        first, *others = self.entries
        return tuple(arch for arch in first.verified if all(arch in entry.verified for entry in others))

    @property
    def apart(self) -> bool:
        """Whether none keeps anything between launches that those of two tracks would share."""
        return all(entry.apart for entry in self.entries)

    @property
    def reference(self) -> bool:
        """Whether it judges other kernels."""
        return any(entry.reference for entry in self.entries)

    def span(self, rows: int) -> KernelSpan:
        """What serves a step to which all lanes bring `rows`."""
        return next((span for span in self.spans if rows <= span.up_to), self.spans[-1])

    def span_of(self, batch: ExpertBatch) -> KernelSpan:
        """What serves the step that brings `batch` to a rank."""
        return self.span_for(batch.likely_rows)

    def span_for(self, pairs: float) -> KernelSpan:
        """What serves the step of which a rank likely computes so many (token, expert) pairs."""
        return self.span(ceil(pairs / float(self.pairs_a_row) - ROUNDING))

    def build(self, spec: KernelSpec) -> SpannedKernel:
        """The kernels, built for `spec`."""
        return SpannedKernel(self, spec)


class SpannedKernel:
    """The kernels of a plan on one `Prepared`: each batch goes to the one that its span names."""

    def __init__(self, spans: KernelSpans, spec: KernelSpec) -> None:
        self.spans = spans
        self._built: dict[str, Kernel] = {entry.name: entry.build(spec) for entry in spans.entries}

    def prepare(self, weights: ExpertWeights) -> Prepared:
        """The form that all of them compute on. ValueError: the weights do not fit the spec."""
        return next(iter(self._built.values())).prepare(weights)

    def apply(self, prepared: Prepared, batch: ExpertBatch) -> Tensor:
        """RAGGED -> `[Rmax, H]`, PADDED -> `[e, C, H]`; rows outside the segments are undefined."""
        return self._built[self.spans.span_of(batch).kernel.name].apply(prepared, batch)


def alone(entry: KernelEntry, problem: Problem) -> KernelSpans:
    """One kernel for all steps."""
    return KernelSpans(entry.name, (KernelSpan(problem.step_rows, entry),), problem.pairs_a_row)


def together(
    name: str, ranges: Sequence[KernelRange], able: Mapping[str, KernelEntry], problem: Problem
) -> KernelSpans:
    """The family `name`: of its ranges the first that covers a step, with one of the `able` kernels, decides.

    There are no spans where some step is nobody's.
    """
    serving = [one for one in ranges if one.kernel in able]
    spans: list[KernelSpan] = []
    for end in _ends(serving, problem):
        kernel = next((able[one.kernel] for one in serving if _covers(one, end, problem)), None)
        if kernel is None:
            return KernelSpans(name, (), problem.pairs_a_row)
        if spans and spans[-1].kernel is kernel:
            spans.pop()
        spans.append(KernelSpan(end, kernel))
    return KernelSpans(name, tuple(spans), problem.pairs_a_row)


def _covers(one: KernelRange, rows: int, problem: Problem) -> bool:
    least, most = one.bounds(problem.slots)
    return least <= rows * problem.pairs_a_row <= most


def _ends(ranges: Sequence[KernelRange], problem: Problem) -> list[int]:
    """Numbers of rows of a step, ascending, after which other ranges may cover; the last is the most."""
    found = {problem.step_rows}
    for least, most in (one.bounds(problem.slots) for one in ranges):
        found.add(ceil(Fraction(least) / problem.pairs_a_row) - 1)
        found |= {floor(Fraction(most) / problem.pairs_a_row)} if most < inf else set()
    return sorted(end for end in found if 0 < end <= problem.step_rows)
