"""`RayCluster`: the service on Ray, each rank an actor in a placement group, restarted by Ray when it dies.

Ray places, restarts and configures. Tensors never travel through it, nor do steps: each actor runs its rank
in a thread and talks to the coordinator on its own stream.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from moeserve.runtime.config import Config, ConfigError
from moeserve.runtime.launch.environment import machine_for, tune_process
from moeserve.runtime.launch.head_process import HeadProcess
from moeserve.runtime.launch.rank_process import RankSpec, run_rank
from moeserve.runtime.telemetry import logs

log = logging.getLogger(__name__)

ALL_GPUS = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
"""Actors see all of the host's GPUs and pick their own, or peer access between ranks cannot be probed."""

HEAD_STOP_SECONDS = 15.0  # for the head to end, beside what calls under way have


class _RankActor:
    """Owns one rank. A restarted actor runs its constructor again and so takes its seat again."""

    def __init__(self, config: Config, rank: int, streams: str, token: str) -> None:
        host = "127.0.0.1" if streams.startswith("127.") else ray.util.get_node_ip_address()
        spec = RankSpec(
            config, rank, streams, token, host, _ranks_on_host(config.parallel.mesh.ranks), _own_gpu(rank)
        )
        self._thread = threading.Thread(target=self._run, args=(spec,), name="rank", daemon=True)
        self._thread.start()

    def pid(self) -> int:
        """The id of this actor's process."""
        return os.getpid()

    @staticmethod
    def _run(spec: RankSpec) -> None:
        try:
            run_rank(spec)
        except Exception:
            log.exception("rank %d ended", spec.rank)


class _HeadActor:
    """Owns the coordinator and the front door, on the node that serves them."""

    def __init__(self, config: Config, host: str) -> None:
        tune_process()
        logs.start(config.log, "head")
        self._head = HeadProcess(config, host)

    def addresses(self) -> tuple[str, str, str]:
        """Front door, streams, and the token ranks show."""
        return self._head.address, self._head.streams, self._head.token

    def wait_serving(self, timeout: float) -> None:
        """Returns once the group serves."""
        self._head.coordinator.wait_serving(timeout)

    def state(self) -> tuple[str, str]:
        """The group's state and reason."""
        progress = self._head.coordinator.progress()
        return progress.state, progress.reason

    def metrics_targets(self) -> list[str]:
        """Every exporter that is up."""
        return self._head.metrics_targets()

    def stop(self) -> None:
        """Ends the group and the front door."""
        self._head.stop()


class RayCluster:
    """A context: ranks run as actors inside it. It starts a Ray of its own unless given an address."""

    def __init__(self, config: Config) -> None:
        self._config = config.checked()
        self._owns_ray = False
        self._group: PlacementGroup | None = None
        self._head: Any = None
        self._actors: list[Any] = []
        self.address = ""

    def start(self) -> RayCluster:
        """Places the actors and waits until the group serves. Raises ConfigError, RuntimeError or
        TimeoutError.
        """
        try:
            self._connect()
            self._place()
            return self
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Ends the actors, the placement group, and a Ray that was started here."""
        if self._head is not None:
            within = self._config.server.drain_seconds + HEAD_STOP_SECONDS
            _quietly(lambda: ray.get(self._head.stop.remote(), timeout=within))
        for actor in (*self._actors, self._head):
            if actor is not None:
                _quietly(lambda actor=actor: ray.kill(actor, no_restart=True))
        if self._group is not None:
            _quietly(lambda: remove_placement_group(self._group))
        self._actors, self._head, self._group = [], None, None
        if self._owns_ray:
            ray.shutdown()
            self._owns_ray = False

    def state(self) -> tuple[str, str]:
        """The group's state and reason."""
        state: tuple[str, str] = ray.get(self._head.state.remote(), timeout=30)
        return state

    @property
    def group(self) -> PlacementGroup:
        """The placement group of the ranks, a bundle each."""
        if self._group is None:
            raise RuntimeError("the cluster has not started")
        return self._group

    def pid(self, rank: int) -> int:
        """The process of a rank's actor."""
        return int(ray.get(self._actors[rank].pid.remote(), timeout=60))

    def metrics_targets(self) -> list[str]:
        """`host:port` of every exporter that is up."""
        return list(ray.get(self._head.metrics_targets.remote(), timeout=30))

    def __enter__(self) -> RayCluster:
        return self.start()

    def __exit__(self, *ended: object) -> None:
        self.stop()

    def _connect(self) -> None:
        if ray.is_initialized():
            return
        address = self._config.cluster.ray_address or os.environ.get("RAY_ADDRESS", "")
        if address:
            ray.init(address=address, log_to_driver=True)
        else:
            resources = max(
                os.cpu_count() or 1, self._needed_cpus()
            )  # ranks on one machine share its cores knowingly
            ray.init(
                address="local", num_cpus=resources, include_dashboard=False, _node_ip_address="127.0.0.1"
            )
        self._owns_ray = True

    def _place(self) -> None:
        config, ranks = self._config, self._config.parallel.mesh.ranks
        bundle = {"CPU": config.cluster.cpus_per_rank} | ({"GPU": 1.0} if self._on_gpu() else {})
        self._check_resources(bundle, ranks)
        self._group = placement_group([bundle] * ranks, strategy="PACK")
        ray.get(self._group.ready(), timeout=config.cluster.start_timeout_seconds)
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        host = (
            "127.0.0.1"
            if config.server.host in ("127.0.0.1", "localhost")
            else ray.util.get_node_ip_address()
        )
        self._head = (
            ray.remote(_HeadActor)
            .options(num_cpus=0, scheduling_strategy=here, max_concurrency=4)
            .remote(config, host)
        )
        self.address, streams, token = ray.get(
            self._head.addresses.remote(), timeout=config.cluster.start_timeout_seconds
        )
        for rank in range(ranks):
            seat = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank)
            options = {
                "num_cpus": bundle["CPU"],
                "num_gpus": bundle.get("GPU", 0),
                "scheduling_strategy": seat,
            }
            actor = ray.remote(_RankActor).options(
                **options, max_restarts=-1, max_task_retries=0, runtime_env={"env_vars": ALL_GPUS}
            )
            self._actors.append(actor.remote(config, rank, streams, token))
        ray.get(self._head.wait_serving.remote(config.cluster.start_timeout_seconds))

    def _check_resources(self, bundle: dict[str, float], ranks: int) -> None:
        """Ray would wait for ever for what a cluster has not."""
        total = ray.cluster_resources()
        for kind, each in bundle.items():
            if total.get(kind, 0) < each * ranks:
                raise ConfigError(
                    f"{ranks} ranks need {each * ranks:g} {kind}s, and the Ray cluster "
                    f"has {total.get(kind, 0):g}; "
                    f"add nodes, use fewer ranks, or lower cluster.cpus_per_rank"
                )

    def _needed_cpus(self) -> int:
        return max(1, int(self._config.cluster.cpus_per_rank * self._config.parallel.mesh.ranks))

    def _on_gpu(self) -> bool:
        if self._config.plan.device == "auto":
            return bool(ray.cluster_resources().get("GPU", 0))
        return machine_for(self._config).device == "cuda"


def _own_gpu(rank: int) -> int:
    """The GPU that Ray reserved for this actor, though it sees all of them."""
    reserved = ray.get_gpu_ids()
    return int(reserved[0]) if reserved else rank


def _ranks_on_host(ranks: int) -> int:
    """How many ranks share this node's cores: those its share of the cluster's CPUs lets it hold."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    return max(1, -(-ranks // max(1, len(nodes))))


def _quietly(work: Any) -> None:
    """Ending what may be gone already must not hide why it is ended."""
    try:
        work()
    except Exception as error:
        log.info("while stopping: %s", error)
