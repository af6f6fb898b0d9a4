"""The service of `gpu_serve_on`: its setups, configuration and processes, and calls with known answers."""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from bench.lib.record import ROOT
from bench.service.faults.points import FOLDER
from bench.service.faults.service import Service
from bench.service.hops.sizes import Experts, Sizes
from moeserve.proto.client import MoeClient
from moeserve.runtime.config import Config

ROWS = 8  # of one call: with some experts each they need every owner
LARGEST_ERROR = 2e-2  # of an answer against the same call's first one: replicas and groups sum otherwise
TRUTH_ERROR = 6e-2  # of the first answer against float32, of rows that are not rounded
TRUTH_ROWS = 2
TOLD_PID = re.compile(r"\brank (\d+) is process (\d+)")


@dataclass(frozen=True)
class Setup:
    """How experts of a lost owner are covered, and the model that is served."""

    sizes: Sizes
    ranks: int
    redundant: int
    shadows: bool  # in host memory, and no second replicas; else second replicas as far as slots reach

    def __str__(self) -> str:
        slots = f"{self.sizes.experts}+{self.redundant} slots"
        return f"{self.ranks} owners of {self.owner_bytes / 1e9:.2g} GB, {slots}, {self.source}"

    @property
    def owner_bytes(self) -> float:
        """Of the experts that an owner holds."""
        spread = self.sizes.experts + (0 if self.shadows else self.redundant)
        return self.sizes.layers * spread / self.ranks * expert_bytes(self.sizes)

    @property
    def source(self) -> str:
        """Where a lost owner's experts are to come from."""
        return "shadows" if self.shadows else "replicas"

    def aim(self, kind: str) -> float:
        """Seconds of an interruption; a stop adds its detection."""
        covered = 1.0 + self.owner_bytes / 20e9 if self.shadows else 0.5
        return covered + (2.0 if kind == "stop" else 0.0)


def expert_bytes(sizes: Sizes) -> float:
    """Of one expert in FP8 with block scales."""
    return 3 * sizes.hidden * sizes.inner * (1 + 4 / 128**2)


def slot_bytes(setup: Setup) -> float:
    """Of the slots that an owner has, empty ones too."""
    sizes = setup.sizes
    return sizes.layers * (sizes.experts + setup.redundant) / setup.ranks * expert_bytes(sizes)


class Place(NamedTuple):
    """Where a run is. caller: the device of a caller of passes."""

    gpus: bool
    caller: str
    shared: bool  # the caller's GPU is an owner's too
    dispatcher: str

    @classmethod
    def of(cls, ranks: int, dispatcher: str) -> Place:
        """On GPUs where each rank has one; a caller has its own where there is one more."""
        count = torch.cuda.device_count()
        if count < ranks:
            return cls(False, "cpu", False, dispatcher)
        return cls(True, f"cuda:{min(ranks, count - 1)}", count == ranks, dispatcher)


def config_of(setup: Setup, place: Place, checkpoint: Path, **values: object) -> Config:
    """A service's configuration; `values` override keys, with `__` for the dot."""
    keys = {
        "model.checkpoint": str(checkpoint),
        "parallel.data_parallel_size": setup.ranks,
        "parallel.enable_expert_parallel": True,
        "plan.device": "cuda" if place.gpus else "cpu",
        "plan.all2all_backend": place.dispatcher,
        "server.port": 0,
        "server.metrics_port": 0,
        "step.lane_rows": 1024,
        "cluster.launcher": "local",
        "cluster.threads_per_rank": 0 if place.gpus else 1,
        "members.serve_on": True,
        "balance.redundant_experts": setup.redundant,
        "balance.cover_owners": int(not setup.shadows),
        "balance.shadows": setup.shadows,
        "balance.shadow_bytes_per_second": 0,
        "passes.share_gpu": place.shared,
    }
    return Config().with_values(keys | {key.replace("__", "."): value for key, value in values.items()})


class GpuService(Service):
    """`moeserve serve` in a process of its own. Nothing in it is wrapped: ranks are known by its log."""

    def __init__(self, config: Config, folder: Path) -> None:
        super().__init__(config, folder)
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        named = {FOLDER: str(folder), "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
        self._environment = os.environ | named

    def living(self) -> dict[int, list[int]]:
        """The process that each rank has now, stopped ones too; none where it has ended."""
        last = {int(rank): int(pid) for rank, pid in TOLD_PID.findall(self.log())}
        return {rank: [pid] if self._is_ours(pid) else [] for rank, pid in last.items()}

    def _is_ours(self, pid: int) -> bool:
        mark = f"{FOLDER}={self.folder}".encode()
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            return mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return False


class Call(NamedTuple):
    """A call with the answer that it had first."""

    layer: int
    batch: tuple[Tensor, Tensor, Tensor]
    right: Tensor


class Truths:
    """Answers of the first and the last layer in float32, computed in a thread while the service starts."""

    def __init__(self, sizes: Sizes) -> None:
        self._thread = ThreadPoolExecutor(1, "truths")
        self._found = {
            layer: self._thread.submit(Experts(sizes).answer, layer, _first_rows(batch_of(sizes, layer)))
            for layer in sorted({0, sizes.layers - 1})
        }

    def error(self, call: Call) -> float:
        """Of a call's answer; 0 for a layer that is not compared."""
        if call.layer not in self._found:
            return 0.0
        right = self._found[call.layer].result()
        return float((call.right[:TRUTH_ROWS].float() - right).norm() / right.norm())

    def close(self) -> None:
        """Waits for what is being computed, and computes nothing more."""
        self._thread.shutdown(cancel_futures=True)


def batch_of(sizes: Sizes, layer: int) -> tuple[Tensor, Tensor, Tensor]:
    """The rows of a layer's call."""
    return sizes.batch(ROWS, 100 + layer)


def _first_rows(batch: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    hidden, experts, weights = batch
    return hidden[:TRUTH_ROWS], experts[:TRUTH_ROWS], weights[:TRUTH_ROWS]


def known_calls(address: str, sizes: Sizes, truths: Truths) -> list[Call]:
    """A call of each layer with its answer. Raises RuntimeError where that is far from float32."""
    calls = []
    with MoeClient(address, timeout=120.0) as client:
        for layer in range(sizes.layers):
            batch = batch_of(sizes, layer)
            for _ in range(4):  # as launched, recorded and replayed
                answer = client.forward(layer, *batch)
            assert isinstance(answer, Tensor)
            calls.append(Call(layer, batch, answer.clone()))
    for call in calls:
        if not (error := truths.error(call)) < TRUTH_ERROR:
            raise RuntimeError(f"layer {call.layer}: relative error {error:.2e} is over {TRUTH_ERROR}")
    return calls
