"""`moeserve simulate`: what policies make of recorded expert loads, for groups of any size. Needs no GPU."""

from __future__ import annotations

import argparse
import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from moeserve.experts.balance import BALANCERS, Wish, balancer_named
from moeserve.experts.balance.cost import CostModel
from moeserve.experts.balance.forecast import Forecast, Setting, balance_of, forecast, rank_bytes
from moeserve.experts.balance.incremental import UNLIMITED
from moeserve.experts.balance.measured import WEIGHT_BITS, measured
from moeserve.experts.balance.objective import ActiveExperts, ReplicaCost, StepTime, Tokens
from moeserve.experts.load import PHASES, Load, LoadTrace, read_trace

COLUMNS = {
    "policy": "policy",
    "ranks": "ranks",
    "redundant": "redundant",
    "mean_balancedness": "balance",
    "worst_layer_balancedness": "worst",
    "step_balancedness": "a step",
    "moves_per_layer": "moves",
    "moved_bytes": "GB moved",
    "plan_seconds": "ms to plan",
    "rank_bytes": "GB a rank",
    "wire_bytes": "MB of wire",
    "step_seconds": "ms a step",
    "shift_mean_balancedness": "then",
    "shift_worst_layer_balancedness": "worst",
    "shift_moves_per_layer": "moves",
    "shift_moved_bytes": "GB moved",
    "shift_plan_seconds": "ms to plan",
}
"""Fields of a row in JSON and CSV, and what the table calls them."""

SCALES = {"GB": 1e9, "MB": 1e6, "ms": 1e-3}

EXPLAINED = """\
--load takes a trace of moeserve, or a count file of SGLang or DeepSeek (JSON with logical_count). Several
files, or several windows of a trace, are workloads that follow each other: each policy plans for the first
when nothing is loaded, then rebalances to each next one. Balance, moves and the time to plan are those of
the last; with one workload, moves count from contiguous blocks.

--serve judges that last plan on another workload, as it is. The columns from 'then' on are what the policy
makes of it when it may rebalance to that workload.

balance is mean over largest rank load, its mean over layers and its worst layer; 'a step' draws single
steps of --tokens tokens a rank. A move is one expert copied into one slot. Time to plan is the policy's own,
the best of several after the first. Time a step comes from rates measured on H200
(moeserve/experts/balance/cost.py); --measured takes those of experts from results of
bench/experts/gpu_experts.py on your machine, and --rate changes any.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand."""
    about = "plan expert placement from recorded loads: balance, moves, memory, time a step; needs no GPU"
    parser = subparsers.add_parser(
        "simulate",
        help=about,
        description=about,
        epilog=EXPLAINED,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--load", nargs="+", required=True, metavar="FILE", help="expert loads, in the order they come")
    add("--serve", metavar="FILE", help="judge the plan on this workload")
    add("--phase", choices=PHASES, help="only the windows of this phase, where a trace tells them apart")
    add("--ranks", type=int, nargs="+", required=True, metavar="N", help="8 16 ... 1024")
    add("--redundant", type=int, nargs="+", default=[0], metavar="N", help="spare slots, over all ranks")
    add("--policy", nargs="+", default=list(BALANCERS), metavar="NAME", help=", ".join(BALANCERS))
    add(
        "--objective",
        choices=("tokens", "active", "time"),
        default="tokens",
        help="what incremental balances",
    )
    add("--worth", type=float, default=Wish().worth, help="what a move must gain: ranks x max/mean load")
    add("--budget", type=int, default=UNLIMITED, metavar="MOVES", help="of one rebalance, over all layers")
    add("--budget-bytes", type=int, metavar="BYTES", help="the same in bytes of experts copied")
    add("--nodes", type=int, default=1, metavar="N", help="hosts the ranks share evenly")
    add("--groups", type=int, default=1, metavar="N", help="expert groups of the router")
    add("--tokens", type=int, default=128, metavar="T", help="tokens each rank brings to a step")
    add(
        "--measured",
        metavar="FILE",
        help="results of bench/experts/gpu_experts.py to take rates of experts from",
    )
    add("--weights", default="fp8", choices=WEIGHT_BITS, help="which of those results; fp8 by default")
    rates = ", ".join(each.name for each in fields(CostModel))
    add("--rate", nargs="+", default=[], metavar="NAME=VALUE", help=f"of the cost model: {rates}")
    add("--json", action="store_true", help="print JSON")
    add("--csv", action="store_true", help="print CSV")
    add("--plot", metavar="FOLDER", help="write SVG pictures of placements and of balance over time")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Prints a row for each policy, number of ranks and redundancy. Raises ValueError."""
    if args.json and args.csv:
        raise ValueError("--json and --csv exclude each other")
    loads, serve, layers = workloads(args.load, args.serve, args.phase)
    rows = list(_rows(args, loads, serve, layers))
    shown = _csv(rows) if args.csv else json.dumps(rows, indent=2) if args.json else _table(rows)
    print(shown)
    return 0


def workloads(
    files: Sequence[str], serve: str | None, phase: str | None = None
) -> tuple[list[Load], Load | None, tuple[int, ...]]:
    """The loads of `files` window by window, that of `serve`, and the decoder layers all of them count.

    With a `phase`, only those of its windows, and of windows that do not tell theirs.
    """
    traces = {file: _of_phase(file, read_trace(file), phase) for file in [*files, *filter(None, [serve])]}
    first, head = next(iter(traces.items()))
    for file, trace in traces.items():
        if (trace.experts, trace.layers) != (head.experts, head.layers):
            raise ValueError(
                f"{file} counts {_size(trace)}, and {first} {_size(head)}; workloads must be of one model"
            )
    loads = [window.load for file in files for window in traces[file].windows]
    return loads, traces[serve].total if serve else None, head.layers


def _of_phase(file: str, trace: LoadTrace, phase: str | None) -> LoadTrace:
    kept = tuple(window for window in trace.windows if not phase or window.phase in ("", phase))
    if not kept:
        raise ValueError(f"{file} has no window of phase {phase}")
    return LoadTrace(trace.layers, kept)


def _size(trace: LoadTrace) -> str:
    return f"{len(trace.layers)} layers ({trace.layers[0]} to {trace.layers[-1]}) of {trace.experts} experts"


def _rows(
    args: argparse.Namespace, loads: list[Load], serve: Load | None, layers: tuple[int, ...]
) -> Iterator[dict[str, Any]]:
    model = cost_model(args.rate, measured(args.measured, args.weights) if args.measured else CostModel())
    budget = args.budget
    if args.budget_bytes is not None:
        budget = min(budget, args.budget_bytes // model.expert_bytes)
    for ranks in args.ranks:
        for redundant in args.redundant:
            setting = Setting(ranks, redundant, args.nodes, args.tokens, budget, model=model)
            for name in args.policy:
                wish = Wish(args.nodes, args.groups, args.worth, _objective(args.objective, setting))
                found = forecast(balancer_named(name, wish), loads, setting)
                row = {"policy": name, "ranks": ranks, "redundant": redundant}
                row |= _row(found, setting, loads[-1] if serve is None else serve)
                if serve is not None:
                    shifted = forecast(balancer_named(name, wish), [*loads, serve], setting)
                    after = _row(shifted, setting, serve)
                    row |= {f"shift_{key}": after[key] for key in SHIFT}
                if args.plot:
                    from moeserve.cli.simulate_plots import write_plots

                    row["plots"] = write_plots(Path(args.plot), row, found, loads, layers)
                yield row


SHIFT = ("mean_balancedness", "worst_layer_balancedness", "moves_per_layer", "moved_bytes", "plan_seconds")


def _row(found: Forecast, setting: Setting, load: Load) -> dict[str, Any]:
    last, moves = found.changes[-1], found.changes[-1].moves
    balance = balance_of(last.after, load, setting)
    return {
        "mean_balancedness": balance.mean,
        "worst_layer_balancedness": balance.worst,
        "moves_per_layer": float(moves.mean()),
        "moved_bytes": int(moves.sum()) * setting.model.expert_bytes,
        "plan_seconds": last.seconds,
        "step_balancedness": balance.in_a_step,
        "rank_bytes": rank_bytes(last.after, setting.model),
        "wire_bytes": balance.wire_bytes,
        "step_seconds": balance.step_seconds,
        "balancedness_over_time": [one.mean for one in found.balances],
    }


def cost_model(rates: Sequence[str], model: CostModel) -> CostModel:
    """The cost model with `NAME=VALUE` changes. Raises ValueError."""
    kinds = {name: type(value) for name, value in vars(CostModel()).items()}
    changes: dict[str, Any] = {}
    for rate in rates:
        name, _, value = rate.partition("=")
        if name not in kinds:
            raise ValueError(f"--rate {rate}: unknown {name!r}; known: {', '.join(kinds)}")
        try:
            changes[name] = kinds[name](value)
        except ValueError as error:
            raise ValueError(f"--rate {rate}: {value!r} is not a number") from error
    return replace(model, **changes)


def _objective(name: str, setting: Setting) -> ReplicaCost:
    tokens = setting.ranks * setting.rank_tokens
    if name == "active":
        return ActiveExperts(tokens, setting.model.top_k)
    return StepTime(setting.model, tokens) if name == "time" else Tokens()


def _csv(rows: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    names = [name for name in COLUMNS if name in rows[0]]
    writer = csv.DictWriter(text, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().rstrip("\n")


def _table(rows: list[dict[str, Any]]) -> str:
    names = [name for name in COLUMNS if name in rows[0]]
    cells = [[COLUMNS[name] for name in names]]
    cells += [[_cell(COLUMNS[name], row[name]) for name in names] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(map(str.rjust, row[1:], widths[1:]))]).rstrip() for row in cells
    )


def _cell(title: str, value: object) -> str:
    if not isinstance(value, (int, float)):
        return str(value)
    unit = title.split()[0]
    if unit in SCALES:
        return f"{value / SCALES[unit]:.2f}"
    return f"{value:.4f}" if title in ("balance", "worst", "a step", "then") else f"{value:.4g}"
