"""Balance, moves and planning time of the balancing policies beside DeepSeek's algorithm.

    python -m bench.balance.placement --counts FOLDER [--ranks 4 8 16 32 64]

FOLDER holds count files of one model (JSON with `logical_count`), such as those of DeepSeek-V3 published with
SGLang; none is part of this project. The peer is DeepSeek's algorithm as `moeserve.experts.balance.eplb`
computes it, exact on its published example; beside it contiguous blocks. Balancedness is mean over largest
rank load of a layer. Three things are measured, each with 0 and with one redundant slot a rank:

1. balance of a first plan for each file: mean over layers and worst layer;
2. every shift from one file to another: balance and moves of `incremental` from its own first plan;
3. planning time on one core after warm-up: the best of many, as another process on the core is not the
   planner's, and the median.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from bench.lib.record import Result, write
from moeserve.experts.balance import balancer_named
from moeserve.experts.balance.budget import moves_a_layer
from moeserve.experts.balance.cost import CostModel
from moeserve.experts.balance.incremental import UNLIMITED
from moeserve.experts.balance.room import even_with_room
from moeserve.experts.load import Load, read_trace
from moeserve.experts.placement import Placement

OURS, PEER = balancer_named("incremental"), balancer_named("eplb")
DEEPSEEK = "DeepSeek EPLB"


def balancedness(placement: Placement, load: Load) -> np.ndarray:
    """Mean over largest rank load of each layer, `[L]`."""
    return 1 / placement.imbalance(load.tokens)


def first_plans(loads: dict[str, Load], base: Placement, case: str) -> Iterator[Result]:
    """How even the first plan of each file is: the mean over files of both figures."""
    found: dict[str, list[np.ndarray]] = {"ours": [], DEEPSEEK: [], "contiguous": []}
    for load in loads.values():
        found["ours"].append(balancedness(OURS.first(base, load), load))
        found[DEEPSEEK].append(balancedness(PEER.first(base, load), load))
        found["contiguous"].append(balancedness(base, load))
    for which, of_layers, slack in (("mean", np.mean, -0.001), ("worst layer", np.min, 0.0)):
        each = {name: [float(of_layers(one)) for one in many] for name, many in found.items()}
        lead = min(a - b for a, b in zip(each["ours"], each[DEEPSEEK], strict=True))
        values = {name: round(statistics.mean(many), 5) for name, many in each.items()}
        title = f"{case}, first plan, {which}"
        yield Result("placement", title, values.pop("ours"), "mean/max", "higher", None, values)
        title = f"{title}, least lead over {DEEPSEEK} of a file"
        yield Result("placement", title, round(lead, 5), "mean/max", "higher", slack)


def shifts(loads: dict[str, Load], base: Placement, case: str) -> Iterator[Result]:
    """Every shift from one file to another."""
    plans = {name: OURS.first(base, load) for name, load in loads.items()}
    fresh = {name: PEER.first(base, load) for name, load in loads.items()}
    found = []
    for before, after in itertools.permutations(loads, 2):
        load, start = loads[after], plans[before]
        changed = OURS(start, load, UNLIMITED)
        theirs = PEER(fresh[before], load, UNLIMITED)
        ratio = balancedness(changed, load).mean() / balancedness(theirs, load).mean()
        still = balancedness(start, load).mean() / balancedness(theirs, load).mean()
        moved = moves_a_layer(start.slots, changed.slots)
        found.append(
            (ratio, still, moved.mean(), moved.max(), moves_a_layer(fresh[before].slots, theirs.slots).mean())
        )
    ratios, stills, moved, most, theirs = (np.array(column) for column in zip(*found, strict=True))
    aim = 0.99 if base.owners == 4 else None
    for title, value, unmoved in (
        ("mean of pairs", ratios.mean(), stills.mean()),
        ("worst pair", ratios.min(), stills.min()),
    ):
        peers = {DEEPSEEK: 1.0, "not moving": round(float(unmoved), 5)}
        yield Result(
            "placement", f"{case}, shift, {title}", round(float(value), 5), "of EPLB", "higher", aim, peers
        )
    peers = {DEEPSEEK: round(float(theirs.mean()), 2)}
    aim = 6.0 if base.owners == 4 else None
    for title, value in (("mean of pairs", moved.mean()), ("worst pair", moved.max())):
        yield Result(
            "placement",
            f"{case}, shift, moves a layer, {title}",
            round(float(value), 2),
            "moves",
            "lower",
            aim,
            peers,
        )
    yield Result(
        "placement", f"{case}, shift, moves of one layer, worst", float(most.max()), "moves", "lower"
    )
    gigabytes = CostModel().expert_bytes * base.layers / 1e9
    yield Result(
        "placement",
        f"{case}, shift, DeepSeek-V3 FP8 experts moved, mean of pairs",
        round(float(moved.mean()) * gigabytes, 2),
        "GB",
        "lower",
        None,
        {DEEPSEEK: round(float(theirs.mean()) * gigabytes, 2)},
    )


def planning(loads: dict[str, Load], base: Placement, case: str) -> Iterator[Result]:
    """How long it takes to plan from scratch as DeepSeek does, and to plan a shift incrementally."""
    one, other = list(loads.values())[:2]
    start = OURS.first(base, one)
    slots = base.slots.shape[1]
    published = {
        "ADRS, best published, 288 slots on 32 ranks": 3.7,
        f"{DEEPSEEK}'s own code, as ADRS timed it": 540.0,
    }
    for title, plan, aim in (
        ("eplb from scratch", lambda: PEER.first(base, one), 5.0 if base.owners in (4, 32) else None),
        ("incremental, a shift", lambda: OURS(start, other, UNLIMITED), 5.0 if base.owners == 4 else None),
    ):
        best, median = timed(plan)
        name = f"{case}, {slots} slots, planning, {title}"
        peers = published if (base.owners, slots) == (32, 288) and title.startswith("eplb") else {}
        yield Result("placement", name, round(best, 3), "ms", "lower", aim, peers)
        yield Result("placement", f"{name}, median", round(median, 3), "ms", "lower")


def timed(plan: Callable[[], object], seconds: float = 2.0) -> tuple[float, float]:
    """Best and median milliseconds of many runs after a first."""
    plan()
    times: list[float] = []
    while sum(times) < seconds * 1e3 or len(times) < 5:
        begin = time.perf_counter()
        plan()
        times.append((time.perf_counter() - begin) * 1e3)
    return min(times), statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description="Balancing policies beside DeepSeek's algorithm.")
    parser.add_argument("--counts", type=Path, required=True, help="folder of count files of one model")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8, 16, 32, 64])
    args = parser.parse_args()
    loads = {path.stem: read_trace(path).total for path in sorted(args.counts.glob("*.json"))}
    if len(loads) < 2:
        parser.error(f"{args.counts} must hold two count files (*.json) or more")
    layers, experts = next(iter(loads.values())).tokens.shape
    results = []
    for ranks in args.ranks:
        for redundant in (0, ranks):
            base = even_with_room(layers, experts, ranks, redundant)
            case = f"EP{ranks} +{redundant}"
            for measure in (first_plans, shifts, planning):
                for result in measure(loads, base, case):
                    results.append(result)
                    peers = "  ".join(f"{name} {value:g}" for name, value in result.peers.items())
                    print(f"{result.case:66} {result.ours:10.5g} {result.unit:8} {peers}", flush=True)
    write(results)


if __name__ == "__main__":
    main()
