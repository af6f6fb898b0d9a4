"""`moeserve simulate`: shows what balancing policies make of recorded expert loads. It needs no GPU."""

from __future__ import annotations

import argparse
import csv
import io
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from moeserve.cli.arguments.names import named
from moeserve.cli.arguments.sizes import SIZE_NAMES, WAY_OUT, Sizes, add_size_flags, sizes_of
from moeserve.experts.balance import BALANCERS, Wish, balancer_named
from moeserve.experts.balance.cost import CostModel
from moeserve.experts.balance.forecast import Forecast, ForecastSetting, balance_of, forecast, rank_bytes
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
"""Fields of a result in JSON and CSV, and what the table calls them."""

NEED_SIZES = (
    "moved_bytes",
    "step_balancedness",
    "rank_bytes",
    "wire_bytes",
    "step_seconds",
    "shift_moved_bytes",
)
"""Fields that are left out where the sizes of experts are not known."""

SCALES = {"GB": 1e9, "MB": 1e6, "ms": 1e-3}

EXPLAINED = """\
--load takes a trace of moeserve, or a count file of SGLang or DeepSeek (JSON with logical_count). Several
files, or several windows of a trace, are workloads that follow each other: each policy plans for the first
when nothing is loaded, then rebalances to each next one. Balance, moves and the time to plan are those of
the last; with one workload, moves count from contiguous blocks.

Bytes, times and the balance of single steps need the sizes of the model's experts: --checkpoint reads them,
--hidden, --inner, --top-k and --weight-bits state them. Which were taken is printed first, and stands in
every result of JSON and CSV as "sizes". Without them those columns are left out, except
for loads of as many layers and experts as DeepSeek-V3 has.

--serve judges that last plan on another workload, as it is. The columns from 'then' on are what the policy
makes of it when it may rebalance to that workload.

balance is mean over largest rank load, its mean over layers and its worst layer; 'a step' draws single
steps of --tokens tokens a rank. A move is one expert copied into one slot. Time to plan is the policy's own,
the best of several after the first. Time a step comes from rates measured on H200
(moeserve/experts/balance/cost.py); --measured takes those of experts from results of
bench/experts/gpu_experts.py on your machine, and --rate changes any.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand `simulate` and its arguments."""
    about = "plan expert placement from recorded loads: balance, moves, memory, time a step; needs no GPU"
    parser = subparsers.add_parser(
        "simulate",
        help=about,
        description=about,
        epilog=EXPLAINED,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--load",
        nargs="+",
        type=named,
        required=True,
        metavar="FILE",
        help="expert loads, in the order they come",
    )
    add("--serve", type=named, metavar="FILE", help="judge the plan on this workload")
    add("--phase", choices=PHASES, help="take only windows of this phase, where a trace tells them apart")
    add("--ranks", type=int, nargs="+", required=True, metavar="N", help="8 16 ... 1024")
    add("--redundant", type=int, nargs="+", default=[0], metavar="N", help="spare slots, over all ranks")
    add("--policy", nargs="+", default=list(BALANCERS), metavar="NAME", help=", ".join(BALANCERS))
    add(
        "--objective",
        choices=("tokens", "active", "time"),
        default="tokens",
        help="what incremental balances",
    )
    add("--worth", type=float, default=Wish().worth, help="least gain of a move: ranks x max/mean load")
    add(
        "--budget",
        type=int,
        metavar="MOVES",
        help="most moves of one rebalance, all layers",
    )
    add("--budget-bytes", type=int, metavar="BYTES", help="the same in bytes of copied experts")
    add("--nodes", type=int, default=1, metavar="N", help="hosts that share the ranks evenly")
    add("--groups", type=int, default=1, metavar="N", help="expert groups of the router")
    add("--tokens", type=int, default=128, metavar="T", help="tokens that each rank brings to a step")
    add_size_flags(parser)
    add(
        "--measured",
        type=named,
        metavar="FILE",
        help="results of bench/experts/gpu_experts.py to take rates of experts from",
    )
    add("--weights", choices=WEIGHT_BITS, help="which of those results, and bits a weight; fp8 by default")
    rates = ", ".join(each.name for each in fields(CostModel) if each.name not in SIZE_NAMES)
    add("--rate", nargs="+", default=[], metavar="NAME=VALUE", help=f"rate of the cost model: {rates}")
    add("--json", action="store_true", help="print JSON")
    add("--csv", action="store_true", help="print CSV")
    add(
        "--plot",
        type=named,
        metavar="FOLDER",
        help="write SVG pictures of placements and of balance over time",
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Prints a result for each policy, number of ranks and redundancy. Raises ValueError."""
    if args.json and args.csv:
        raise ValueError("--json and --csv exclude each other")
    if args.plot is not None and Path(args.plot).exists() and not Path(args.plot).is_dir():
        raise ValueError(f"--plot {args.plot} is a file; name a folder, or one that is not there yet")
    loads, serve, head = workloads(args.load, args.serve, args.phase)
    rates = rates_of(args.rate)
    if args.weights and "weight_bits" not in rates:
        rates |= {"weight_bits": WEIGHT_BITS[args.weights]}
    sizes, source = sizes_of(args, head, {name: rates[name] for name in SIZE_NAMES if name in rates})
    _check_sizes(args, sizes)
    if sizes is not None and sizes.top_k > head.experts:
        raise ValueError(f"--top-k={sizes.top_k} must be {head.experts} at most, the experts of a layer")
    _check_budgets(args, 1 if serve is None and len(loads) == 1 else 2)
    model = measured(args.measured, args.weights or "fp8") if args.measured else CostModel()
    model = replace(model, **(rates | (asdict(sizes) if sizes else {})))
    said = sizes.line(source) if sizes else source
    rows = [row | {"sizes": said} for row in _rows(args, loads, serve, head, model)]
    if sizes is None:
        rows = [{name: row[name] for name in row if name not in NEED_SIZES} for row in rows]
    shown = _csv(rows) if args.csv else json.dumps(rows, indent=2) if args.json else _table(rows)
    print(shown if args.csv or args.json else f"sizes: {said}\n{shown}")
    return 0


def _check_sizes(args: argparse.Namespace, sizes: Sizes | None) -> None:
    """Raises ValueError for a flag that has no meaning without the sizes of experts."""
    if sizes is None:
        for flag, wanted in (
            (f"--objective {args.objective}", args.objective != "tokens"),
            ("--budget-bytes", args.budget_bytes is not None),
            ("--measured", args.measured is not None),
        ):
            if wanted:
                raise ValueError(f"{flag} needs the sizes of the model's experts: {WAY_OUT}")


def _check_budgets(args: argparse.Namespace, workloads: int) -> None:
    """Says where a budget has no effect. Raises ValueError for one that is negative."""
    for flag, most in (("--budget", args.budget), ("--budget-bytes", args.budget_bytes)):
        if most is None:
            continue
        if most < 0:
            raise ValueError(f"{flag}={most} must be 0 or more")
        if workloads == 1:
            print(
                f"moeserve simulate: {flag}={most} has no effect: it bounds rebalances, and one workload has "
                f"none; give a second --load, or --serve",
                file=sys.stderr,
            )


def workloads(
    files: Sequence[str], serve: str | None, phase: str | None = None
) -> tuple[list[Load], Load | None, LoadTrace]:
    """Reads the loads of `files` window by window, that of `serve`, and the first trace.

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
    return loads, traces[serve].total if serve else None, head


def _of_phase(file: str, trace: LoadTrace, phase: str | None) -> LoadTrace:
    kept = tuple(window for window in trace.windows if not phase or window.phase in ("", phase))
    if not kept:
        raise ValueError(f"{file} has no window of phase {phase}")
    return LoadTrace(trace.layers, kept)


def _size(trace: LoadTrace) -> str:
    return f"{len(trace.layers)} layers ({trace.layers[0]} to {trace.layers[-1]}) of {trace.experts} experts"


def _rows(
    args: argparse.Namespace, loads: list[Load], serve: Load | None, head: LoadTrace, model: CostModel
) -> Iterator[dict[str, Any]]:
    budget = UNLIMITED if args.budget is None else args.budget
    if args.budget_bytes is not None:
        budget = min(budget, args.budget_bytes // model.expert_bytes)
    settings = [
        ForecastSetting(ranks, redundant, args.nodes, args.tokens, budget, model=model)
        for ranks in args.ranks
        for redundant in args.redundant
    ]
    if args.groups < 1 or head.experts % args.groups:
        raise ValueError(f"--groups={args.groups} must divide the {head.experts} experts of a layer")
    for setting in settings:
        for name in args.policy:
            wish = Wish(args.nodes, args.groups, args.worth, _objective(args.objective, setting))
            found = forecast(balancer_named(name, wish), loads, setting)
            row = {"policy": name, "ranks": setting.ranks, "redundant": setting.redundant}
            row |= _row(found, setting, loads[-1] if serve is None else serve)
            if serve is not None:
                shifted = forecast(balancer_named(name, wish), [*loads, serve], setting)
                after = _row(shifted, setting, serve)
                row |= {f"shift_{key}": after[key] for key in SHIFT}
            if args.plot:
                from moeserve.cli.shown.simulate_plots import write_plots

                row["plots"] = write_plots(Path(args.plot), row, found, loads, head.layers)
            yield row


SHIFT = ("mean_balancedness", "worst_layer_balancedness", "moves_per_layer", "moved_bytes", "plan_seconds")


def _row(found: Forecast, setting: ForecastSetting, load: Load) -> dict[str, Any]:
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


def rates_of(rates: Sequence[str]) -> dict[str, Any]:
    """Returns the fields of the cost model that `NAME=VALUE` texts set. Raises ValueError."""
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
    return changes


def _objective(name: str, setting: ForecastSetting) -> ReplicaCost:
    tokens = setting.ranks * setting.rank_tokens
    if name == "active":
        return ActiveExperts(tokens, setting.model.top_k)
    return StepTime(setting.model, tokens) if name == "time" else Tokens()


def _csv(rows: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    names = [name for name in (*COLUMNS, "sizes") if name in rows[0]]
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
