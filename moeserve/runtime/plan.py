"""`make_plan`: the join of kernels and carriers for one problem on one machine, made once, printed, and
final.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from moeserve.dispatch.dispatcher import DispatchRow
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


@dataclass(frozen=True)
class Plan:
    """What serves a layer, and why the others do not."""

    problem: Problem
    machine: Machine
    kernel: KernelRow
    carrier: DispatchRow
    wire: Format
    refused: tuple[tuple[str, str], ...]  # (row or pair, reason)

    def lines(self) -> list[str]:
        """The plan as text, the refused rows after it."""
        ran = ", ".join(self.kernel.verified) or "nowhere yet"
        carried = ", ".join(self.carrier.verified) or "nowhere yet"
        head = [
            f"scheme   {self.problem.scheme}",
            f"kernel   {self.kernel.name} (verified: {ran})",
            f"carrier  {self.carrier.name} (verified: {carried})",
            f"wire     {self.wire}",
        ]
        return head + [f"  not {name}: {reason}" for name, reason in self.refused]


def make_plan(
    problem: Problem,
    machine: Machine,
    kernels: Mapping[str, KernelRow],
    carriers: Mapping[str, DispatchRow],
    wanted: Wanted = Wanted(),
) -> Plan:
    """Chooses kernel, carrier and wire: the first pair in table order that fits, and its narrowest harmless
    wire.

    A reference row is chosen on a GPU only when named. A wire that loses more than the scheme's activations
    must be named. Raises NoPlan, with every reason, when nothing fits or a pinned name cannot serve: never a
    fallback.
    """
    refused: list[tuple[str, str]] = []
    usable_kernels = _usable("kernel", wanted.kernel, kernels.values(), problem, machine, refused)
    usable_carriers = _usable("carrier", wanted.carrier, carriers.values(), problem, machine, refused)
    chosen: Plan | None = None
    for kernel in usable_kernels:
        for carrier in usable_carriers:
            wire = _wire(problem, kernel, carrier, wanted.wire)
            if isinstance(wire, str):
                refused.append((f"{kernel.name} + {carrier.name}", wire))
            elif chosen is None:
                chosen = Plan(problem, machine, kernel, carrier, wire, ())
    if chosen is None:
        reasons = "".join(f"\n  {name}: {reason}" for name, reason in refused)
        raise NoPlan(
            f"nothing serves {problem.scheme} experts of {problem.shape} "
            f"on {machine.name} ({machine.arch}):{reasons}"
        )
    losers = [
        (k.name, f"{chosen.kernel.name} stands before it") for k in usable_kernels if k is not chosen.kernel
    ]
    losers += [
        (c.name, f"{chosen.carrier.name} stands before it")
        for c in usable_carriers
        if c is not chosen.carrier
    ]
    return Plan(problem, machine, chosen.kernel, chosen.carrier, chosen.wire, (*refused, *losers))


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


def _list(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
