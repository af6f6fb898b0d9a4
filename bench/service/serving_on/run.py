"""`Run`: one run of `serve_on`: its options, the checkpoint and the calls, and services to be started."""

from __future__ import annotations

import argparse
import math
import re
import statistics
import time
import urllib.error
import urllib.request
from collections.abc import Collection
from pathlib import Path

from bench.service.faults.callers import Answer, Callers, Manner
from bench.service.faults.service import Service
from bench.service.moves import Size, alone, make_batch, make_checkpoint
from bench.service.serving_on.events import Setup
from moeserve.proto.client import MoeClient
from moeserve.proto.errors import MoeError
from moeserve.runtime.config import Config

HIDDEN, INNER, EXPERTS = 768, 512, 64
EXPERT_BYTES = 4 * 3 * HIDDEN * INNER
WORKLOADS = 8
ROWS = 8  # of one call: with 4 experts each they need every owner
SWITCHES = {"members.serve_on": False, "balance.cover_owners": 0, "balance.shadows": False}
"""What `--show cost` compares, and how each is off."""


class Run:
    """One run. `setup` says how its services are configured where nothing else does."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder = args, folder
        layers = max(1, round(args.megabytes * 1e6 * args.ranks / EXPERTS / EXPERT_BYTES))
        size = Size(HIDDEN, INNER, EXPERTS, layers, 0, ROWS)
        self.checkpoint = folder / f"checkpoint of {layers} layers"
        if not (self.checkpoint / "model.safetensors").exists():  # one of an earlier run will do
            self.checkpoint.mkdir()
            make_checkpoint(self.checkpoint, size, "fp32")
        self.calls = []
        for number in range(max(WORKLOADS, layers)):
            layer, batch = number % layers, make_batch(size, number, args.seed + number)
            self.calls.append((layer, batch, alone(self.checkpoint, layer, batch)))
        self._services = 0

    @property
    def files(self) -> list[Path]:
        """The checkpoint's files."""
        return sorted(self.checkpoint.glob("*.safetensors"))

    def service(self, setup: Setup, **values: object) -> Service:
        """A service that is yet to be started; `values` override keys, with `__` for the dot."""
        self._services += 1
        keys = {
            "model.checkpoint": str(self.checkpoint),
            "parallel.data_parallel_size": self.args.ranks,
            "parallel.enable_expert_parallel": True,
            "plan.device": "cpu",
            "balance.redundant_experts": setup.redundant,
            "server.port": 0,
            "server.metrics_port": 0,
            "step.lane_rows": 64,
            "cluster.launcher": setup.launcher,
            "cluster.threads_per_rank": 1,
            "cluster.spares": setup.spares,
            "cluster.cpus_per_rank": 0.1,
            "members.serve_on": True,
            "balance.cover_owners": int(setup.redundant > 0),
            "balance.shadows": setup.shadows,
        }
        keys |= {key.replace("__", "."): value for key, value in values.items()}
        folder = self.folder / f"service {self._services}, {setup}, {time.strftime('%H%M%S')}"
        return Service(Config().with_values(keys), folder)

    def callers(self, service: Service, count: int = 1) -> Callers:
        """Callers with default patience, each of whom makes one call at a time without a pause."""
        return Callers(service.address, self.calls, count, self.args.seed, Manner(60.0, 0.0))


def whole(service: Service, ranks: int, gone: Collection[int] = ()) -> str:
    """Why not all members serve, each in one process that is none of `gone`; empty where they do."""
    living = service.living()
    pids = sorted(pid for found in living.values() for pid in found)
    if len(pids) != ranks or set(pids) & set(gone):
        return f"processes {living}; {sorted(gone)} were to end"
    try:
        with MoeClient(service.address, timeout=5.0) as client:
            status, topology = client.status(), client.topology()
    except MoeError as error:
        return f"no status: {error}"
    up = {one.rank: one.pid for one in status.ranks if one.up}
    lanes = sorted(lane.rank for lane in topology.lanes)
    if status.state != "serving" or sorted(up.values()) != pids or len(lanes) != ranks:
        return f"{status.state} ({status.reason}), up {up} of processes {living}, lanes {lanes}"
    return ""


def wait_whole(service: Service, ranks: int, seconds: float, gone: Collection[int] = ()) -> str:
    """Waits until all members serve; why they do not, or nothing."""
    until = time.monotonic() + seconds
    while missing := whole(service, ranks, gone):
        if time.monotonic() > until:
            return missing
        time.sleep(0.05)
    return ""


def covered(service: Service, seats: Collection[int]) -> str:
    """Where the experts of these seats would come from, as the head's metrics say; empty where none does."""
    found = re.search(r"^metrics on (\S+)", service.log(), re.MULTILINE)
    if found is None:
        return ""
    try:
        with urllib.request.urlopen(f"http://{found[1]}/metrics", timeout=5) as answer:
            text = answer.read().decode()
    except (urllib.error.URLError, OSError):
        return ""
    layers: dict[str, float] = {}
    for labels, value in re.findall(r"^moe_ready_layers\{([^}]*)\} (\S+)$", text, re.MULTILINE):
        read = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        if int(read.get("seat", read.get("rank", -1))) in seats:
            layers[read["source"]] = layers.get(read["source"], 0.0) + float(value)
    return ", ".join(f"{source} {count:g}" for source, count in sorted(layers.items()) if count)


def bytes_read(service: Service) -> dict[int, int]:
    """Bytes that each member's process has read from the checkpoint."""
    with MoeClient(service.address, timeout=30.0) as client:
        return {one.pid: one.bytes_read for one in client.status().ranks}


def right_times(answers: list[Answer]) -> list[float]:
    """When right answers came."""
    return [one.ended for one in answers if not one.wrong]


def median_call(answers: list[Answer]) -> float:
    """Seconds of the median call that was answered rightly; 0 where none was."""
    return statistics.median([one.ended - one.began for one in answers if not one.wrong] or [0.0])


def quantile(values: list[float], share: float) -> float:
    """The smallest of `values` that at least `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
