"""`RankActor`: the Ray actor of one rank.

Nothing heavy is imported here, so that its process can be watched before it imports what a rank needs.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import ray

from moeserve.proto.host_id import host_id

if TYPE_CHECKING:
    from moeserve.runtime.config import Config

ALL_GPUS = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
"""Actors see all of the host's GPUs and pick their own, or peer access between ranks cannot be probed."""


class RankActor:
    """Owns one rank, in a process that ends with it: the head kills the actor once `run` has returned."""

    def place(self) -> tuple[int, str, str]:
        """The id of this actor's process, of its node, and the host id that it tells the head."""
        return os.getpid(), ray.get_runtime_context().get_node_id(), host_id()

    def run(self, config: Config, rank: int, streams: str, token: str) -> None:
        """Runs the rank until its coordinator ends the stream. Raises what it cannot start for."""
        from moeserve.runtime.launch.rank_process import RankSpec, run_rank

        host = "127.0.0.1" if streams.startswith("127.") else ray.util.get_node_ip_address()
        here = _ranks_on_host(config.parallel.mesh.ranks)
        run_rank(RankSpec(config, rank, streams, token, host, here, _own_gpu(rank)))


def _own_gpu(rank: int) -> int:
    """The GPU that Ray reserved for this actor, though it sees all of them."""
    reserved = ray.get_gpu_ids()
    return int(reserved[0]) if reserved else rank


def _ranks_on_host(ranks: int) -> int:
    """How many ranks share this node's cores: those its share of the cluster's CPUs lets it hold."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    return max(1, -(-ranks // max(1, len(nodes))))
