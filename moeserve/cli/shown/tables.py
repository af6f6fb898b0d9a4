"""The tables in Markdown that `moeserve plan --table` prints and the documentation holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from moeserve.cli.vllm.backends import MEMBERS, MOE_BACKENDS
from moeserve.cli.vllm.reading import shown, told
from moeserve.cli.vllm.switches import BACKEND_NAMES, SWITCHES
from moeserve.device.machine import Machine, machine_named
from moeserve.dispatch.backends import DISPATCHERS, dispatcher_named
from moeserve.experts.activation import Activation
from moeserve.experts.batch import ExpertShape
from moeserve.experts.kernel import Problem
from moeserve.experts.kernels import KERNELS
from moeserve.experts.kernels.torch_reference import ENTRY as REFERENCE
from moeserve.quant.format import Scheme
from moeserve.quant.formats.floats import BF16, FLOATS
from moeserve.quant.schemes import SCHEMES
from moeserve.runtime.planning.plan import NoPlan, Plan, make_plan
from moeserve.runtime.sections import Wanted

MACHINES = ("h100", "h200", "b200", "mi300x", "mi355x", "cpu")
"""Machines of the table, by the names that `--machine` takes."""

MEASURED = "h200"
"""The machine on which kernels of a family were measured beside each other."""

LAYER = ExpertShape(hidden=7168, inner=2048, activation=Activation("silu"))
"""The expert that is planned for: DeepSeek-V3's, of which four ranks hold 256; a token chooses eight."""

UNTRIED, NAMED = "\\*", "†"
"""Marks of a kernel that has not run on that architecture, and of one that must be named."""


def machines() -> str:
    """Returns the wire and the kernel of each scheme on each machine, as `make_plan` chooses them."""
    named = [machine_named(name) for name in MACHINES]
    rows = []
    for scheme in SCHEMES.values():
        planned = [_planned(scheme, machine) for machine in named]
        wires = dict.fromkeys(span.wire.name for plan, _ in planned for span in plan.dispatchers)
        rows.append((f"`{scheme}`", " or ".join(wires), *(cell for _, cell in planned)))
    return _markdown(("scheme", "wire", *(f"{machine.name} ({machine.arch})" for machine in named)), rows)


def kernels_by_rows() -> str:
    """Returns where a family's kernels take over from each other on one machine, as `make_plan` chooses."""
    planned = {scheme: _planned(scheme, machine_named(MEASURED))[0] for scheme in SCHEMES.values()}
    rows = (
        (
            f"`{scheme}`",
            f"`{plan.kernel.name}`",
            ", ".join(f"`{span.kernel.name}` to {span.up_to}" for span in plan.kernels),
        )
        for scheme, plan in planned.items()
        if len(plan.kernels) > 1
    )
    return _markdown(("scheme", "family", "kernels by rows of all lanes"), rows)


def members() -> str:
    """Returns every member of vLLM's enums of backends with the kernel that corresponds to it."""
    rows = (
        (
            member.family.value,
            f"`{member.name}`",
            member.classes,
            f"`{member.kernel}`" if member.kernel else "",
            member.note,
        )
        for member in MEMBERS.values()
    )
    return _markdown(("experts", "member", "classes there", "kernel here", ""), rows)


def switches() -> str:
    """Returns every environment switch of vLLM that is about experts."""
    rows = (
        (
            f"`{switch.name}`",
            switch.default,
            switch.does,
            "<br>".join(
                shown(here) if value == "*" else f"`{value}`: {shown(here)}"
                for value, here in switch.answers.items()
            ),
        )
        for switch in SWITCHES.values()
    )
    return _markdown(("switch", "default there", "there", "here"), rows)


def backends() -> str:
    """Returns every name that vLLM's `--moe-backend` takes."""
    rows = ((f"`{entry.name}`", _backend(entry.name)) for entry in MOE_BACKENDS.values())
    return _markdown(("name", "here"), rows)


def dispatchers() -> str:
    """Returns every name that vLLM's `--all2all-backend` takes."""
    return _markdown(("name", "here"), ((f"`{name}`", _dispatcher(name)) for name in BACKEND_NAMES))


TABLES: dict[str, Callable[[], str]] = {
    "machines": machines,
    "kernels-by-rows": kernels_by_rows,
    "vllm-members": members,
    "vllm-switches": switches,
    "vllm-backends": backends,
    "vllm-dispatchers": dispatchers,
}
"""The tables by the names that `--table` takes."""


def table(name: str) -> str:
    """Returns the table called `name`. Raises ValueError with the known names."""
    if name not in TABLES:
        raise ValueError(f"unknown table {name!r}; known: {', '.join(TABLES)}")
    return TABLES[name]()


def _planned(scheme: Scheme, machine: Machine) -> tuple[Plan, str]:
    """Returns the plan, and its kernel's or family's name with marks."""
    model = next((form for form in (scheme.weights, scheme.activations) if form in FLOATS.values()), BF16)
    problem = Problem(scheme, model, LAYER, experts=256, lanes=4, owners=4, top_k=8, lane_rows=4096)
    mark = ""
    try:
        plan = make_plan(problem, machine, KERNELS, DISPATCHERS)
    except NoPlan:
        mark = NAMED
        plan = make_plan(problem, machine, KERNELS, DISPATCHERS, Wanted(kernel=REFERENCE.name))
    untried = "" if machine.arch in plan.kernel.verified else UNTRIED
    return plan, f"{plan.kernel.name}{mark}{untried}"


def _backend(name: str) -> str:
    entry = MOE_BACKENDS[name]
    return "<br>".join([*told(entry), entry.note] if entry.note else told(entry))


def _dispatcher(name: str) -> str:
    try:
        return f'`plan.all2all_backend = "{dispatcher_named(name).name}"`'
    except ValueError as error:
        return str(error).partition(": ")[2].partition("; dispatchers here")[0]


def _markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in lines)
