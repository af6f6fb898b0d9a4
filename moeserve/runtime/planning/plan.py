"""`make_plan`: the join of kernels and dispatchers for one problem on one machine, made once and printed.

Which dispatcher serves steps of how many rows goes by the table's order, or by costs where they were
measured. Which kernel does goes by what was measured of the kernels of a family and ships with them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Generic, TypeVar

from moeserve.device.machine import Machine
from moeserve.dispatch.costs.costs import Costs, cheapest
from moeserve.dispatch.dispatcher import DispatchEntry
from moeserve.experts.batch import Grouping
from moeserve.experts.kernel import KernelEntry, KernelRange, Problem
from moeserve.experts.spans import KernelSpan, KernelSpans, alone, together
from moeserve.quant.format import Format
from moeserve.quant.formats import FORMATS, format_named
from moeserve.runtime.sections import AUTO, Wanted


class NoPlan(ValueError):
    """Nothing can serve the problem, or a pinned name cannot; carries every reason."""


PADDED_ROWS = 256
"""Most rows of a lane that a dispatcher of PADDED batches is given where another can take over: every slot
has room for all rows of all lanes, in its buffers and in the kernel's.
"""


@dataclass(frozen=True)
class DispatchSpan:
    """A dispatcher and its wire, for steps whose fullest lane brings up to so many rows."""

    up_to: int
    dispatcher: DispatchEntry
    wire: Format

    @property
    def key(self) -> tuple[str, str]:
        """Names of dispatcher and wire, as costs have them."""
        return self.dispatcher.name, self.wire.name

    def __str__(self) -> str:
        ran = _verified(self.dispatcher)
        return f"{self.dispatcher.name} up to {self.up_to} rows a lane, wire {self.wire} (verified: {ran})"


@dataclass(frozen=True)
class Plan:
    """What serves a layer, and why the others do not."""

    problem: Problem
    machine: Machine
    kernel: KernelSpans
    fitting: tuple[
        DispatchSpan, ...
    ]  # dispatchers that can serve with it, in table order, each up to its most rows
    refusals: tuple[tuple[str, str], ...]  # (entry or pair, reason) of all else
    costs: Costs | None = None  # by which dispatchers are chosen

    @cached_property
    def dispatchers(self) -> tuple[DispatchSpan, ...]:
        """Those that serve, by rising rows; the last up to `problem.lane_rows`.

        Without costs it is the first that fits, and where that is given fewer rows, above them the first that
        is given all.
        """
        rows = self.problem.lane_rows
        first, above = self.fitting[0], next((s for s in self.fitting if s.up_to == rows), None)
        if above is None:
            return (replace(first, up_to=rows),)
        if self.costs is not None:
            offers = [(cost, span.up_to) for span in self.fitting if (cost := self.costs.of(*span.key))]
            if any(most == rows for _, most in offers):
                spans = {span.key: span for span in self.fitting}
                return tuple(
                    replace(spans[cost.dispatcher, cost.wire], up_to=end)
                    for end, cost in cheapest(offers, rows)
                )
        return (above,) if first == above else (first, above)

    @property
    def outlives(self) -> bool:
        """Whether a later group is safe from members that have yet to end, whichever dispatchers are chosen,
        where this one meets by gloo.
        """
        return all(span.dispatcher.outlives for span in self.fitting)

    @property
    def chooses(self) -> bool:
        """Whether several dispatchers could serve, between several ranks."""
        return self.problem.owners_here > 1 and len(self.fitting) > 1

    def by_cost(self, costs: Costs) -> Plan:
        """The plan with the cheapest dispatchers by `costs`; those that could not be built are refused."""
        failed = {refusal[:2]: refusal[2] for refusal in costs.refused}
        fitting = tuple(span for span in self.fitting if span.key not in failed)
        refusals = [(span.dispatcher.name, failed[span.key]) for span in self.fitting if span.key in failed]
        if not fitting:
            raise NoPlan(
                f"no dispatcher can be built: {'; '.join(': '.join(refusal) for refusal in refusals)}"
            )
        return replace(self, fitting=fitting, refusals=(*self.refusals, *refusals), costs=costs)

    @property
    def refused(self) -> tuple[tuple[str, str], ...]:
        """Every entry and pair that does not serve, with the reason."""
        chosen = {span.key for span in self.dispatchers}
        beaten = "stands before it" if self.costs is None else "costs less"
        passed = [span.dispatcher.name for span in self.fitting if span.key not in chosen]
        return (*self.refusals, *((name, f"{self.dispatcher_names} {beaten}") for name in passed))

    @property
    def kernels(self) -> tuple[KernelSpan, ...]:
        """Those that serve, by rising rows."""
        return self.kernel.spans

    @property
    def kernel_names(self) -> str:
        """The names of the kernels that serve, by rising rows, as one label."""
        return self.kernel.names

    @property
    def dispatcher_names(self) -> str:
        """The names of the dispatchers that serve, by rising rows, as one label."""
        return "+".join(dict.fromkeys(span.dispatcher.name for span in self.dispatchers))

    @property
    def wire_names(self) -> str:
        """The names of the dispatchers' wires, in the same order, as one label."""
        return "+".join(dict.fromkeys(span.wire.name for span in self.dispatchers))

    def span(self, rows: int) -> DispatchSpan:
        """What serves a step whose fullest lane brings `rows`."""
        return next((span for span in self.dispatchers if rows <= span.up_to), self.dispatchers[-1])

    def lines(self) -> list[str]:
        """The plan as text, the refused entries after it."""
        head = [f"scheme   {self.problem.scheme}", *self._kernel_lines()]
        if len(self.dispatchers) == 1:
            dispatcher = self.dispatchers[0].dispatcher
            head.append(f"dispatcher  {dispatcher.name} (verified: {_verified(dispatcher)})")
            head.append(f"wire     {self.dispatchers[0].wire}")
        else:
            head += [f"dispatcher  {span}" for span in self.dispatchers]
        if self.costs is not None:
            head.append(f"cost     measured on {', '.join(self.costs.setting.hosts)}")
        return head + [f"  not {name}: {reason}" for name, reason in self.refused]

    def _kernel_lines(self) -> list[str]:
        if len(self.kernels) == 1:
            kernel = self.kernels[0].kernel
            return [f"kernel   {kernel.name} (verified: {_verified(kernel)})"]
        return [f"kernel   {span}" for span in self.kernels]


def make_plan(
    problem: Problem,
    machine: Machine,
    kernels: Mapping[str, KernelEntry],
    dispatchers: Mapping[str, DispatchEntry],
    wanted: Wanted = Wanted(),
) -> Plan:
    """Chooses the kernels, the first family in table order that some dispatcher fits, and each dispatcher's
    narrowest harmless wire.

    A reference is chosen on a GPU only when named. A wire that loses more than the scheme's activations
    must be named. Raises NoPlan, with every reason, when nothing fits or a pinned name cannot serve: never a
    fallback.
    """
    usable_kernels, refused = kernels_that_serve(problem, machine, kernels, wanted.kernel)
    usable_dispatchers = _Search[DispatchEntry](
        "dispatcher", wanted.dispatcher, problem, machine, refused
    ).able([(entry, (entry.name,)) for entry in dispatchers.values()])
    chosen: KernelSpans | None = None
    fitting: list[DispatchSpan] = []
    for kernel in usable_kernels:
        for dispatcher in usable_dispatchers:
            wire = _wire(problem, kernel, dispatcher, wanted.wire)
            if isinstance(wire, str):
                refused.append((f"{kernel.name} + {dispatcher.name}", wire))
            elif chosen in (None, kernel):
                chosen = kernel
                fitting.append(DispatchSpan(_most_rows(problem, dispatcher), dispatcher, wire))
    if chosen is None:
        reasons = "".join(f"\n  {name}: {reason}" for name, reason in refused)
        raise NoPlan(
            f"nothing serves {problem.scheme} experts with H={problem.shape.hidden}, I={problem.shape.inner} "
            f"and {problem.shape.activation.name}{' and biases' if problem.shape.bias else ''} "
            f"on {machine.name} ({machine.arch}):{reasons}"
        )
    told = {name for name, _ in refused} | {entry.name for entry in chosen.entries}
    refused += [(name, f"{chosen.names} stands before it") for name in kernels if name not in told]
    serving, passed = _serving(fitting, machine)
    return Plan(problem, machine, chosen, tuple(serving), (*refused, *passed))


def _serving(
    fitting: list[DispatchSpan], machine: Machine
) -> tuple[list[DispatchSpan], list[tuple[str, str]]]:
    """Without judges, and those that have not run on this architecture, where others are left; and why."""
    able = [span for span in fitting if not span.dispatcher.reference] or fitting
    tried = [span for span in able if machine.arch in span.dispatcher.verified] or able
    first = tried[0].dispatcher.name
    passed = [(span.dispatcher.name, f"{first} stands before it") for span in fitting if span not in able]
    untried = f"has not run on {machine.arch} yet, and {first} has: only when named"
    return tried, passed + [(span.dispatcher.name, untried) for span in able if span not in tried]


def _most_rows(problem: Problem, dispatcher: DispatchEntry) -> int:
    """Returns the most rows of a lane that a dispatcher is given where another can take over."""
    padded = dispatcher.grouping is Grouping.PADDED
    return min(PADDED_ROWS, problem.lane_rows) if padded else problem.lane_rows


Entry = TypeVar("Entry", KernelEntry, DispatchEntry)


@dataclass(frozen=True)
class _Search(Generic[Entry]):
    """Entries of one table looked through for those that can serve; `refused` gets the others' reasons."""

    kind: str  # kernel or dispatcher
    named: str  # what was pinned, or AUTO
    problem: Problem
    machine: Machine
    refused: list[tuple[str, str]]

    def able(self, entries: Sequence[tuple[Entry, Collection[str]]]) -> list[Entry]:
        """Returns the entries that can serve, references last; each comes with the names that pin it.

        Raises NoPlan for a name that pins none of them.
        """
        known: dict[str, None] = dict.fromkeys(name for _, names in entries for name in names)
        if self.named not in (AUTO, *known):
            raise NoPlan(f"unknown {self.kind} {self.named!r}; known: {', '.join(known)}")
        found = []
        for entry, names in sorted(entries, key=lambda one: one[0].reference):
            if (reason := self._refusal(entry, names)) is None:
                found.append(entry)
            else:
                self.refused.append((entry.name, reason))
        return found

    def _refusal(self, entry: Entry, names: Collection[str]) -> str | None:
        if self.named not in (AUTO, *names):
            return f"{self.kind} {self.named} was named"
        if (reason := entry.refuses(self.problem, self.machine)) or self.named != AUTO:
            return reason
        if entry.reference and self.machine.device != "cpu":
            return "a reference serves on a GPU only when named"
        if isinstance(entry, DispatchEntry) and self.machine.arch in entry.only_named:
            return f"stands in for itself on {self.machine.arch}: only when named"
        return None


def kernels_that_serve(
    problem: Problem, machine: Machine, kernels: Mapping[str, KernelEntry], named: str = AUTO
) -> tuple[list[KernelSpans], list[tuple[str, str]]]:
    """Families, and kernels of none, that can serve steps of any number of rows, references last.

    Beside them stand the names of other kernels, each with its reason. Raises NoPlan for a name that is no
    kernel's and no family's.
    """
    ranges, refused = _ranges(kernels, machine), list[tuple[str, str]]()
    families = {name: [f for f, own in ranges.items() if name in {o.kernel for o in own}] for name in kernels}
    search = _Search[KernelEntry]("kernel", named, problem, machine, refused)
    able = {e.name: e for e in search.able([(e, (*families[n], n)) for n, e in kernels.items()])}
    found: dict[str, KernelSpans] = {}
    for name, entry in able.items():
        if entry.family is None or named == name:
            found[name] = alone(entry, problem)
        elif entry.family.name not in found:
            family = entry.family.name
            found[family] = together(family, ranges[family], able, problem)
    nobody = "none of its kernels that can serve takes every number of rows"
    refused += [(name, nobody) for name, kernel in found.items() if not kernel.spans]
    return [k for name, k in found.items() if k.spans and named in (AUTO, name)], refused


def _ranges(kernels: Mapping[str, KernelEntry], machine: Machine) -> dict[str, Sequence[KernelRange]]:
    """What was measured of each family of `kernels`, on `machine` or else where it was."""
    families = {entry.family.name: entry.family for entry in kernels.values() if entry.family is not None}
    return {name: family.ranges(machine.name) for name, family in families.items()}


def _wire(problem: Problem, kernel: KernelSpans, dispatcher: DispatchEntry, name: str) -> Format | str:
    """The wire for a pair, or why there is none."""
    if dispatcher.grouping not in kernel.groupings:
        taken = _list(grouping.value for grouping in kernel.groupings)
        return f"{dispatcher.name} delivers {dispatcher.grouping.value} rows, {kernel.name} takes {taken}"
    both = [f for f in FORMATS.values() if f.name in dispatcher.wires and f in kernel.eats and f.row_wise]
    if name != AUTO:
        wire = format_named(name)
        if wire in both:
            return wire
        common = _list(f.name for f in both) or "nothing in common"
        return f"wire {name} was named; {dispatcher.name} carries and {kernel.name} eats {common}"
    harmless = [f for f in both if f == problem.scheme.activations or f == problem.model_format]
    if not harmless:
        common = _list(f.name for f in both) or "none"
        return f"no wire in common loses as little as {problem.scheme.activations} (in common: {common})"
    return min(harmless, key=lambda f: f.bits)


def _verified(entry: KernelEntry | DispatchEntry) -> str:
    return ", ".join(entry.verified) or "nowhere yet"


def _list(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
