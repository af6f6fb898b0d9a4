"""`RayCluster`: the service on Ray, each rank an actor in a placement group, started again when it ends.

Ray places and configures. Tensors never travel through it, nor do steps: each actor runs its rank, which
talks to the coordinator on its own stream. The launcher owns the ranks' actors; the head is a process beside
it, as under the local launcher, and no actor: where it ends the actors live on, and it starts again.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import grpc
import ray
from ray._private import ray_constants, services
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from moeserve.proto.credentials import Credentials
from moeserve.proto.host import usable_cores
from moeserve.runtime.config import Config
from moeserve.runtime.config_checks import is_loopback
from moeserve.runtime.launch.environment import machine_for
from moeserve.runtime.launch.forking import warm_processes
from moeserve.runtime.launch.head_child import run_head
from moeserve.runtime.launch.kept_head import KeptHead
from moeserve.runtime.launch.on_ray.ray_ranks import RankActors
from moeserve.runtime.sections import ConfigError

log = logging.getLogger(__name__)

CLIENT = "ray://"  # before addresses of Ray's client


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


class RayCluster:
    """A context: ranks run as actors inside it. It starts a Ray of its own unless given an address."""

    def __init__(self, config: Config) -> None:
        self._config = config.checked()
        self._owns_ray = False
        self._until = 0.0  # when the group has to serve
        self._group: PlacementGroup | None = None
        self._head: KeptHead | None = None
        self._ranks: RankActors | None = None

    @property
    def address(self) -> str:
        """The front door's `host:port`; empty before it has started."""
        return "" if self._head is None else self._head.address

    def start(self) -> RayCluster:
        """Places the actors and waits until the group serves. Raises ConfigError, RuntimeError or
        TimeoutError.
        """
        self._until = time.monotonic() + self._config.cluster.start_timeout_seconds
        try:
            self._connect()
            self._place()
            return self
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Ends the actors, the placement group, and a Ray that was started here."""
        head, ranks = self._head, self._ranks
        if ranks is not None and head is not None:
            _quietly(lambda: ranks.stop(head.stop))
        if head is not None:
            head.stop()
        if self._group is not None:
            _quietly(lambda: remove_placement_group(self._group))
        self._head, self._group, self._ranks = None, None, None
        if self._owns_ray:
            ray.shutdown()
            self._owns_ray = False

    def state(self) -> tuple[str, str]:
        """The group's state and reason."""
        return self.head.state()

    @property
    def head(self) -> KeptHead:
        """The head. RuntimeError before it was made."""
        if self._head is None:
            raise RuntimeError("the cluster has not started")
        return self._head

    @property
    def group(self) -> PlacementGroup:
        """The placement group of the ranks, a bundle each."""
        if self._group is None:
            raise RuntimeError("the cluster has not started")
        return self._group

    def pid(self, rank: int) -> int:
        """The process of a rank's actor; 0 while it has none."""
        return 0 if self._ranks is None else self._ranks.pid(rank)

    def spares(self) -> list[int]:
        """The processes of the spares that are warm."""
        return [] if self._ranks is None else self._ranks.spares()

    def metrics_targets(self) -> list[str]:
        """`host:port` of every exporter that is up."""
        return self.head.metrics_targets()

    def probes_address(self) -> str:
        """`host:port` where probes are answered; empty where none are."""
        return self.head.probes

    def __enter__(self) -> RayCluster:
        return self.start()

    def __exit__(self, *ended: object) -> None:
        self.stop()

    def _connect(self) -> None:
        if ray.is_initialized():
            return
        said, key = self._config.cluster.ray_address, "cluster.ray_address"
        address = said or os.environ.get("RAY_ADDRESS", "")
        if address:
            _wait_there(address, self._config.cluster.start_timeout_seconds, key if said else "RAY_ADDRESS")
            ray.init(address=address, log_to_driver=True)
        else:
            cores = usable_cores()  # Ray begins with as many workers
            resources = max(cores, self._needed_cpus())  # ranks on one machine share its cores knowingly
            with _on_loopback() if is_loopback(self._config.server.host) else nullcontext():
                ray.init(address="local", num_cpus=resources, include_dashboard=False)
        self._owns_ray = True

    def _place(self) -> None:
        config, ranks = self._config, self._config.parallel.mesh.ranks
        bundle = {"CPU": config.cluster.cpus_per_rank} | ({"GPU": 1.0} if self._on_gpu() else {})
        self._check_resources(bundle, ranks)
        self._group = placement_group([bundle] * ranks, strategy="PACK")
        self._wait_placed(self._group, bundle, ranks)
        host = "127.0.0.1" if is_loopback(config.server.host) else ray.util.get_node_ip_address()
        self._head = KeptHead(config, host, warm_processes((run_head.__module__,), heed_sigterm=False))
        self._head.start()
        self._ranks = RankActors(config, self._head, self._group, bundle)
        self._ranks.start()
        self._head.wait_serving(self._left())

    def _left(self) -> float:
        """Seconds until the group has to serve."""
        return max(0.0, self._until - time.monotonic())

    def _wait_placed(self, group: PlacementGroup, bundle: dict[str, float], ranks: int) -> None:
        """Waits until Ray has placed the ranks. Raises TimeoutError with what others leave of the cluster."""
        limit = self._config.cluster.start_timeout_seconds
        log.info("Ray places %d ranks, within cluster.start_timeout_seconds = %g", ranks, limit)
        try:
            ray.get(group.ready(), timeout=self._left())
        except ray.exceptions.GetTimeoutError:
            each = ", ".join(f"{kind} {count:g}" for kind, count in bundle.items())
            free = ray.available_resources()
            left = ", ".join(f"{kind} {free.get(kind, 0):g}" for kind in bundle)
            raise TimeoutError(
                f"Ray did not place {ranks} ranks ({each} each) within cluster.start_timeout_seconds = "
                f"{limit:g}: others hold what the cluster has ({left} free), or no node fits a rank; "
                "end them, add nodes, use fewer ranks, or lower cluster.cpus_per_rank"
            ) from None

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


def _wait_there(address: str, seconds: float, named: str = "cluster.ray_address") -> None:
    """Waits until a gRPC server answers at `address`, as `ray.init` would without end. named: what says it.
    Raises TimeoutError, ValueError where it is none.
    """
    client = address.startswith(CLIENT)
    where = address.removeprefix(CLIENT) if client else services.canonicalize_bootstrap_address(address)
    if where is None:  # there is none to be found, as `ray.init` says
        return
    log.info("Ray is waited for at %s, cluster.start_timeout_seconds = %g", where, seconds)
    tls = _tls_of_ray()
    with grpc.insecure_channel(where) if tls is None else grpc.secure_channel(where, tls) as channel:
        try:
            grpc.channel_ready_future(channel).result(seconds)
        except grpc.FutureTimeoutError:
            raise TimeoutError(
                f"no Ray answers at {where} ({named} = {address}) within "
                f"cluster.start_timeout_seconds = {seconds:g}; set --ray-address to a Ray that runs"
            ) from None


def _tls_of_ray() -> grpc.ChannelCredentials | None:
    """What Ray's own variables say of TLS between its processes; None where there is none.

    Raises OSError, and ValueError for files that hold something else.
    """
    if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return None
    files = (os.environ.get(f"RAY_TLS_{name}", "") for name in ("CA_CERT", "SERVER_CERT", "SERVER_KEY"))
    return Credentials(*files).grpc_channel()


def _quietly(work: Any) -> None:
    """Ending what may be gone already must not hide why it is ended."""
    try:
        work()
    except Exception as error:
        log.info("while stopping: %s", error)
