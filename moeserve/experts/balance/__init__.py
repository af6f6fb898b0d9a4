"""Balancing policies: pure functions `(placement, load, budget in moves) -> placement`, one file each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from moeserve.experts.balance.eplb import Eplb
from moeserve.experts.balance.even import Even
from moeserve.experts.balance.flexible import Flexible
from moeserve.experts.balance.incremental import Incremental
from moeserve.experts.balance.objective import ReplicaCost, Tokens
from moeserve.experts.load import Load
from moeserve.experts.placement import Placement


class Policy(Protocol):
    """A balancing policy, a frozen value.

    Called, it keeps every expert, gives the same answer to the same question, leaves no layer worse by what
    it balances, and changes at most `budget` slots.
    """

    def __call__(self, placement: Placement, load: Load, budget: int) -> Placement:
        """The placement after at most `budget` moves (a move: one expert copied into one slot)."""
        ...

    def first(self, placement: Placement, load: Load) -> Placement:
        """The placement to load when nothing is loaded yet: only the size of `placement` counts."""
        ...


@dataclass(frozen=True)
class Wish:
    """What a policy is to respect. A policy that does not know a wish leaves it aside, as its entry says."""

    nodes: int = 1
    groups: int = 1
    worth: float = 0.014  # the least that pays one move: ranks x drop of largest over mean rank load
    cost: ReplicaCost = field(default_factory=Tokens)

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.groups < 1:
            raise ValueError(f"nodes={self.nodes} and groups={self.groups} must be 1 or more")


@dataclass(frozen=True)
class BalancerEntry:
    """One policy of the table: how to build it, what it is, and which wishes it knows."""

    name: str
    build: Callable[[Wish], Policy]
    about: str
    knows: tuple[str, ...] = ()


BALANCERS: dict[str, BalancerEntry] = {
    entry.name: entry
    for entry in (
        BalancerEntry("even", lambda wish: Even(), "contiguous blocks, whatever the load"),
        BalancerEntry(
            "eplb",
            lambda wish: Eplb(wish.nodes, wish.groups),
            "DeepSeek's: replicate the hottest, pack the heaviest first, from scratch",
            ("nodes", "groups"),
        ),
        BalancerEntry(
            "incremental",
            lambda wish: Incremental(wish.worth, wish.nodes, wish.groups, wish.cost),
            "swaps and replicas that pay their bytes, from the placement as it is",
            ("nodes", "groups", "worth", "cost"),
        ),
        BalancerEntry(
            "flexible",
            lambda wish: Flexible(),
            "replicas on different ranks, for the most room to choose among them in each step; from scratch",
        ),
    )
}


def balancer_named(name: str, wish: Wish | None = None) -> Policy:
    """The policy `name`. Raises ValueError with the known names."""
    if name not in BALANCERS:
        raise ValueError(f"unknown balancing policy {name!r}; known: {', '.join(BALANCERS)}")
    return BALANCERS[name].build(wish or Wish())
