"""What each process tells Prometheus: exporters of the table of metrics, each on a port of its own.

`RankTelemetry` is fed by a rank's steps and door; `CoordinatorTelemetry` reads the coordinator when scraped.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from wsgiref.simple_server import WSGIServer

import numpy as np
from numpy.typing import NDArray
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    start_http_server,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from moeserve.experts.load import Load
from moeserve.experts.placement import Placement
from moeserve.runtime.config import ConfigError
from moeserve.runtime.coordinator import Progress
from moeserve.runtime.metrics import COORDINATOR, DIRECTIONS, METRICS, PHASES, PROCESS, RANK, STATES, Metric
from moeserve.runtime.step import StepRecord

BALANCE_SECONDS = 60.0  # the window balancedness is taken over
SNAPSHOT_SECONDS = 5.0  # between the loads remembered in that window, however often it is scraped


class Telemetry:
    """One process's metrics: those of every process, and the `rows` of its kind; `own` labels are on each."""

    def __init__(self, rows: tuple[Metric, ...], own: Mapping[str, str], version: str) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # they would double the series of counters
        self._own = dict(own)
        self._registry = CollectorRegistry()
        self._server: tuple[WSGIServer, threading.Thread] | None = None
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}
        for row in (*PROCESS, *rows):
            if not row.computed:
                self._build(row)
        ProcessCollector(registry=self._registry)
        self._gauge("moe_build_info", version=version).set(1)

    def request(self, method: str, transport: str, code: str, seconds: float) -> None:
        """One call ended. `code` is a gRPC status code's name, `transport` a payload transport's."""
        self._counter("moe_requests_total", method=method, transport=transport, code=code).inc()
        self._histogram("moe_request_duration_seconds", method=method, transport=transport).observe(seconds)

    def in_flight(self, read: Callable[[], int]) -> None:
        """Calls under way are read when scraped."""
        self._gauge("moe_requests_in_flight").set_function(read)

    def set_group(self, generation: int, epoch: int) -> None:
        """The process group's generation and the epoch served."""
        self._gauge("moe_group_generation").set(generation)
        self._gauge("moe_epoch").set(epoch)

    def serve(self, host: str, port: int) -> int:
        """Starts to answer scrapes at `http://host:port/metrics`; 0 picks a free port. Returns the port.

        Raises ConfigError when the address cannot be had.
        """
        try:
            server, thread = start_http_server(port, host, self._registry)
        except OSError as error:
            raise ConfigError(
                f"cannot serve metrics on {host}:{port}: {error.strerror or error}; set server.metrics_port "
                "to another port (the coordinator's; rank r takes it + 1 + r), 0 for free ones, -1 for none"
            ) from error
        self._server = server, thread
        return int(server.server_port)

    def close(self) -> None:
        """Stops to answer scrapes."""
        if self._server is not None:
            server, thread = self._server
            self._server = None
            server.shutdown()
            server.server_close()
            thread.join()

    def _build(self, row: Metric) -> None:
        labels, registry = (*self._own, *row.labels), self._registry
        match row.kind:
            case "counter":
                self._counters[row.name] = Counter(row.name, row.help, labels, registry=registry)
            case "gauge":
                self._gauges[row.name] = Gauge(row.name, row.help, labels, registry=registry)
            case "histogram":
                histogram = Histogram(row.name, row.help, labels, registry=registry, buckets=row.buckets)
                self._histograms[row.name] = histogram
            case kind:
                raise ValueError(f"{row.name} is of kind {kind!r}; known: counter, gauge, histogram")

    def _counter(self, name: str, **labels: str) -> Counter:
        return self._counters[name].labels(**self._own, **labels)

    def _gauge(self, name: str, **labels: str) -> Gauge:
        return self._gauges[name].labels(**self._own, **labels)

    def _histogram(self, name: str, **labels: str) -> Histogram:
        return self._histograms[name].labels(**self._own, **labels)


@dataclass(frozen=True, eq=False)
class _LayerCounters:
    """A layer's counters of one rank, bound once: finding a child by its labels costs more than counting."""

    steps: Counter
    tokens: Counter
    expert_rows: Counter
    dispatched: Counter
    combined: Counter


class RankTelemetry(Telemetry):
    """A rank's metrics. `carriers` names the carrier of each served layer, by decoder index."""

    def __init__(self, model: str, rank: int, version: str, carriers: Mapping[int, str]) -> None:
        super().__init__(RANK, {"model_name": model, "rank": str(rank)}, version)
        self._layers = {layer: self._bind(str(layer), carrier) for layer, carrier in carriers.items()}
        phases = [self._histogram("moe_step_phase_duration_seconds", phase=phase) for phase in PHASES]
        self._wait, self._dispatch, self._compute, self._combine = phases

    def observe_step(self, record: StepRecord) -> None:
        """One step this rank took part in."""
        layer, phases = self._layers[record.layer], record.phases
        layer.steps.inc()
        layer.tokens.inc(record.lane_rows)
        layer.expert_rows.inc(max(0, phases.expert_rows))
        layer.dispatched.inc(phases.dispatched_bytes)
        layer.combined.inc(phases.combined_bytes)
        if record.jobs:
            self._wait.observe(record.wait)
        self._dispatch.observe(phases.dispatch)
        self._compute.observe(phases.compute)
        self._combine.observe(phases.combine)

    def regions(self, read: Callable[[], tuple[int, int]]) -> None:
        """Shared-memory regions, (count, bytes), are read when scraped."""
        self._gauge("moe_shared_memory_regions").set_function(lambda: read()[0])
        self._gauge("moe_shared_memory_bytes").set_function(lambda: read()[1])

    def weights(self, prepared_bytes: int, bytes_read: int) -> None:
        """What this rank holds, and what it has read from the checkpoint."""
        self._gauge("moe_weights_bytes").set(prepared_bytes)
        self._gauge("moe_checkpoint_read_bytes").set(bytes_read)

    def _bind(self, layer: str, carrier: str) -> _LayerCounters:
        by_layer = ("moe_steps_total", "moe_tokens_total", "moe_expert_rows_total")
        return _LayerCounters(
            *(self._counter(name, layer=layer) for name in by_layer),
            *(self._counter("moe_wire_bytes_total", direction=way, carrier=carrier) for way in DIRECTIONS),
        )


class CoordinatorTelemetry(Telemetry):
    """The coordinator's metrics. `layers` are the decoder indices served, in the placement's order."""

    def __init__(self, model: str, version: str, layers: tuple[int, ...]) -> None:
        super().__init__(COORDINATOR, {"model_name": model}, version)
        self._layers = tuple(map(str, layers))
        self._states = {state: self._gauge("moe_service_state", state=state) for state in STATES}
        self._reforms = self._counter("moe_group_reforms_total")
        self._state, self._has_served = "", False
        self._ranks = 0
        self._up: Callable[[], Iterable[int]] = tuple
        self._progress: Callable[[], Progress] | None = None
        self._loads: Callable[[], tuple[Placement, Load]] | None = None
        self._window = LoadWindow(BALANCE_SECONDS, SNAPSHOT_SECONDS)
        self._registry.register(_Computed(self._compute))

    def set_progress(self, progress: Progress) -> None:
        """The group's state changed; for `Coordinator.on_change`."""
        for state, gauge in self._states.items():
            gauge.set(state == progress.state)
        self._gauge("moe_group_generation").set(progress.generation)
        if progress.state == "serving" and self._state != "serving":
            self._reforms.inc(self._has_served)
            self._has_served = True
        self._state = progress.state

    def progress(self, read: Callable[[], Progress]) -> None:
        """Steps, jobs and queue are read when scraped."""
        self._progress = read

    def seats(self, ranks: int, read: Callable[[], Iterable[int]]) -> None:
        """Which of `ranks` ranks are connected is read when scraped."""
        self._ranks, self._up = ranks, read

    def loads(self, read: Callable[[], tuple[Placement, Load]]) -> None:
        """The placement that is served, and the load since the start, are read when scraped."""
        self._loads = read

    def _compute(self) -> Iterator[Family]:
        up = set(self._up())
        yield self._family("moe_rank_up", [((str(rank),), rank in up) for rank in range(self._ranks)])
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
        by_rank = [((layer, str(rank)), count) for layer, row in rows for rank, count in enumerate(row)]
        yield self._family("moe_routed_rows_total", by_rank)

    def _family(self, name: str, samples: Iterable[tuple[tuple[str, ...], float]]) -> Family:
        row = METRICS[name]
        kind = CounterMetricFamily if row.kind == "counter" else GaugeMetricFamily
        family = kind(name, row.help, labels=(*self._own, *row.labels))
        for labels, value in samples:
            family.add_metric((*self._own.values(), *labels), value)
        return family


class _Computed(Collector):
    """Metrics computed when scraped."""

    def __init__(self, compute: Callable[[], Iterable[Family]]) -> None:
        self._compute = compute

    def collect(self) -> Iterable[Family]:
        return self._compute()


class LoadWindow:
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
            rows = placement.rank_load(grown)
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


def write_scrape_targets(path: Path, addresses: Mapping[str, str]) -> None:
    """Writes a service's scrape targets for Prometheus' file_sd, replacing the file in one go.

    `addresses` maps a process ("coordinator", "rank-0") to the "host:port" of its metrics.
    """
    groups = [{"targets": [address], "labels": {"process": name}} for name, address in addresses.items()]
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(json.dumps(groups, indent=2) + "\n")
    os.replace(beside, path)
