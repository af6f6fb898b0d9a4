"""What each process tells Prometheus: exporters of the table of metrics, each on a port of its own.

`RankTelemetry` is fed by a rank's steps and door; the head's exporter is in head.py beside this file.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from wsgiref.simple_server import WSGIServer

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    ProcessCollector,
    disable_created_metrics,
)

from moeserve.proto.passes.mailbox import Status
from moeserve.runtime.keys.keys import NO_KEYS, Keys
from moeserve.runtime.keys.sockets import CannotListen
from moeserve.runtime.planning.memory import PURPOSES
from moeserve.runtime.step import StepRecord
from moeserve.runtime.telemetry.durations import Duration, Durations
from moeserve.runtime.telemetry.http import serve_http
from moeserve.runtime.telemetry.metrics import DIRECTIONS, FAILURES, PHASES, PROCESS, RANK, Metric


class Telemetry:
    """One process's metrics: those of every process, and its kind's `entries`; `own` labels are on each."""

    def __init__(self, entries: tuple[Metric, ...], own: Mapping[str, str], version: str) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # they would double the series of counters
        self._own = dict(own)
        self._registry = CollectorRegistry()
        self.why_not: Callable[[], str] = lambda: (
            "it is starting"
        )  # layers can be served now; empty: they can
        self._server: tuple[WSGIServer, threading.Thread] | None = None
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Durations] = {}
        self._requests: dict[tuple[str, str, str], tuple[Counter, Duration]] = {}  # by labels
        for entry in (*PROCESS, *entries):
            if not entry.computed:
                self._build(entry)
        ProcessCollector(registry=self._registry)
        self._gauge("moe_build_info", version=version).set(1)

    def request(self, method: str, transport: str, code: str, seconds: float) -> None:
        """One call ended. `code` is a gRPC status code's name, `transport` a payload transport's.

        From the first call of a method on each of `FAILURES` is counted from 0: Prometheus sees no increase
        in a counter that begins with what a burst of them came to.
        """
        kind = method, transport, code
        bound = self._requests.get(kind)
        if bound is None:  # to find children by their labels takes longer than to count
            for failure in FAILURES:
                self._counter("moe_requests_total", method=method, transport=transport, code=failure)
            bound = self._requests[kind] = (
                self._counter("moe_requests_total", method=method, transport=transport, code=code),
                self._histogram("moe_request_duration_seconds", method=method, transport=transport),
            )
        bound[0].inc()
        bound[1].observe(seconds)

    def in_flight(self, read: Callable[[], int]) -> None:
        """Calls under way are read when scraped."""
        self._gauge("moe_requests_in_flight").set_function(read)

    def epoch(self, read: Callable[[], int]) -> None:
        """The epoch is read when scraped."""
        self._gauge("moe_epoch").set_function(read)

    def set_group(self, generation: int, epoch: int) -> None:
        """The process group's generation and the epoch served."""
        self._gauge("moe_group_generation").set(generation)
        self._gauge("moe_epoch").set(epoch)

    def serve(self, host: str, port: int, keys: Keys = NO_KEYS) -> int:
        """Starts to answer scrapes and probes at `http://host:port`; 0 picks a free port. Returns the port.

        keys: whom to let in, and whether it is https. Raises CannotListen.
        """
        try:
            server, thread = serve_http(host, port, self._registry, lambda: self.why_not(), keys)
        except OSError as error:
            way_out = "set server.metrics_port to another port (the coordinator's; rank r takes it + 1 + r)"
            way_out += ", 0 for free ones, -1 for none"
            raise CannotListen.at("cannot serve metrics", host, port, error, way_out) from error
        self._server = server, thread
        return int(server.server_port)

    def close(self) -> None:
        """Stops the server that answers scrapes."""
        if self._server is not None:
            server, thread = self._server
            self._server = None
            server.shutdown()
            server.server_close()
            thread.join()

    def _build(self, entry: Metric) -> None:
        labels, registry = (*self._own, *entry.labels), self._registry
        match entry.kind:
            case "counter":
                self._counters[entry.name] = Counter(entry.name, entry.help, labels, registry=registry)
            case "gauge":
                self._gauges[entry.name] = Gauge(entry.name, entry.help, labels, registry=registry)
            case "histogram":
                self._histograms[entry.name] = Durations(
                    entry.name, entry.help, labels, registry, entry.buckets
                )
            case kind:
                raise ValueError(f"{entry.name} is of kind {kind!r}; known: counter, gauge, histogram")

    def _counter(self, name: str, **labels: str) -> Counter:
        return self._counters[name].labels(**self._own, **labels)

    def _gauge(self, name: str, **labels: str) -> Gauge:
        return self._gauges[name].labels(**self._own, **labels)

    def _histogram(self, name: str, **labels: str) -> Duration:
        return self._histograms[name].labels(**self._own, **labels)


@dataclass(frozen=True, eq=False)
class _LayerCounters:
    """A layer's counters of one rank, bound once: finding a child by its labels costs more than counting."""

    steps: Counter
    tokens: Counter
    expert_rows: Counter


class RankTelemetry(Telemetry):
    """A rank's metrics. `dispatchers` names the dispatchers of each served layer, by decoder index.

    Steps may go on without the rows of `peers`. Each of these is counted from 0 on: Prometheus sees no
    increase in a counter that begins with 1.
    """

    def __init__(
        self,
        model: str,
        rank: int,
        version: str,
        dispatchers: Mapping[int, Iterable[str]],
        peers: Iterable[int] = (),
    ) -> None:
        super().__init__(RANK, {"model_name": model, "rank": str(rank)}, version)
        for peer in peers:
            self._counter("moe_late_peers_total", peer=str(peer))
        self._layers = {layer: self._bind(str(layer)) for layer in dispatchers}
        names = {name for planned in dispatchers.values() for name in planned}
        self._wires = {name: self._bind_wire(name) for name in names}
        phases = [self._histogram("moe_step_phase_duration_seconds", phase=phase) for phase in PHASES]
        self._wait, self._dispatch, self._compute, self._combine, self._launch, self._reply = phases

    def observe_step(self, record: StepRecord) -> None:
        """One step this rank took part in."""
        layer, phases = self._layers[record.layer], record.phases
        layer.steps.inc()
        layer.tokens.inc(record.lane_rows)
        layer.expert_rows.inc(max(0, phases.expert_rows))
        if phases.dispatcher not in self._wires:  # chosen by cost, after the plan was made
            self._wires[phases.dispatcher] = self._bind_wire(phases.dispatcher)
        dispatched, combined = self._wires[phases.dispatcher]
        dispatched.inc(phases.dispatched_bytes)
        combined.inc(phases.combined_bytes)
        for peer in record.late:
            self._counter("moe_late_peers_total", peer=str(peer)).inc()
        if not phases.timed:
            return
        if record.jobs:
            self._wait.observe(record.wait)
        self._dispatch.observe(phases.dispatch)
        self._compute.observe(phases.compute)
        self._combine.observe(phases.combine)
        self._launch.observe(record.launch)
        self._reply.observe(record.reply)

    def observe_ran(self, layer: int, steps: int) -> None:
        """So many steps of a layer were launched ahead for device lanes, and have ended."""
        self._layers[layer].steps.inc(steps)

    def observe_rows(self, layer: int, rows: int, taken: int) -> None:
        """So many more rows of a layer were computed, and taken from device lanes, as the device has counted
        them.
        """
        self._layers[layer].expert_rows.inc(rows)
        self._layers[layer].tokens.inc(taken)

    def regions(self, read: Callable[[], tuple[int, int]]) -> None:
        """Shared-memory regions, (count, bytes), are read when scraped."""
        self._gauge("moe_shared_memory_regions").set_function(lambda: read()[0])
        self._gauge("moe_shared_memory_bytes").set_function(lambda: read()[1])

    def device_lanes(self, read: Callable[[], int]) -> None:
        """How many callers are attached is read when scraped. Passes are counted from 0 on."""
        self._gauge("moe_device_lanes").set_function(read)
        for status in Status:
            self._counter("moe_passes_total", status=status.name.lower())

    def observe_pass(self, status: str) -> None:
        """A pass of a device lane has ended: `ok`, `late`, ..."""
        self._counter("moe_passes_total", status=status).inc()

    def weights(self, read: Callable[[], tuple[int, int]]) -> None:
        """Bytes this rank holds, and has read from the checkpoint, are read when scraped."""
        self._gauge("moe_weights_bytes").set_function(lambda: read()[0])
        self._gauge("moe_checkpoint_read_bytes").set_function(lambda: read()[1])

    def shadows(self, read: Callable[[], int]) -> None:
        """Bytes of the experts that are kept in host memory are read when scraped."""
        self._gauge("moe_shadow_bytes").set_function(read)

    def device_bytes(self, read: Callable[[], Mapping[str, int]]) -> None:
        """Bytes of this rank's device, by each of `PURPOSES`, are read when scraped."""
        for what in PURPOSES:
            self._gauge("moe_device_bytes", what=what).set_function(partial(_entry, read, what))

    def _bind(self, layer: str) -> _LayerCounters:
        by_layer = ("moe_steps_total", "moe_tokens_total", "moe_expert_rows_total")
        return _LayerCounters(*(self._counter(name, layer=layer) for name in by_layer))

    def _bind_wire(self, dispatcher: str) -> tuple[Counter, Counter]:
        """Bytes dispatched and combined by a dispatcher."""
        dispatch, combine = DIRECTIONS
        return (
            self._counter("moe_wire_bytes_total", direction=dispatch, all2all_backend=dispatcher),
            self._counter("moe_wire_bytes_total", direction=combine, all2all_backend=dispatcher),
        )


def _entry(read: Callable[[], Mapping[str, int]], name: str) -> int:
    return read()[name]


def write_scrape_targets(path: Path, addresses: Mapping[str, str]) -> None:
    """Writes a service's scrape targets for Prometheus' file_sd, replacing the file in one go.

    `addresses` maps a process ("coordinator", "rank-0") to the "host:port" of its metrics.
    """
    groups = [{"targets": [address], "labels": {"process": name}} for name, address in addresses.items()]
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(json.dumps(groups, indent=2) + "\n")
    os.replace(beside, path)
