"""Which kernels serve steps of how many rows: `KernelSpan`, and `KernelSpans`, what a plan chose.

Rows of a step are counted as expert rows: the (token, expert) pairs that one rank likely computes, which are
the rows of all lanes x top k / ranks. Every rank knows them from the step's header, so nothing is read on a
device, and a step that is replayed from a graph runs the kernel that it was recorded with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from moeserve.experts.batch import ExpertBatch, ExpertWeights, Grouping
from moeserve.experts.kernel import Kernel, KernelEntry, KernelRange, KernelSpec, Prepared, Problem
from moeserve.quant.format import Format


@dataclass(frozen=True)
class KernelSpan:
    """A kernel, for steps in which a rank likely computes up to so many (token, expert) pairs."""

    up_to: int
    kernel: KernelEntry

    def __str__(self) -> str:
        ran = ", ".join(self.kernel.verified) or "nowhere yet"
        return f"{self.kernel.name} up to {self.up_to} expert rows a rank (verified: {ran})"


@dataclass(frozen=True)
class KernelSpans:
    """Kernels on one prepared form by rising rows; the last one takes whatever is above, too."""

    name: str  # of their family, or of the one kernel
    spans: tuple[KernelSpan, ...]

    @property
    def entries(self) -> tuple[KernelEntry, ...]:
        """The kernels, each once."""
        return tuple({span.kernel.name: span.kernel for span in self.spans}.values())

    @property
    def names(self) -> str:
        """As one label: the kernels that serve, by rising rows."""
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
    def reference(self) -> bool:
        """Whether it judges other kernels."""
        return any(entry.reference for entry in self.entries)

    def span(self, rows: int) -> KernelSpan:
        """What serves a step of `rows` expert rows."""
        return next((span for span in self.spans if rows <= span.up_to), self.spans[-1])

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
        return self._built[self.spans.span(batch.expert_rows).kernel.name].apply(prepared, batch)


def alone(entry: KernelEntry, problem: Problem) -> KernelSpans:
    """One kernel for all steps."""
    return KernelSpans(entry.name, (KernelSpan(problem.expert_rows, entry),))


def together(
    ranges: Sequence[KernelRange], able: Mapping[str, KernelEntry], slots: int, most: int
) -> tuple[KernelSpan, ...]:
    """The spans of steps of up to `most` expert rows on a rank of `slots` slots.

    Of `ranges`, the first that covers a step and names one of the `able` kernels decides. Empty where some
    step is nobody's.
    """
    serving = [one for one in ranges if one.kernel in able]
    spans: list[KernelSpan] = []
    for end in _ends(serving, slots, most):
        kernel = next((able[one.kernel] for one in serving if one.covers(end, slots)), None)
        if kernel is None:
            return ()
        if spans and spans[-1].kernel is kernel:
            spans.pop()
        spans.append(KernelSpan(end, kernel))
    return tuple(spans)


def _ends(ranges: Iterable[KernelRange], slots: int, most: int) -> list[int]:
    """Numbers of rows up to `most`, ascending, between which the same ranges cover."""
    found = {end for one in ranges for end in one.ends(slots) if 0 < end < most}
    return sorted(found | {most})
