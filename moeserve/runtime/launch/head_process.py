"""What the head's process consists of: the coordinator, the front door, and their metrics; and `Head`, what
whoever starts ranks knows of it.
"""

from __future__ import annotations

import logging
import math
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

from moeserve import __version__
from moeserve.checkpoints.hub import located
from moeserve.experts.balance import Policy, balancer_named
from moeserve.runtime.config import Config
from moeserve.runtime.control.rings import spin_of
from moeserve.runtime.doors.admin_door import AdminDoor
from moeserve.runtime.doors.endpoint import Endpoint, HeldEndpoint, door_limits
from moeserve.runtime.doors.front_door import NOT_A_LANE, FrontDoor
from moeserve.runtime.doors.operations import Operations
from moeserve.runtime.epoch import marked
from moeserve.runtime.head.coordinator import Coordinator, Progress
from moeserve.runtime.head.generations.patience import Patience
from moeserve.runtime.head.rebalancer import Rebalancer
from moeserve.runtime.head.reception import RankProcess
from moeserve.runtime.head.scaling import ScaleSeconds, Scaling
from moeserve.runtime.head.stopping import STOPPING
from moeserve.runtime.keys.keys import Keys
from moeserve.runtime.keys.sockets import HeldPort, reached_at
from moeserve.runtime.launch.watch import ProcessWatch
from moeserve.runtime.ordering.sequencer import StepPace
from moeserve.runtime.planning.layers import first_epoch, why_whole
from moeserve.runtime.sections import OFF
from moeserve.runtime.served import Served, model_name, served_from
from moeserve.runtime.telemetry import logs
from moeserve.runtime.telemetry.head import CoordinatorTelemetry
from moeserve.runtime.telemetry.log_levels import LogLevels
from moeserve.runtime.telemetry.probes import Probes

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.01  # between looks for calls under way at the front door
AGAIN_SECONDS = 0.5  # for callers whose lane is lost while the service stops to find another
REPLY_SECONDS = 2.0  # for answers that are there to reach the front door's callers

LEAVE_SECONDS = 5.0  # for a member to notice that its collective has ended, beside step.timeout_seconds

ENDED = ("failed", "stopped")  # states of a group that serves no more


@dataclass(frozen=True)
class HeadStart:
    """What a launcher keeps for one head after another: its token, and the ports that it holds; picklable."""

    token: str = field(repr=False)
    streams: socket.socket = field(repr=False)  # listens, also between two heads
    port: int  # a HeldPort, or as configured where it could not be held; so are the next two
    metrics_port: int
    health_port: int
    again: bool = False  # there was a head before, whose members come back
    wanted: frozenset[int] | None = None  # the ranks that were to have a process, as that one said last
    used: int = 1  # versions of the weights that were served: none of their numbers comes again
    stopping: bool = False  # the service is about to stop


class HeadProcess:
    """Starts the coordinator and the front door; launchers start the ranks.

    It may live in a process that is its caller's, so it leaves that process's settings alone: a launcher that
    owns the process calls `tune_process` first.
    """

    def __init__(self, config: Config, host: str, start: HeadStart | None = None) -> None:
        """start: what a launcher keeps for it; None: a fresh token, and ports as configured."""
        served = served_from(config)
        later = [] if start is None else [""] * (start.used - 1)
        epoch = first_epoch(served).with_names([marked("", served.checkpoint.mark), *later])
        server, pace = config.server, StepPace.of(config.step)
        self.token = secrets.token_hex(16) if start is None else start.token
        logs.hide(self.token)
        keys = Keys(config.keys, self.token)
        at = host if start is None else start.streams
        self.coordinator = Coordinator(epoch, served.layers, pace, at, self.token)
        self.coordinator.secure(keys)
        spin = spin_of(config.cluster.spin_seconds, served.mesh.ranks)
        self.coordinator.share_rings(config.cluster.ring_bytes, spin)
        logs.tell_where(lambda: (self.coordinator.generation, self.coordinator.epoch.number))
        log_levels = LogLevels(config.log.level, self.coordinator)
        self.coordinator.generations.patience = patience_of(config)
        self.coordinator.keeps_shadows = config.balance.shadows
        self.coordinator.view.ready.nbytes = expert_nbytes(served)
        turnover = self.coordinator.generations.turnover
        turnover.serve_on = config.members.serve_on
        turnover.why_whole = lambda: why_whole(self.coordinator.view.dispatchers())
        self.coordinator.generations.hold_seconds = config.members.hold_seconds
        coordinator, stopping = self.coordinator, self.coordinator.stopping
        self.rebalancer = Rebalancer(coordinator, config.balance, policy_of(config), expert_nbytes(served))
        turnover.busy = lambda: self.rebalancer.moves or bool(stopping.reason)
        self._telemetry = CoordinatorTelemetry(model_name(config), __version__, served.layers)
        self._telemetry.progress(coordinator.progress)
        self._telemetry.why_not = lambda: stopping.reason or why_not_serving(coordinator.progress())
        self._telemetry.stops = lambda: bool(stopping.reason)
        self._telemetry.epoch(lambda: coordinator.epoch.number)
        self._drain_seconds = server.drain_seconds
        self._leaving_seconds = min(server.leaving_seconds, server.drain_seconds)
        self._telemetry.members(self.coordinator.view.belonging)
        self._telemetry.covers(self.coordinator.view.covers)
        self._telemetry.loads(lambda: (self.coordinator.epoch.placement, self.coordinator.view.load_seen()))
        self._telemetry.weights_version(lambda: self.coordinator.epoch.weights_version)
        self._telemetry.watch(self.rebalancer.interval, self.rebalancer.age)
        self.rebalancer.observe = self._telemetry.observe_cycle
        self.rebalancer.observe_gain = self._telemetry.observe_gain
        self.rebalancer.observe_reload = self._telemetry.observe_reload
        self._front = FrontDoor(
            model_name(config), served, self.coordinator, server.max_message_bytes, self._telemetry.request
        )
        self._telemetry.in_flight(lambda: self._front.in_flight)
        self._front.show_lanes(keys.to_lanes())
        operations = Operations(served, self.rebalancer, reload_root_of(config))
        operations.on_log_level = log_levels.set
        seconds = ScaleSeconds(config.members.scale_seconds, server.leaving_seconds, server.drain_seconds)
        operations.scaling = Scaling(self.rebalancer, self.coordinator.resizing, seconds)
        self.on_change: Callable[[], None] = lambda: None  # of the group's state
        port, metrics_port, health_port = _ports(config, start)
        self._endpoint = (HeldEndpoint if isinstance(port, HeldPort) else Endpoint)(
            {"FrontService": self._front, "AdminService": AdminDoor(operations)},
            NOT_A_LANE,
            door_limits(server),
            server.max_message_bytes,
            keys,
            self._front.observe,
        )
        self._telling = threading.Lock()  # for what health says
        self.coordinator.on_change = self._changed
        bound = self._endpoint.start(server.host, port).rpartition(":")[2]
        self.address = reached_at(server.host, int(bound), host)
        self.metrics_address = ""
        if metrics_port >= 0:
            port = self._telemetry.serve(server.host, metrics_port, keys)
            self.metrics_address = reached_at(server.host, port, host)
        self._probes: Probes | None = None
        self.probes_address = ""
        if health_port >= 0:
            self._probes = Probes(
                (server.host, health_port),
                self._endpoint.services,
                server.stalled_seconds,
                self._telemetry.why_not,
                (config.keys.certificate, config.keys.private_key),
                partial(_stands_still, ProcessWatch(), config.cluster.stopped_seconds),
            )
            self.probes_address = reached_at(server.host, self._probes.port, host)
        if start is not None and start.again:
            self.coordinator.stopping.reason = STOPPING if start.stopping else ""
            self.coordinator.recover(config.cluster.recover_seconds, start.wanted)
        self.coordinator.start()
        self.rebalancer.start()

    @property
    def streams(self) -> str:
        """The address that ranks connect to, `host:port`."""
        return self.coordinator.address

    def metrics_targets(self) -> list[str]:
        """`host:port` of every exporter that is up."""
        seats = self.coordinator.seats()
        return [a for a in (self.metrics_address, *(seats[rank].metrics for rank in sorted(seats))) if a]

    def stop(self) -> None:
        """Shows no lane any more, then refuses new calls, gives those under way `server.drain_seconds`, and
        ends the group. Calls on their way to a lane are taken for `server.leaving_seconds`.
        """
        self.rebalancer.stop()
        self.coordinator.stopping.note_lanes()
        until = time.monotonic() + self._drain_seconds
        while not (ended := self._drained(until)) and self._take_again(until - time.monotonic()):
            pass
        if not ended:
            log.warning(
                "calls were under way after server.drain_seconds = %g and have no answer", self._drain_seconds
            )
        self._endpoint.stop(grace=REPLY_SECONDS)
        self._front.close()
        self.coordinator.stop()
        self._telemetry.close()
        if self._probes is not None:
            self._probes.close()

    def _drained(self, until: float) -> bool:
        """Refuses new calls, and waits for those under way; whether all have ended."""
        self._leave(STOPPING, until)
        while self._endpoint.busy and time.monotonic() < until - self._drain_seconds / 2:
            time.sleep(LOOK_SECONDS)  # what the front door has begun, lanes have yet to
        return self.coordinator.stopping.drain(max(0.0, until - time.monotonic()), STOPPING)

    def _take_again(self, left: float) -> bool:
        """Has the others take calls again for a moment where a rank has died meanwhile: those under way on
        its lane broke, and their callers look for another. Whether one has.
        """
        if left <= 0 or not (lost := self.coordinator.stopping.take_again()):
            return False
        seconds = min(AGAIN_SECONDS, left / 2)
        log.warning("lanes take calls again for %.2g s: ranks %s are lost with theirs", seconds, lost)
        self._endpoint.drain("")
        self._front.drain("")
        time.sleep(seconds)
        self.coordinator.stopping.reopened = False
        return True

    def _leave(self, reason: str, until: float = math.inf) -> None:
        """Callers find no lane, and probes say so; soon, and by `until`, the door begins no further call."""
        with self._telling:
            self.coordinator.stopping.reason = reason
            self._endpoint.set_serving(serving=False)
        if self._probes is not None:
            self._probes.tell()
        if self.coordinator.progress().state == "serving":
            left = max(0.0, until - time.monotonic())
            self.coordinator.stopping.wait_lost(min(self._leaving_seconds, left))
        self._endpoint.drain(reason)
        self._front.drain(reason)

    def _changed(self, progress: Progress) -> None:
        with self._telling:  # the group may form again while the service drains: nobody is to come then
            serving = progress.state == "serving" and not self.coordinator.stopping.reason
            self._endpoint.set_serving(serving=serving)
        self._telemetry.set_progress(progress)
        if self._probes is not None:
            self._probes.tell()
        self.on_change()


def _stands_still(watch: ProcessWatch, limit: float, pid: int) -> bool:
    """Whether a process has been stopped for so long, `cluster.stopped_seconds`; 0: it may be."""
    seen = watch.look([pid])[pid]
    return seen is not None and 0 < limit <= seen[0]


def _ports(config: Config, start: HeadStart | None) -> tuple[int, int, int]:
    """The front door's port, and those of metrics and probes; less than 0: none."""
    if start is None:
        return config.server.port, config.server.metrics_port, config.server.health_port
    return start.port, start.metrics_port, start.health_port


def why_not_serving(progress: Progress) -> str:
    """Why layers cannot be served now; empty while they can."""
    return "" if progress.state == "serving" else progress.reason or f"the group is {progress.state}"


def patience_of(config: Config) -> Patience:
    """How long the head waits, as configured."""
    cluster = config.cluster
    return Patience(
        give_up=cluster.give_up_seconds,
        answer=cluster.answer_seconds,
        prepare=cluster.prepare_seconds,
        join=cluster.join_seconds,
        adopt=cluster.adopt_seconds,
        hello=cluster.hello_seconds,
        send=cluster.send_seconds,
        late=config.step.patience,
        leave=config.step.timeout_seconds + LEAVE_SECONDS,
        reach=cluster.connect_seconds,
    )


def reload_root_of(config: Config) -> str:
    """The folder below which checkpoints may be reloaded: as configured, else the one beside which others of
    the same model lie, the served one's parent; where that is everything, the served one itself. Beside a
    snapshot of the hub cache lie those of other revisions.
    """
    if config.server.reload_root:
        return config.server.reload_root
    served = located(config.model.checkpoint).resolve()
    return str(served if served.parent == served.parent.parent else served.parent)


def policy_of(config: Config) -> Policy:
    """The configured balancing policy; rebalancing by hand uses the incremental one where it is off."""
    name = config.balance.policy
    return balancer_named("incremental" if name == OFF else name)


def expert_nbytes(served: Served) -> tuple[int, ...]:
    """Bytes of one expert of each served layer, as it lies in the checkpoint."""
    return tuple(served.checkpoint.expert_nbytes(layer) for layer in served.layers)


class Seated(NamedTuple):
    """A rank that is connected to the head."""

    pid: int
    generation: int  # the last that it joined; 0: none yet


class Head(Protocol):
    """The head, for who starts ranks. Its methods come back at once, and any thread may call them."""

    on_given_up: Callable[[RankProcess], None]
    """Called by a thread of the head's: that process is to be ended."""

    @property
    def token(self) -> str:
        """What the service's processes show each other."""

    @property
    def streams(self) -> str:
        """The address that ranks connect to, `host:port`."""

    @property
    def since(self) -> float:
        """When its process was last to start, on the monotonic clock: it knows nobody who came before."""

    def seats(self) -> Mapping[int, Seated]:
        """The ranks that are connected now."""

    def wanted(self) -> Collection[int] | None:
        """The ranks that are to have a process; None while it does not know."""

    def refused(self, rank: int, why: str) -> None:
        """Tells it that a rank which is to have a process cannot have one."""

    def state(self) -> tuple[str, str]:
        """The group's state, and the reason for it."""

    def given_up(self, process: RankProcess, why: str) -> None:
        """Tells it of a process that does not run, as was seen from outside."""

    def living(self, processes: Mapping[int, RankProcess]) -> None:
        """Tells it the process of each rank; any other that a rank had has ended."""

    def fail(self, reason: str) -> None:
        """Has the group end as failed."""


class HeadInside:
    """A head in this very process: where it ends, all ends."""

    def __init__(self, head: HeadProcess) -> None:
        self._head, self.since = head, time.monotonic()
        self._living: Mapping[int, RankProcess] = {}
        self.on_given_up: Callable[[RankProcess], None] = lambda process: None
        generations = head.coordinator.generations
        generations.parted.on_given_up = lambda process: self.on_given_up(process)
        generations.parted.is_gone = self._gone

    @property
    def token(self) -> str:
        """What the service's processes show each other."""
        return self._head.token

    @property
    def streams(self) -> str:
        """The address that ranks connect to."""
        return self._head.streams

    def seats(self) -> Mapping[int, Seated]:
        """The ranks that are connected now."""
        return seated(self._head)

    def wanted(self) -> Collection[int] | None:
        """The ranks that are to have a process."""
        return self._head.coordinator.wanted_seats

    def refused(self, rank: int, why: str) -> None:
        """Tells it that a rank cannot have a process."""
        self._head.coordinator.no_room(rank, why)

    def state(self) -> tuple[str, str]:
        """The group's state, and the reason for it."""
        progress = self._head.coordinator.progress()
        return progress.state, progress.reason

    def given_up(self, process: RankProcess, why: str) -> None:
        """Tells it of a process that does not run."""
        self._head.coordinator.given_up(process, why)

    def living(self, processes: Mapping[int, RankProcess]) -> None:
        """Tells it the process of each rank."""
        self._living = dict(processes)
        self._head.coordinator.processes_told()

    def fail(self, reason: str) -> None:
        """Has the group end as failed."""
        self._head.coordinator.fail(reason)

    def _gone(self, process: RankProcess) -> bool:
        return self._living.get(process.rank) != process


def seated(head: HeadProcess) -> dict[int, Seated]:
    """The ranks that are connected to `head`."""
    return {rank: Seated(seat.pid, seat.generation) for rank, seat in head.coordinator.seats().items()}
