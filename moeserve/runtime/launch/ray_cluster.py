"""`RayCluster`: the service on Ray, each rank an actor in a placement group, started again when it ends.

Ray places and configures. Tensors never travel through it, nor do steps: each actor runs its rank, which
talks to the coordinator on its own stream. The head's actor starts the ranks' actors, and owns them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import ray
from ray._private import ray_constants
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from moeserve.runtime.config import Config
from moeserve.runtime.launch.environment import machine_for, tune_process
from moeserve.runtime.launch.head_process import HeadProcess
from moeserve.runtime.launch.ray_ranks import RankActors
from moeserve.runtime.sections import ConfigError
from moeserve.runtime.telemetry import logs

log = logging.getLogger(__name__)

LOOPBACK = ("127.0.0.1", "localhost")

HEAD_STOP_SECONDS = 15.0  # for the head to end, beside what calls under way have


@contextmanager
def _on_loopback() -> Iterator[None]:
    """A Ray that is started within listens on loopback: its ports give whoever reaches them a shell.

    `_node_ip_address="127.0.0.1"` does not do it: Ray takes another address of the host instead, unless it
    believes to be on a system without clusters. It reads that when it is imported, and so do its processes.
    """
    switch, before = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR, ray_constants.ENABLE_RAY_CLUSTER
    said = os.environ.get(switch)
    os.environ[switch], ray_constants.ENABLE_RAY_CLUSTER = "0", False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
        os.environ.pop(switch)
        if said is not None:
            os.environ[switch] = said


class _HeadActor:
    """Owns the coordinator and the front door, on the node that serves them."""

    def __init__(self, config: Config, host: str) -> None:
        tune_process()
        logs.start(config.log, "head")
        self._config = config
        self._head = HeadProcess(config, host)
        self._ranks: RankActors | None = None

    def address(self) -> str:
        """The front door's `host:port`."""
        return self._head.address

    def streams(self) -> str:
        """The address that ranks connect to, `host:port`."""
        return self._head.streams

    def start_ranks(self, group: PlacementGroup, resources: dict[str, float]) -> None:
        """Starts the ranks, one in each bundle of `group`, with its resources."""
        self._ranks = RankActors(self._config, self._head, group, resources)
        self._ranks.start()

    def pid(self, rank: int) -> int:
        """The process of a rank's actor; 0 while it has none."""
        return 0 if self._ranks is None else self._ranks.pid(rank)

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

    def probes_address(self) -> str:
        """Where probes are answered."""
        return self._head.probes_address

    def stop(self) -> None:
        """Ends the group and the front door, and then the ranks' actors."""
        self._head.stop()
        if self._ranks is not None:
            self._ranks.stop()


class RayCluster:
    """A context: ranks run as actors inside it. It starts a Ray of its own unless given an address."""

    def __init__(self, config: Config) -> None:
        self._config = config.checked()
        self._owns_ray = False
        self._group: PlacementGroup | None = None
        self._head: Any = None
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
            _quietly(lambda: ray.kill(self._head))  # and with it the actors that it has left
        if self._group is not None:
            _quietly(lambda: remove_placement_group(self._group))
        self._head, self._group = None, None
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
        """The process of a rank's actor; 0 while it has none."""
        return int(ray.get(self._head.pid.remote(rank), timeout=60))

    def metrics_targets(self) -> list[str]:
        """`host:port` of every exporter that is up."""
        return list(ray.get(self._head.metrics_targets.remote(), timeout=30))

    def probes_address(self) -> str:
        """`host:port` where probes are answered; empty where none are."""
        return str(ray.get(self._head.probes_address.remote(), timeout=30))

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
            cores = len(os.sched_getaffinity(0))  # Ray begins with as many workers
            resources = max(cores, self._needed_cpus())  # ranks on one machine share its cores knowingly
            with _on_loopback() if self._config.server.host in LOOPBACK else nullcontext():
                ray.init(address="local", num_cpus=resources, include_dashboard=False)
        self._owns_ray = True

    def _place(self) -> None:
        config, ranks = self._config, self._config.parallel.mesh.ranks
        bundle = {"CPU": config.cluster.cpus_per_rank} | ({"GPU": 1.0} if self._on_gpu() else {})
        self._check_resources(bundle, ranks)
        self._group = placement_group([bundle] * ranks, strategy="PACK")
        ray.get(self._group.ready(), timeout=config.cluster.start_timeout_seconds)
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        host = "127.0.0.1" if config.server.host in LOOPBACK else ray.util.get_node_ip_address()
        self._head = (
            ray.remote(_HeadActor)
            .options(num_cpus=0, scheduling_strategy=here, max_concurrency=4)
            .remote(config, host)
        )
        self.address = ray.get(self._head.address.remote(), timeout=config.cluster.start_timeout_seconds)
        wait = config.cluster.start_timeout_seconds
        ray.get(self._head.start_ranks.remote(self._group, bundle), timeout=wait)
        ray.get(self._head.wait_serving.remote(wait), timeout=wait + HEAD_STOP_SECONDS)

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
        members = self._config.members  # also of ranks that may come later
        ranks = max(self._config.parallel.mesh.ranks, min(members.max_lanes, members.max_owners))
        return max(1, int(self._config.cluster.cpus_per_rank * ranks))

    def _on_gpu(self) -> bool:
        if self._config.plan.device == "auto":
            return bool(ray.cluster_resources().get("GPU", 0))
        return machine_for(self._config).device == "cuda"


def _quietly(work: Any) -> None:
    """Ending what may be gone already must not hide why it is ended."""
    try:
        work()
    except Exception as error:
        log.info("while stopping: %s", error)
