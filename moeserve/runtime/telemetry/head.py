"""`CoordinatorTelemetry`: what the head tells Prometheus of the group, its load and its rebalancing."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import numpy as np
from numpy.typing import NDArray
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from moeserve.dispatch.members import Members
from moeserve.experts.load import Load
from moeserve.experts.placement import Placement
from moeserve.runtime.head.coordinator import Progress
from moeserve.runtime.head.generations.ready import SOURCES, Cover
from moeserve.runtime.head.rebalancer import OUTCOMES, RELOADED, Cycle
from moeserve.runtime.telemetry.exporter import Telemetry
from moeserve.runtime.telemetry.metrics import COORDINATOR, METRICS, PLACES, ROLES, STATES

BALANCE_SECONDS = 60.0  # the window balancedness is taken over
SNAPSHOT_SECONDS = 5.0  # between the loads remembered in that window, however often it is scraped
ENDED = ("", "failed", "stopped")  # a group that is no more, or not yet
HOT_LAYERS, HOT_EXPERTS = 5, 4  # that are shown: of the layers, and of each of them


class CoordinatorTelemetry(Telemetry):
    """The coordinator's metrics. `layers` are the decoder indices served, in the placement's order."""

    def __init__(self, model: str, version: str, layers: tuple[int, ...]) -> None:
        super().__init__(COORDINATOR, {"model_name": model}, version)
        self._layers = tuple(map(str, layers))
        for state in STATES:
            self._gauge("moe_service_state", state=state).set_function(partial(self._is_in, state))
        self._reforms = self._counter("moe_group_reforms_total")
        self._state, self._has_served = "", False
        self.stops: Callable[[], bool] = lambda: False  # whether callers are to come no more
        self._members: Callable[[], tuple[Members, Iterable[int]]] = lambda: (Members((), 0, 0), ())
        self._covers: Callable[[], Mapping[int, Cover]] = dict
        self._progress: Callable[[], Progress] | None = None
        self._loads: Callable[[], tuple[Placement, Load]] | None = None
        self._window = RecentLoad(BALANCE_SECONDS, SNAPSHOT_SECONDS)
        self._cycles = {end: self._counter("moe_balance_cycles_total", outcome=end) for end in OUTCOMES}
        self._reloads = {end: self._counter("moe_reloads_total", outcome=end) for end in RELOADED}
        self._moves = self._counter("moe_balance_moves_total")
        self._moved_bytes = self._counter("moe_balance_moved_bytes_total")
        self._epochs = self._counter("moe_balance_epochs_total")
        self._corrupted = self._counter("moe_balance_corrupted_copies_total")
        self._cycle_seconds = self._histogram("moe_balance_cycle_duration_seconds")
        self._expected = self._gauge("moe_balance_expected_gain")
        self._real = self._gauge("moe_balance_real_gain")
        self.watch(0.0, float)
        self._registry.register(_Computed(self._compute))

    def set_progress(self, progress: Progress) -> None:
        """The group's state changed; for `Coordinator.on_change`."""
        self._gauge("moe_group_generation").set(progress.generation)
        if progress.state == "serving" and self._state != "serving":
            self._reforms.inc(self._has_served and progress.broken)
            self._has_served = True
        self._state = progress.state

    def _is_in(self, state: str) -> bool:
        """Whether that is the state to be shown now."""
        stops = self._state not in ENDED and self.stops()
        return state == ("stopping" if stops else self._state)

    def progress(self, read: Callable[[], Progress]) -> None:
        """Steps, jobs and queue are read when scraped."""
        self._progress = read

    def members(self, read: Callable[[], tuple[Members, Iterable[int]]]) -> None:
        """The members of the group, and the seats of those that are there, are read when scraped."""
        self._members = read

    def covers(self, read: Callable[[], Mapping[int, Cover]]) -> None:
        """Where each member's experts would come from, were it lost, is read when scraped."""
        self._covers = read

    def loads(self, read: Callable[[], tuple[Placement, Load]]) -> None:
        """The placement that is served, and the load since the start, are read when scraped."""
        self._loads = read

    def weights_version(self, read: Callable[[], int]) -> None:
        """The oldest version of the weights that a layer is served with is read when scraped."""
        self._gauge("moe_weights_version").set_function(read)

    def watch(self, interval: float, age: Callable[[], float]) -> None:
        """Seconds between looks at the load, 0 for none; and since a cycle completed, read when scraped."""
        self._gauge("moe_balance_interval_seconds").set(interval)
        self._gauge("moe_balance_cycle_age_seconds").set_function(age if interval else float)

    def observe_cycle(self, cycle: Cycle) -> None:
        """A rebalancing cycle ended; for `Rebalancer.observe`."""
        self._cycles[cycle.outcome].inc()
        self._moves.inc(cycle.moves)
        self._moved_bytes.inc(cycle.nbytes)
        self._epochs.inc(cycle.epochs)
        self._corrupted.inc(cycle.corrupted)
        if cycle.seconds and cycle.outcome != "even":  # to find nothing to move takes no time worth a place
            self._cycle_seconds.observe(cycle.seconds)
        if cycle.outcome == "moved":
            self._expected.set(cycle.expected)

    def observe_gain(self, real: float) -> None:
        """What the last cycle that moved has gained, by the load since; for `Rebalancer.observe_gain`."""
        self._real.set(real)

    def observe_reload(self, cycle: Cycle) -> None:
        """A reload of weights ended; for `Rebalancer.observe_reload`."""
        self._reloads[cycle.outcome].inc()
        self._corrupted.inc(cycle.corrupted)

    def _compute(self) -> Iterator[Family]:
        members, there = self._members()
        up = set(there)
        yield self._family("moe_rank_up", [((str(seat),), seat in up) for seat in members.seats])
        yield self._family("moe_members", _places(members, up))
        covers = self._covers().items()
        layers = [((str(s), source), getattr(one, source)) for s, one in covers for source in SOURCES]
        yield self._family("moe_ready_layers", layers)
        if self._progress is not None:
            progress = self._progress()
            yield self._family("moe_group_steps_total", [((), progress.steps)])
            yield self._family("moe_group_jobs_total", [((), progress.jobs)])
            yield self._family("moe_jobs_queued", [((), progress.queued)])
            yield self._family("moe_steps_in_flight", [((), progress.in_flight)])
        if self._loads is not None:
            yield from self._balance(*self._loads())

    def _balance(self, placement: Placement, load: Load) -> Iterator[Family]:
        recent, routed = self._window.add(time.monotonic(), placement, load)
        balance = zip(self._layers, 1 / placement.imbalance(recent), recent.sum(axis=1), strict=True)
        by_layer = [((layer,), float(value)) for layer, value, tokens in balance if tokens > 0]
        yield self._family("moe_balancedness", by_layer)
        rows = zip(self._layers, routed.tolist(), strict=True)
        seats = self._members()[0].seat_of_owner
        if routed.shape[1] == 1:  # of sliced experts, of which every member computes its part of each row
            rows = zip(self._layers, np.repeat(routed, len(seats), axis=1).tolist(), strict=True)
        by_rank = [
            ((layer, str(seat)), count)
            for layer, row in rows
            for seat, count in zip(seats, row, strict=False)  # read one after the other
            if seat is not None
        ]
        yield self._family("moe_routed_rows_total", by_rank)
        yield self._family("moe_expert_load_ratio", self._hottest(placement, recent))

    def _hottest(
        self, placement: Placement, recent: NDArray[np.float64]
    ) -> Iterator[tuple[tuple[str, ...], float]]:
        """The hottest experts of the least balanced layers, over their layer's mean."""
        uneven = np.where(recent.any(axis=1), placement.imbalance(recent), 0.0)
        for layer in np.argsort(-uneven, kind="stable")[:HOT_LAYERS].tolist():
            tokens = recent[layer]
            for expert in np.argsort(-tokens, kind="stable")[:HOT_EXPERTS].tolist():
                if tokens[expert] > 0:
                    yield (self._layers[layer], str(expert)), float(tokens[expert] / tokens.mean())

    def _family(self, name: str, samples: Iterable[tuple[tuple[str, ...], float]]) -> Family:
        entry = METRICS[name]
        kind = CounterMetricFamily if entry.kind == "counter" else GaugeMetricFamily
        family = kind(name, entry.help, labels=(*self._own, *entry.labels))
        for labels, value in samples:
            family.add_metric((*self._own.values(), *labels), value)
        return family


def _places(members: Members, up: set[int]) -> Iterator[tuple[tuple[str, str], float]]:
    """How many lanes and owners' places are in each of `PLACES`."""
    for role, seats in zip(ROLES, (members.seat_of_lane, members.seat_of_owner), strict=True):
        found = Counter(
            "reserved" if seat is None else "present" if seat in up else "missing" for seat in seats
        )
        yield from (((role, place), found[place]) for place in PLACES)


class _Computed(Collector):
    """Metrics computed when scraped."""

    def __init__(self, compute: Callable[[], Iterable[Family]]) -> None:
        self._compute = compute

    def collect(self) -> Iterable[Family]:
        return self._compute()


class RecentLoad:
    """Expert load of the last `seconds`, from readings of a load that only grows while its ranks live.

    A reading below the one before (a rank started again) and a new placement both begin the window anew.
    """

    def __init__(self, seconds: float, step: float) -> None:
        self._seconds = seconds
        self._step = step  # between remembered readings
        self._readings: deque[tuple[float, NDArray[np.float64]]] = deque()
        self._last = np.zeros((0, 0))
        self._routed = np.zeros((0, 0))
        self._placement: Placement | None = None
        self._lock = threading.Lock()

    def add(
        self, now: float, placement: Placement, load: Load
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Takes a reading at `now` seconds: the window's load `[L, E]`, all rows routed `[L, ranks]`."""
        with self._lock:
            tokens = load.tokens
            last = self._last if self._last.shape == tokens.shape else np.zeros_like(tokens)
            grown = np.maximum(tokens - last, 0.0)
            rows = placement.owner_load(grown)
            self._routed = self._routed + rows if self._routed.shape == rows.shape else rows
            if placement != self._placement or (tokens < last).any():
                self._readings = deque([(now, tokens - grown)])
            self._placement, self._last = placement, tokens
            return self._recent(now, tokens), self._routed

    def _recent(self, now: float, tokens: NDArray[np.float64]) -> NDArray[np.float64]:
        while len(self._readings) > 1 and self._readings[1][0] <= now - self._seconds:
            self._readings.popleft()
        recent = tokens - self._readings[0][1]
        if now - self._readings[-1][0] >= self._step:
            self._readings.append((now, tokens))
        return recent
