"""How even single steps are, by the choice of replicas, beside a static split and what is possible at all.

    python -m bench.balance.replicas --counts FOLDER [--ranks 4] [--redundant 8 16] [--tokens 128]

FOLDER holds count files of one model (JSON with `logical_count`), such as those of DeepSeek-V3 published with
SGLang; none is part of this project. Steps are drawn from them: each token gets K different experts, each
with the chance its count gives it, tokens independent of each other. Balance is mean over largest rows of a
rank, all lanes together, its mean over steps. Each plan is served its own workload (right) and every other.

Every lane brings the same number of tokens and chooses replicas from its own ids alone. `hash` is the static
split. "gathered" is the `lp` of all lanes' rows taken as one batch; "best" is what no choice
can beat on that placement, even one that sees all rows.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from numpy.typing import NDArray

from bench.lib.record import Result, write
from moeserve.experts.balance import balancer_named
from moeserve.experts.balance.room import even_with_room
from moeserve.experts.load import Load, read_trace
from moeserve.experts.placement import Placement
from moeserve.experts.routing.address_book import AddressBook
from moeserve.experts.routing.replicas import REPLICA_CHOICES

TOP_K = 8
AIM = 0.998
CHOICES = tuple(REPLICA_CHOICES)
BOUNDED = 8  # ranks up to which every set of ranks is looked at for the bound
GATHERED, BEST = "lp, gathered", "best"

Ids = NDArray[np.int64]


def drawn(tokens: NDArray[np.float64], rows: int, random: np.random.Generator) -> Ids:
    """`[rows, K]` different experts a token, each with chance K times its share of `tokens [E]`.

    Systematic sampling in an order shuffled for every token: the chances are exact.
    """
    chance = np.minimum(tokens * TOP_K / tokens.sum(), 1.0)
    for _ in range(8):  # an expert that every token chooses leaves more to the others
        chance = np.minimum(chance * TOP_K / chance.sum(), 1.0)
    order = random.random((rows, len(tokens))).argsort(axis=1)
    ladder = chance[order].cumsum(axis=1)
    marks = random.random((rows, 1)) + np.arange(TOP_K)
    at = (ladder[:, None, :] * (TOP_K / ladder[:, None, -1:]) <= marks[:, :, None]).sum(axis=2)
    return np.take_along_axis(order, np.minimum(at, len(tokens) - 1), axis=1)


class Steps:
    """Steps of every layer under one workload: ids `[lanes, T, K]`, drawn once for all plans."""

    def __init__(self, load: Load, lanes: int, tokens: int, steps: int, every: int) -> None:
        random = np.random.default_rng(0)
        self.layers = range(0, len(load.tokens), every)
        self._ids = {
            layer: [
                np.stack([drawn(load.tokens[layer], tokens, random) for _ in range(lanes)])
                for _ in range(steps)
            ]
            for layer in self.layers
        }

    def __iter__(self) -> Iterator[tuple[int, Ids]]:
        return ((layer, ids) for layer, many in self._ids.items() for ids in many)


class Bench:
    """A placement's books, one a lane and choice, and what they make of steps."""

    def __init__(self, placement: Placement) -> None:
        self._placement, lanes = placement, range(placement.owners)
        self._books = {name: [AddressBook(placement, choice=name, lane=n) for n in lanes] for name in CHOICES}
        self._sets = list(range(1, 1 << placement.owners)) if placement.owners <= BOUNDED else []

    def balance(self, steps: Steps) -> dict[str, float]:
        """Mean balance over steps, by choice, and what is possible."""
        found: dict[str, list[float]] = {}
        for layer, ids in steps:
            mean = ids.size / self._placement.owners
            for name, books in self._books.items():
                rows = sum(self._rows(book, layer, lane) for book, lane in zip(books, ids, strict=True))
                found.setdefault(name, []).append(mean / float(np.max(rows)))
            gathered = self._rows(self._books["lp"][0], layer, np.concatenate(ids))
            found.setdefault(GATHERED, []).append(mean / float(gathered.max()))
            if self._sets:
                found.setdefault(BEST, []).append(mean / self._least(layer, ids))
        return {name: statistics.mean(many) for name, many in found.items()}

    def _rows(self, book: AddressBook, layer: int, ids: Ids) -> Ids:
        """Rows of each rank when `ids [T, K]` are resolved as one batch."""
        valid = torch.ones(len(ids), dtype=torch.bool)
        slots = book.resolve(layer, torch.from_numpy(ids), valid).numpy().reshape(-1)
        return np.bincount(slots // self._placement.slots_per_owner, minlength=self._placement.owners)

    def _least(self, layer: int, ids: Ids) -> float:
        """The least rows of the fullest rank: what must be inside a set of ranks, over their number."""
        counts = np.bincount(ids.reshape(-1), minlength=self._placement.experts)
        holders = np.zeros(self._placement.experts, dtype=np.int64)
        for rank in range(self._placement.owners):
            held = self._placement.of_owner(layer, rank)
            holders[held[held >= 0]] |= 1 << rank
        return max(counts[holders & ~inside == 0].sum() / inside.bit_count() for inside in self._sets)


def evaluated(
    policy: str, loads: dict[str, Load], base: Placement, steps: dict[str, Steps]
) -> Iterator[Result]:
    """The right and the wrong workloads of every plan of a policy."""
    right, wrong = [], {}
    for planned, load in loads.items():
        bench = Bench(balancer_named(policy).first(base, load))
        for served in loads:
            found = bench.balance(steps[served])
            if served == planned:
                right.append(found)
            else:
                wrong[planned, served] = found
    spare = base.slots.shape[1] - base.experts
    head = f"EP{base.owners} +{spare}, plans of {policy}"
    worst = min(wrong, key=lambda pair: wrong[pair]["lp"])
    print(f"{head}: the worst pair is {worst[0]}, then {worst[1]}", flush=True)
    for title, many in (
        ("right workload, mean of files", right),
        ("right workload, worst file", [min(right, key=lambda one: one["lp"])]),
        ("wrong workload, mean of pairs", list(wrong.values())),
        ("wrong workload, worst pair", [wrong[worst]]),
    ):
        values = {name: round(statistics.mean(one[name] for one in many), 5) for name in many[0]}
        ours = values.pop("lp")
        yield Result("replicas", f"{head}, {title}", ours, "mean/max", "higher", AIM, values)


def main() -> None:
    parser = argparse.ArgumentParser(description="Balance of single steps by the choice of replicas.")
    parser.add_argument("--counts", type=Path, required=True, help="folder of count files of one model")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--redundant", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--tokens", type=int, default=128, help="tokens each lane brings to a step")
    parser.add_argument("--policy", nargs="+", default=["incremental", "flexible"])
    parser.add_argument("--steps", type=int, default=2, help="steps drawn for a layer")
    parser.add_argument("--every", type=int, default=8, help="looks at every so many layers")
    args = parser.parse_args()
    torch.set_num_threads(1)
    loads = {path.stem: read_trace(path).total for path in sorted(args.counts.glob("*.json"))}
    if len(loads) < 2:
        parser.error(f"{args.counts} must hold two count files (*.json) or more")
    layers, experts = next(iter(loads.values())).tokens.shape
    steps = {
        name: Steps(load, args.ranks, args.tokens, args.steps, args.every) for name, load in loads.items()
    }
    results = []
    for redundant, policy in itertools.product(args.redundant, args.policy):
        for result in evaluated(policy, loads, even_with_room(layers, experts, args.ranks, redundant), steps):
            results.append(result)
            peers = "  ".join(f"{name} {value:.5f}" for name, value in result.peers.items())
            print(f"{result.case}\n    lp {result.ours:.5f}  {peers}", flush=True)
    write(results)


if __name__ == "__main__":
    main()
