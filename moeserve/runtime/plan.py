"""`make_plan`: the join of kernels and carriers for one problem on one machine, made once and printed.

Which carrier serves steps of how many rows goes by the table's order, or by costs where they were measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from moeserve.dispatch.cost import Costs, cheapest
from moeserve.dispatch.dispatcher import DispatchRow
from moeserve.experts.batch import Grouping
from moeserve.experts.kernel import KernelRow, Problem
from moeserve.experts.machine import Machine
from moeserve.quant.format import Format
from moeserve.quant.formats import FORMATS, format_named

AUTO = "auto"


class NoPlan(ValueError):
    """Nothing can serve the problem, or a pinned name cannot; carries every reason."""


@dataclass(frozen=True)
class Wanted:
    """What the operator pinned by name; `auto` leaves the choice to the plan."""

    kernel: str = AUTO
    carrier: str = AUTO
    wire: str = AUTO


PADDED_ROWS = 256
"""Most rows of a lane that a carrier of PADDED batches is given where another can take over: every slot has
room for all rows of all lanes, in its buffers and in the kernel's.
"""


@dataclass(frozen=True)
class Span:
    """A carrier and its wire, for steps whose fullest lane brings up to so many rows."""

    up_to: int
    carrier: DispatchRow
    wire: Format

    @property
    def key(self) -> tuple[str, str]:
        """Names of carrier and wire, as costs have them."""
        return self.carrier.name, self.wire.name

    def __str__(self) -> str:
        ran = _verified(self.carrier)
        return f"{self.carrier.name} up to {self.up_to} rows a lane, wire {self.wire} (verified: {ran})"


@dataclass(frozen=True)
class Plan:
    """What serves a layer, and why the others do not."""

    problem: Problem
    machine: Machine
    kernel: KernelRow
    fitting: tuple[Span, ...]  # carriers that can serve with it, in table order, each up to its most rows
    refusals: tuple[tuple[str, str], ...]  # (row or pair, reason) of all else
    costs: Costs | None = None  # by which carriers are chosen

    @cached_property
    def carriers(self) -> tuple[Span, ...]:
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
                    replace(spans[cost.carrier, cost.wire], up_to=end) for end, cost in cheapest(offers, rows)
                )
        return (above,) if first == above else (first, above)

    @property
    def chooses(self) -> bool:
        """Whether several carriers could serve, between several ranks."""
        return self.problem.ranks > 1 and len(self.fitting) > 1

    def by_cost(self, costs: Costs) -> Plan:
        """The plan with the cheapest carriers by `costs`; those that could not be built are refused."""
        failed = {refusal[:2]: refusal[2] for refusal in costs.refused}
        fitting = tuple(span for span in self.fitting if span.key not in failed)
        refusals = [(span.carrier.name, failed[span.key]) for span in self.fitting if span.key in failed]
        if not fitting:
            raise NoPlan(f"no carrier can be built: {'; '.join(': '.join(refusal) for refusal in refusals)}")
        return replace(self, fitting=fitting, refusals=(*self.refusals, *refusals), costs=costs)

    @property
    def refused(self) -> tuple[tuple[str, str], ...]:
        """Every row and pair that does not serve, with the reason."""
        chosen = {span.key for span in self.carriers}
        beaten = "stands before it" if self.costs is None else "costs less"
        passed = [span.carrier.name for span in self.fitting if span.key not in chosen]
        return (*self.refusals, *((name, f"{self.carrier_names} {beaten}") for name in passed))

    @property
    def carrier_names(self) -> str:
        """As one label: those that serve, by rising rows."""
        return "+".join(dict.fromkeys(span.carrier.name for span in self.carriers))

    @property
    def wire_names(self) -> str:
        """Their wires, likewise."""
        return "+".join(dict.fromkeys(span.wire.name for span in self.carriers))

    def span(self, rows: int) -> Span:
        """What serves a step whose fullest lane brings `rows`."""
        return next((span for span in self.carriers if rows <= span.up_to), self.carriers[-1])

    def lines(self) -> list[str]:
        """The plan as text, the refused rows after it."""
        head = [
            f"scheme   {self.problem.scheme}",
            f"kernel   {self.kernel.name} (verified: {_verified(self.kernel)})",
        ]
        if len(self.carriers) == 1:
            carrier = self.carriers[0].carrier
            head.append(f"carrier  {carrier.name} (verified: {_verified(carrier)})")
            head.append(f"wire     {self.carriers[0].wire}")
        else:
            head += [f"carrier  {span}" for span in self.carriers]
        if self.costs is not None:
            head.append(f"cost     measured on {', '.join(self.costs.setting.hosts)}")
        return head + [f"  not {name}: {reason}" for name, reason in self.refused]


def make_plan(
    problem: Problem,
    machine: Machine,
    kernels: Mapping[str, KernelRow],
    carriers: Mapping[str, DispatchRow],
    wanted: Wanted = Wanted(),
) -> Plan:
    """Chooses the kernel, the first in table order that some carrier fits, and each carrier's narrowest
    harmless wire.

    A reference row is chosen on a GPU only when named. A wire that loses more than the scheme's activations
    must be named. Raises NoPlan, with every reason, when nothing fits or a pinned name cannot serve: never a
    fallback.
    """
    refused: list[tuple[str, str]] = []
    usable_kernels = _usable("kernel", wanted.kernel, kernels.values(), problem, machine, refused)
    usable_carriers = _usable("carrier", wanted.carrier, carriers.values(), problem, machine, refused)
    chosen: KernelRow | None = None
    fitting: list[Span] = []
    for kernel in usable_kernels:
        for carrier in usable_carriers:
            wire = _wire(problem, kernel, carrier, wanted.wire)
            if isinstance(wire, str):
                refused.append((f"{kernel.name} + {carrier.name}", wire))
            elif chosen in (None, kernel):
                chosen = kernel
                fitting.append(Span(_most_rows(problem, carrier), carrier, wire))
    if chosen is None:
        reasons = "".join(f"\n  {name}: {reason}" for name, reason in refused)
        raise NoPlan(
            f"nothing serves {problem.scheme} experts of {problem.shape} "
            f"on {machine.name} ({machine.arch}):{reasons}"
        )
    refused += [(k.name, f"{chosen.name} stands before it") for k in usable_kernels if k is not chosen]
    serving, passed = _serving(fitting, machine)
    return Plan(problem, machine, chosen, tuple(serving), (*refused, *passed))


def _serving(fitting: list[Span], machine: Machine) -> tuple[list[Span], list[tuple[str, str]]]:
    """Without judges, and those that have not run on this architecture, where others are left; and why."""
    able = [span for span in fitting if not span.carrier.reference] or fitting
    tried = [span for span in able if machine.arch in span.carrier.verified] or able
    first = tried[0].carrier.name
    passed = [(span.carrier.name, f"{first} stands before it") for span in fitting if span not in able]
    untried = f"has not run on {machine.arch} yet, and {first} has: only when named"
    return tried, passed + [(span.carrier.name, untried) for span in able if span not in tried]


def _most_rows(problem: Problem, carrier: DispatchRow) -> int:
    """Of a lane, that a carrier is given where another can take over."""
    padded = carrier.grouping is Grouping.PADDED
    return min(PADDED_ROWS, problem.lane_rows) if padded else problem.lane_rows


def _usable(
    kind: str,
    name: str,
    rows: Iterable[KernelRow] | Iterable[DispatchRow],
    problem: Problem,
    machine: Machine,
    refused: list[tuple[str, str]],
) -> list:  # type: ignore[type-arg]
    """Rows that can serve, references last; the reasons of the others go to `refused`."""
    table = {row.name: row for row in rows}
    if name != AUTO and name not in table:
        raise NoPlan(f"unknown {kind} {name!r}; known: {', '.join(table)}")
    usable = []
    for row in sorted(table.values(), key=lambda row: row.reference):
        if name not in (AUTO, row.name):
            refused.append((row.name, f"{kind} {name} was named"))
        elif reason := row.refuses(problem, machine):
            refused.append((row.name, reason))
        elif row.reference and name == AUTO and machine.device != "cpu":
            refused.append((row.name, "a reference serves on a GPU only when named"))
        elif isinstance(row, DispatchRow) and machine.arch in row.only_named and name == AUTO:
            refused.append((row.name, f"stands in for itself on {machine.arch}: only when named"))
        else:
            usable.append(row)
    return usable


def _wire(problem: Problem, kernel: KernelRow, carrier: DispatchRow, name: str) -> Format | str:
    """The wire for a pair, or why there is none."""
    if carrier.grouping not in kernel.groupings:
        taken = _list(grouping.value for grouping in kernel.groupings)
        return f"{carrier.name} delivers {carrier.grouping.value} rows, {kernel.name} takes {taken}"
    both = [f for f in FORMATS.values() if f.name in carrier.wires and f in kernel.eats and f.row_wise]
    if name != AUTO:
        wire = format_named(name)
        if wire in both:
            return wire
        common = _list(f.name for f in both) or "nothing in common"
        return f"wire {name} was named; {carrier.name} carries and {kernel.name} eats {common}"
    harmless = [f for f in both if f == problem.scheme.activations or f == problem.model_format]
    if not harmless:
        common = _list(f.name for f in both) or "none"
        return f"no wire in common loses as little as {problem.scheme.activations} (in common: {common})"
    return min(harmless, key=lambda f: f.bits)


def _verified(row: KernelRow | DispatchRow) -> str:
    return ", ".join(row.verified) or "nowhere yet"


def _list(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
