"""`RankActor`: the Ray actor of one rank.

Nothing heavy is imported here, so that its process can be watched before it imports what a rank needs.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from typing import TYPE_CHECKING, NamedTuple

import ray

from moeserve.proto.host import host_id
from moeserve.runtime.launch.on_ray import niceness

if TYPE_CHECKING:
    from moeserve.runtime.config import Config

ALL_GPUS = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
"""Actors see all of the host's GPUs and pick their own, or peer access between ranks cannot be probed."""


NO_GPU = -1

IMPORTED = (
    "moeserve.runtime.launch.rank_process",
    "triton",
    "cuda.bindings.driver",
    "cuda.bindings.nvrtc",
)
"""What a rank's process imports before anything else; what is not installed is left out."""


class Placed(NamedTuple):
    """Where an actor is."""

    pid: int
    node: str
    host_id: str  # as it tells the head
    gpu: int  # that Ray has reserved for it, or NO_GPU


class RankActor:
    """Owns one rank, in a process that ends with it: the launcher kills the actor once `run` has returned."""

    def place(self) -> Placed:
        """Where this actor is."""
        reserved = ray.get_gpu_ids()
        gpu = int(reserved[0]) if reserved else NO_GPU
        return Placed(os.getpid(), ray.get_runtime_context().get_node_id(), host_id(), gpu)

    def warm(self) -> None:
        """Imports what a rank needs, and nothing more: it touches no device."""
        for name in IMPORTED:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)

    def run(self, config: Config, rank: int, streams: str, token: str, gpu: int) -> None:
        """Runs the rank on a GPU of its node until its head ends the stream. Raises what it cannot start for.

        Actors see all GPUs of the node; with NO_GPU the rank takes the one of its own number.
        """
        from moeserve.runtime.launch.rank_process import RankSpec, run_rank

        niceness.end_it()  # not before: while it imports, others serve on the same cores
        host = "127.0.0.1" if streams.startswith("127.") else ray.util.get_node_ip_address()
        here = _ranks_on_host(config.parallel.mesh.ranks)
        run_rank(RankSpec(config, rank, streams, token, host, here, rank if gpu == NO_GPU else gpu))


def _ranks_on_host(ranks: int) -> int:
    """How many ranks share this node's cores: those its share of the cluster's CPUs lets it hold."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    return max(1, -(-ranks // max(1, len(nodes))))
