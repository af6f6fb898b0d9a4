"""`Rebalancer`: looks at the load, asks the policy, and leads the group from epoch to epoch while it serves.

It lives beside the coordinator. Whatever goes wrong in a cycle is counted and said, and the next one comes;
how long ago one completed is always known.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moeserve.experts.balance import Policy
from moeserve.experts.cover.replicas import Covering, covered
from moeserve.experts.load import Load
from moeserve.experts.placement import Move, Placement
from moeserve.runtime.epoch import Change, Epoch
from moeserve.runtime.errors import CallerLeft, GroupUnavailable
from moeserve.runtime.head.coordinator import Coordinator
from moeserve.runtime.head.placing.changes import rebalance, reload
from moeserve.runtime.sections import OFF, BalanceConfig

log = logging.getLogger(__name__)

Wanted = Callable[[], bool]
"""Whether a change that has yet to begin is still wanted: its caller may have left."""

TURN_SECONDS = 10.0  # at most, for members that join between two steps; then changes are tried

FIRST_LOOK_SECONDS = 0.2  # between looks whether the group serves at all
NO_LIMIT = 1 << 60  # of moves
RELOAD_ATTEMPTS = 8  # at most, of one reload, where members come or go meanwhile
OUTCOMES = ("moved", "even", "idle", "abandoned", "failed")
"""How a cycle ends: experts moved; none that pays; too little load to tell; a change abandoned; an error."""
COMPLETED = frozenset({"moved", "even", "idle"})
RELOADED = ("reloaded", "abandoned", "failed")
"""The outcomes of a reload: done, abandoned, or failed by an error."""


@dataclass(frozen=True, eq=False)
class RebalancePlan:
    """What a rebalance would do: the placement it goes to, what is copied, and what that gains."""

    epoch: Epoch
    load: Load
    target: Placement
    moves: tuple[Move, ...]  # one for each slot that gets another expert
    nbytes: int  # of the moves, as experts lie in the checkpoint
    before: NDArray[np.float64]  # [L] largest over mean rank load, of the load
    after: NDArray[np.float64]  # [L]

    @property
    def gain(self) -> float:
        """Drop of largest over mean rank load, mean over layers."""
        return float((self.before - self.after).mean())


@dataclass(frozen=True)
class Cycle:
    """One look at the load and what came of it."""

    outcome: str  # of OUTCOMES
    reason: str = ""
    moves: int = 0  # experts copied and committed
    nbytes: int = 0  # of them, as they were copied
    epochs: int = 0
    seconds: float = 0.0
    expected: float = 0.0  # gain, by the load it was planned from
    corrupted: int = 0  # copies fetched again because their checksum was wrong


def _both(before: Cycle, then: Cycle) -> Cycle:
    """One reload of two attempts; it ended as the second one did."""
    return replace(
        then,
        moves=before.moves + then.moves,
        nbytes=before.nbytes + then.nbytes,
        epochs=before.epochs + then.epochs,
        corrupted=before.corrupted + then.corrupted,
    )


def always() -> bool:
    """A change that is wanted whoever leaves."""
    return True


class Rebalancer:
    """Plans and leads changes, one at a time; by itself every `interval_seconds`, unless its policy is off.

    `policy` is what it plans with, also by hand. `expert_nbytes` are the bytes of one expert of each layer.
    Where the loss of an owner is covered, every plan keeps to that, and each look gives experts that have
    one owner a second one, as far as slots reach, whatever the load and the policy. Without a policy it
    brings experts back to where they were before owners were lost, once those are there again.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        settings: BalanceConfig,
        policy: Policy,
        expert_nbytes: tuple[int, ...],
    ) -> None:
        self._coordinator, self._settings, self._policy = coordinator, settings, policy
        self._nbytes = expert_nbytes
        self._leading = threading.Lock()  # one plan or reload at a time
        self._moving = False
        self._stopping = threading.Event()
        self._home: Placement | None = None  # as the group first served, or moved to since
        self._seen: NDArray[np.float64] | None = None  # load at the last look
        self._last: tuple[Placement, Placement] | None = None  # before and after the last cycle that moved
        self._completed_at = time.monotonic()
        self.observe: Callable[[Cycle], None] = lambda cycle: None
        self.observe_gain: Callable[[float], None] = lambda real: None
        self.observe_reload: Callable[[Cycle], None] = lambda cycle: None

    @property
    def moves(self) -> bool:
        """Whether experts move: nobody should join meanwhile."""
        return self._moving

    @property
    def coordinator(self) -> Coordinator:
        """The coordinator of the group that it changes."""
        return self._coordinator

    @property
    def interval(self) -> float:
        """Seconds between looks; 0 where it does not look by itself."""
        looks = self._settings.policy != OFF or self._settings.cover_owners
        return self._settings.interval_seconds if looks else 0.0

    def start(self) -> None:
        """Begins to look by itself, unless the policy is off and no loss is covered."""
        if self.interval:
            threading.Thread(target=self._run, name="rebalancer", daemon=True).start()

    def stop(self) -> None:
        """Begins no further cycle; one under way goes on."""
        self._stopping.set()

    def age(self) -> float:
        """Seconds since a cycle completed, a change of one, or of a reload, was committed, or the group first
        served.
        """
        return time.monotonic() - self._completed_at

    def plan(self, policy: Policy | None = None, max_moves: int | None = None) -> RebalancePlan:
        """What a rebalance would do now, by the load since the last look; without any, since the start.

        `policy` and `max_moves` (0: as many as pay) are the configured ones unless given.
        """
        total = self._coordinator.load().tokens
        recent = self._recent(total)
        return self._planned(recent if recent.any() else total, policy, max_moves)

    def _planned(
        self, tokens: NDArray[np.float64], policy: Policy | None = None, max_moves: int | None = None
    ) -> RebalancePlan:
        epoch, load = self._coordinator.epoch, Load(tokens)
        budget = self._settings.max_moves if max_moves is None else max_moves
        chosen = policy or self._policy
        if self._settings.cover_owners:
            chosen = Covering(chosen)
        return self._plan_to(chosen(epoch.placement, load, budget or NO_LIMIT), epoch, load)

    def _plan_to(self, target: Placement, epoch: Epoch, load: Load) -> RebalancePlan:
        moves = epoch.placement.moves_to(target)
        nbytes = sum(self._nbytes[move.layer] for move in moves)
        before, after = (p.imbalance(load.tokens) for p in (epoch.placement, target))
        return RebalancePlan(epoch, load, target, moves, nbytes, before, after)

    def rebalance(
        self, policy: Policy | None = None, max_moves: int | None = None, wanted: Wanted = always
    ) -> tuple[RebalancePlan, Cycle]:
        """Plans as `plan` does and moves now, whatever the load; blocks. The plan, and what came of it.

        Raises as `alone` does, and so does `reload`.
        """
        with self.alone(wanted):
            plan = self.plan(policy, max_moves)
            self._seen = self._coordinator.load().tokens
            return plan, self._counted(self._moved(plan))

    @contextmanager
    def alone(self, wanted: Wanted = always) -> Iterator[None]:
        """A context in which nobody else changes the placement or the weights, for which it waits.

        Raises CallerLeft where it is not `wanted` any more then, and GroupUnavailable once the service stops.
        """
        with self._leading:
            self._coordinator.wait_turned(TURN_SECONDS)
            if self._stopping.is_set():
                raise GroupUnavailable("the service is stopping, and changes nothing any more")
            if not wanted():
                raise CallerLeft("the caller left while this waited for another change: nothing was done")
            yield

    def move_to(self, target: Placement) -> Cycle:
        """Moves experts until they lie as `target` says, whatever the load; within `alone`. Blocks."""
        epoch, started = self._coordinator.epoch, time.monotonic()
        return self._counted(self._led(rebalance(epoch, target, self._settings.staging_slots), started, 0.0))

    def mend(self) -> Cycle:
        """Gives as many experts as can a second owner, where the loss of one is covered; within `alone`. They
        are at home there from now on: owners have come or gone on purpose.
        """
        if not self._settings.cover_owners:
            return Cycle("even")
        cycle = self._counted(self._moved(self._mended(self._coordinator.load().tokens)))
        if cycle.outcome in COMPLETED:
            self._home = self._coordinator.epoch.placement
        return cycle

    @property
    def cover_owners(self) -> int:
        """Of how many owners the slots have to stand the loss."""
        return self._settings.cover_owners

    def reload(self, name: str, wanted: Wanted = always) -> Cycle:
        """Brings every layer to the weights of this name (`Epoch.names`), layer by layer while steps run;
        blocks.

        Where members come or go meanwhile it goes on once the group serves again. The cycle's outcome is one
        of RELOADED. Layers that were reloaded before one is abandoned stay so.
        """
        with self.alone(wanted):
            started, done = time.monotonic(), Cycle("reloaded")
            version = len(self._coordinator.epoch.weights) + 1
            for _ in range(RELOAD_ATTEMPTS):
                self._coordinator.wait_turned(TURN_SECONDS)
                generation = self._coordinator.generation
                changes = reload(self._coordinator.epoch, name, version)
                cycle = self._led(changes, started, expected=0.0, done="reloaded")
                done = _both(done, cycle)
                if not cycle.reason or not self._formed_since(generation):
                    break
            self.observe_reload(done)
            return done

    def _formed_since(self, generation: int) -> bool:
        """Whether the group serves in a later generation, for which it is waited where it forms."""
        try:
            self._coordinator.wait_serving(self._settings.prepare_timeout_seconds)
        except (TimeoutError, RuntimeError) as error:
            log.warning("a reload is not gone on with: %s", error)
            return False
        return self._coordinator.generation != generation

    def _run(self) -> None:
        while self._home is None and not self._stopping.wait(FIRST_LOOK_SECONDS):
            self._completed_at = time.monotonic()
            if self._coordinator.progress().state == "serving":
                self._home = self._coordinator.epoch.placement
        while not self._stopping.wait(self._settings.interval_seconds):
            self.look()

    def look(self) -> Cycle:
        """One cycle: looks at the load since the last one, and moves what pays; blocks."""
        with self._leading:
            self._coordinator.wait_turned(TURN_SECONDS)
            try:
                return self._counted(self._cycle())
            except Exception as error:  # said and counted, and the next cycle comes
                log.exception("a rebalancing cycle failed")
                return self._counted(Cycle("failed", f"{type(error).__name__}: {error}"))

    def _cycle(self) -> Cycle:
        progress = self._coordinator.progress()
        if progress.state != "serving":
            return Cycle("abandoned", f"the group is {progress.state}: {progress.reason}")
        total = self._coordinator.load().tokens
        recent, self._seen = self._recent(total), total
        if self._settings.cover_owners and (mend := self._mended(total)).moves:
            return self._moved(mend, home=False)
        if self._settings.policy == OFF:
            return Cycle("even", "as many experts have a second owner as can, and the policy is off")
        if recent.sum(axis=1).max(initial=0.0) < self._settings.min_tokens:
            return Cycle("idle", "too few tokens since the last look")
        if self._last is not None:
            before, after = (p.imbalance(recent).mean() for p in self._last)
            self.observe_gain(float(before - after))
            self._last = None
        if self._coordinator.epoch.placement.imbalance(recent).max() < 1 + self._settings.min_imbalance:
            return Cycle("even", "every layer is within min_imbalance")
        plan = self._planned(recent)
        return self._moved(plan) if plan.moves else Cycle("even", "no move pays")

    def _mended(self, tokens: NDArray[np.float64]) -> RebalancePlan:
        """The plan back to where experts were before members came or went, or, where that cannot be, by which
        as many experts as can have two owners.
        """
        epoch, load = self._coordinator.epoch, Load(tokens)
        if self._home is None:
            self._home = epoch.placement
        back = self._settings.policy == OFF and self._home.room == epoch.placement.room
        return self._plan_to(covered(self._home if back else epoch.placement, load), epoch, load)

    def _moved(self, plan: RebalancePlan, *, home: bool = True) -> Cycle:
        started, before = time.monotonic(), self._coordinator.epoch.placement
        changes = rebalance(plan.epoch, plan.target, self._settings.staging_slots)
        cycle = self._led(changes, started, expected=plan.gain)
        if home and cycle.outcome == "moved":
            self._home = plan.target
        if cycle.moves:
            self._last = before, self._coordinator.epoch.placement
        return cycle

    def _led(self, changes: Iterable[Change], started: float, expected: float, done: str = "moved") -> Cycle:
        """Carries out changes one after the other, until one is abandoned. `done`: how one ends otherwise."""
        moves = nbytes = epochs = corrupted = 0
        name, reason = "even" if done == "moved" else done, ""
        self._moving = True
        try:
            for change in changes:
                outcome = self._coordinator.change(change, self._settings.prepare_timeout_seconds)
                corrupted += sum(one.corrupted for one in outcome.staged)
                if reason := outcome.abandoned:
                    name = "abandoned"
                    break
                name = done
                self._completed_at = time.monotonic()  # it goes on: a reload may take many intervals
                epochs += 1
                moves += len(outcome.staged)
                nbytes += sum(one.nbytes for one in outcome.staged)
        except ValueError as error:  # no way there within the staging slots
            name, reason = "failed", str(error)
        finally:
            self._moving = False
        seconds = time.monotonic() - started
        what, why = "weights" if done == "reloaded" else "experts", reason and f": {reason}"
        log.info("%s %s: %d copies in %d epochs, %.2f s%s", what, name, moves, epochs, seconds, why)
        return Cycle(name, reason, moves, nbytes, epochs, seconds, expected, corrupted)

    def _counted(self, cycle: Cycle) -> Cycle:
        if cycle.outcome in COMPLETED:
            self._completed_at = time.monotonic()
        self.observe(cycle)
        return cycle

    def _recent(self, total: NDArray[np.float64]) -> NDArray[np.float64]:
        """Load since the last look; a rank that started again counts from zero."""
        if self._seen is None or self._seen.shape != total.shape or (total < self._seen).any():
            return total
        return total - self._seen
