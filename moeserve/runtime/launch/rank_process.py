"""What one rank's process consists of: its experts, lane, door, metrics and seat in the group.

A launcher calls `run_rank` in a process of its own (a Ray actor, a spawned process, a torchrun worker).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from moeserve import __version__
from moeserve.device.machine import Machine
from moeserve.device.nvrtc import CompileError, LaunchError
from moeserve.proto.host import host_id, usable_cores
from moeserve.runtime.config import Config
from moeserve.runtime.control.head_stream import HeadStream, ReachAgain
from moeserve.runtime.control.messages import plans_message
from moeserve.runtime.control.rings import ring_wish, spin_of, take_ring
from moeserve.runtime.control.stream import Stream, StreamClosed, connect
from moeserve.runtime.doors.calls.rows import RowAdmission, RowLimits
from moeserve.runtime.doors.endpoint import Endpoint, door_limits
from moeserve.runtime.doors.lane_door import NOT_THE_FRONT_DOOR, LaneDoor
from moeserve.runtime.doors.passes.announced import LaneModel
from moeserve.runtime.doors.passes.asked import DeviceLaneLimits
from moeserve.runtime.doors.passes.device_lanes import DeviceLanes
from moeserve.runtime.doors.passes.host_steps import HostSteps
from moeserve.runtime.doors.passes.mail_host import MailHost
from moeserve.runtime.doors.passes.service import DeviceLaneDoor, begin_at
from moeserve.runtime.doors.payloads import Payloads, RegionLimits, Regions
from moeserve.runtime.doors.payloads.registration import registrar_of
from moeserve.runtime.doors.request import RequestReader
from moeserve.runtime.keys.keys import Keys
from moeserve.runtime.keys.sockets import reached_at
from moeserve.runtime.launch.ending import end_at_last
from moeserve.runtime.launch.environment import (
    group_backend,
    machine_for,
    own_device,
    set_environment,
    tune_process,
)
from moeserve.runtime.ordering.sequencer import StepPace
from moeserve.runtime.planning.costing import costing_of
from moeserve.runtime.planning.given import is_for_good
from moeserve.runtime.planning.layers import plans_for
from moeserve.runtime.rank.host_threads import HostThreads
from moeserve.runtime.rank.lanes.lane import Lane
from moeserve.runtime.rank.member.member import Member
from moeserve.runtime.rank.member.member_group import ProcessGroupSettings
from moeserve.runtime.rank.rank import Rank
from moeserve.runtime.rank.runs.group_runs import GroupRuns
from moeserve.runtime.rank.runs.member_runs import MemberRuns, why_not
from moeserve.runtime.rank.runs.run_graphs import RunGraphs
from moeserve.runtime.rank.transfers.transfers import transfers_of
from moeserve.runtime.rank.weights.copies import Copier
from moeserve.runtime.rank.weights.mover import CopySources, Mover
from moeserve.runtime.rank.weights.peers import Peers, WeightsServer, unread_seconds
from moeserve.runtime.rank.weights.shadows import Shadows
from moeserve.runtime.sections import PassesConfig
from moeserve.runtime.served import Served, model_name, served_from
from moeserve.runtime.telemetry import logs
from moeserve.runtime.telemetry.exporter import RankTelemetry

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankSpec:
    """What a launcher tells a rank's process; picklable."""

    config: Config
    rank: int
    coordinator: str  # host:port of its streams
    token: str = field(repr=False)  # of this run of the service
    host: str  # where this rank's door listens
    ranks_on_host: int
    gpu: int  # index among the host's GPUs, where ranks run on them
    metrics_host: str = ""  # where its exporter listens; empty: as its door


def run_rank(spec: RankSpec, launcher_ended: threading.Event | None = None) -> None:
    """Runs one rank until its head says stop, or is away for too long. A rank that cannot start says why to
    the head.

    launcher_ended: set once nobody is there any more who would start the head again.
    """
    try:
        _prepare_process(spec)
        _run_rank(spec, launcher_ended or threading.Event())
    except Exception as error:
        log.exception("rank %d ends: %s", spec.rank, error)
        raise
    finally:
        logs.finish()


def _run_rank(spec: RankSpec, launcher_ended: threading.Event) -> None:
    started = time.perf_counter()
    try:
        keys = Keys(spec.config.keys, spec.token)
        stream = _dial(spec, keys, spec.config.cluster.connect_seconds)
    except StreamClosed as closed:
        log.warning("rank %d: no coordinator: %s", spec.rank, closed)
        return
    hello = {
        "kind": "hello",
        "rank": spec.rank,
        "token": spec.token,
        "pid": os.getpid(),
        "host_id": host_id(),
    } | ring_wish(spec.config.cluster.ring_bytes)
    full = dict[str, Any]()  # what it says once it is ready
    seconds = spec.config.cluster.head_seconds
    again = ReachAgain(lambda within: _dial(spec, keys, within), lambda: full, seconds, launcher_ended)
    head = HeadStream(stream, again)
    try:
        process = _RankProcess(spec, head, keys)
    except Exception as error:
        reason = f"rank {spec.rank} cannot start: {type(error).__name__}: {error}"
        stream.send(hello | {"address": "", "refused": reason, "for_good": is_for_good(error)})
        stream.close()
        raise
    log.info("rank %d: its process is ready after %.2f s", spec.rank, time.perf_counter() - started)
    try:
        full |= hello | {
            "address": process.address,
            "metrics": process.metrics_address,
            "weights": process.weights_address,
            "plans": plans_message(process.rank.plans),
            "outlives": process.outlives,
        }
        stream.send(full)
        process.member.run()
    except StreamClosed as closed:
        log.warning("rank %d: the coordinator is gone: %s", spec.rank, closed)
    finally:
        end_at_last(f"rank {spec.rank}", spec.config.cluster.end_seconds)
        process.close()


def _dial(spec: RankSpec, keys: Keys, within: float) -> Stream:
    """A stream to the head, which has so many seconds at most. Raises StreamClosed."""
    cluster = spec.config.cluster
    stream = connect(spec.coordinator, min(within, cluster.connect_seconds), keys)
    stream.bound_sends(cluster.send_seconds)
    stream.bound_silence(cluster.connect_seconds)
    spin = spin_of(cluster.spin_seconds, spec.ranks_on_host)
    stream.take_ring = partial(take_ring, spin=spin)
    return stream


class _RankProcess:
    """The parts of a rank's process, wired."""

    def __init__(self, spec: RankSpec, stream: HeadStream, keys: Keys) -> None:
        self._keys = keys
        config, served = spec.config, served_from(spec.config)
        machine = machine_for(config)
        name = model_name(config)
        device = own_device(config, machine, spec.gpu)  # of this thread, which runs the steps
        plans = plans_for(served, machine, config.plan.wanted)
        costing = costing_of(config)
        rank = self.rank = Rank(spec.rank, served, plans, device, costing)
        rank.host_threads = HostThreads(_threads_of(spec))
        server = config.server
        limits = RegionLimits(
            max_bytes=server.region_bytes,
            allow_named=server.allow_named_regions,
            fetch_seconds=server.region_seconds,
        )
        registrar = registrar_of(device, config.server.registered_bytes)
        self._regions = Regions(limits, registrar, on_device=device == "cpu")
        lane = Lane(spec.rank, config.step.lane_rows, config.server.max_concurrent_calls)
        lane.hold_seconds = config.members.hold_seconds
        lane.transfers = transfers_of(device, served.lane_nbytes)
        dispatchers = {
            layer: [span.dispatcher.name for span in plan.dispatchers] for layer, plan in plans.items()
        }
        peers = served.droppable(spec.rank)
        self._telemetry = RankTelemetry(name, spec.rank, __version__, dispatchers, peers)
        self._telemetry.in_flight(lambda: lane.calls)
        self._telemetry.why_not = lambda: lane.why_not
        self._telemetry.weights(lambda: (rank.experts.bank.nbytes, rank.experts.bytes_read))
        self._telemetry.device_bytes(rank.held_bytes)
        self._telemetry.regions(lambda: (len(self._regions.list()), self._regions.bytes))
        group_settings = ProcessGroupSettings(
            group_backend(config, machine, spec.ranks_on_host), config.step.timeout_seconds, own_process=True
        )
        # whether no group need wait until members of one before have ended
        self.outlives = group_settings.backend == "gloo" and all(map(costing.outlives, plans.values()))
        self.member = Member(rank, lane, stream, group_settings, self._telemetry.observe_step)
        self.member.come_back = stream.come_back
        self.member.order.pace = StepPace.of(config.step)
        self.member.order.late_seconds = config.step.patience
        self.member.observe_rows(self._telemetry.observe_rows)
        self.member.steps.observe_ran = self._telemetry.observe_ran
        self.member.steps.finish_within(config.step.finishing)
        lane.announce, lane.withdraw = self.member.announce, self.member.withdraw
        self._regions.together = self.member.announce_together
        unread = unread_seconds(config.balance.move_bytes_per_second)
        self._weights = WeightsServer(spec.host, keys, device, rank.experts.bank, unread)
        self._weights.hello_seconds = config.cluster.hello_seconds
        self._mover = self._mover_of(spec, rank, device)
        self.member.changes.mover = self._mover
        self._weights.holds, self._mover.before_commit = rank.experts.holds, rank.experts.overwrite
        self._shadows = self._shadows_of(spec, rank, device) if config.balance.shadows else None
        self._telemetry.shadows(lambda: 0 if self._shadows is None else self._shadows.nbytes)
        reader = RequestReader(name, served, rank.experts.gate_and_version, Payloads(self._regions))
        rows = RowLimits(config.server.max_held_rows, config.server.queue_seconds, config.step.due_seconds)
        door = LaneDoor(reader, lane, self._regions, self.member.weights_version, self._telemetry.request)
        door.admission = RowAdmission(rows)
        self._door = door
        self._draining, self._telling = False, threading.Lock()  # the lock is for what health says
        self._runs, why_no_runs = self._runs_of(rank, machine, config.passes)
        self._device_lanes = self._lanes_of(config, served, (door, lane))
        self._device_lanes.why_no_mail = why_no_runs
        self._endpoint = Endpoint(
            {"LaneService": door, "DeviceLaneService": DeviceLaneDoor(self._device_lanes)},
            NOT_THE_FRONT_DOOR,
            door_limits(config.server),
            config.server.max_message_bytes,
            keys,
            self._telemetry.request,
        )
        self.member.on_serving = self._serving
        self.member.on_layers = self._layers_open
        if config.server.data_connections:
            passes, observe = config.passes, self._telemetry.request
            own = self._device_lanes.for_connections(
                passes.connections, passes.spin_seconds, door, served.dtype, observe
            )
            door.offer_connection = self._endpoint.data_connections(spec.host, door, self._regions, own)
        self.member.drain.on_drain, self.member.drain.doors_busy = self._drain, lambda: self._endpoint.busy
        self.member.changes.on_epoch = self._epoch_adopted
        self.member.on_log_levels = logs.SetLevels()
        logs.tell_where(lambda: self.member.where)
        self.metrics_address = self._serve_metrics(spec)
        self.address = self._endpoint.start(spec.host, 0)

    def _mover_of(self, spec: RankSpec, rank: Rank, device: str) -> Mover:
        balance = spec.config.balance
        sources = CopySources(
            host_id(),
            device,
            rank.experts.bank,
            balance.staging_slots,
            Peers(self._keys, device, balance.copy_seconds),
            rank.experts.use_weights,
            rank.experts.read,
        )
        copier = Copier(balance.move_bytes_per_second, device, "moves")
        return Mover(sources, copier, self.member.changes.send_vote, self.member.changes.report_corruption)

    def _shadows_of(self, spec: RankSpec, rank: Rank, device: str) -> Shadows:
        balance = spec.config.balance
        peers = Peers(self._keys, device, balance.copy_seconds)
        copier = Copier(balance.shadow_bytes_per_second, device, "shadows")
        shadows = Shadows(spec.rank, rank.experts, peers, copier, balance.shadow_bytes)
        rank.experts.shadow, rank.experts.on_held = shadows.find, shadows.renew
        shadows.tell, self.member.on_peers = self.member.tell_shadows, shadows.meet
        return shadows

    def _lanes_of(self, config: Config, served: Served, way: tuple[LaneDoor, Lane]) -> DeviceLanes:
        passes, checkpoint = config.passes, served.checkpoint
        sizes = (checkpoint.hidden, checkpoint.num_experts, checkpoint.top_k)
        limits = DeviceLaneLimits(
            passes.lanes,
            passes.lane_bytes,
            config.step.lane_rows,
            passes.patience_seconds,
            config.step.timeout_seconds,
            passes.ahead_seconds,
        )
        model = LaneModel(model_name(config), *sizes, tuple(served.layers))
        door, lane = way
        steps = HostSteps(
            lane,
            (served.dtype, checkpoint.num_experts, config.step.timeout_seconds),
            lambda: door.admission,
            lambda: door.stopping,
            self._telemetry.request,
        )
        lanes = DeviceLanes(self._regions, model, limits, begin_at(door), steps)
        lanes.on_pass = self._telemetry.observe_pass
        self.member.attend(lanes.look_elsewhere, lanes.back)
        self.member.order.on_company = lanes.looking.company
        self.member.steps.on_others = lanes.looking.others_came
        steps.gathers = lane.transfers is not None
        if self._runs is not None:
            lanes.looking.mail = MailHost(
                self._runs, model, passes.lane_bytes, share_gpu=passes.share_gpu, host_ahead=passes.host_ahead
            )
            lanes.looking.others, self._runs.keeps = door.has_calls, lanes.looking.company
        self._telemetry.device_lanes(lambda: len(lanes.attached()))
        return lanes

    def _runs_of(self, rank: Rank, machine: Machine, passes: PassesConfig) -> tuple[MemberRuns | None, str]:
        """What launches steps of callers' GPUs; without it, why there is nothing that does."""
        member = self.member
        group = self._group_runs = GroupRuns(rank, member.steps.after, RunGraphs(passes.graph_steps))
        member.take_runs(group)
        member.on_leave = group.graphs.drop
        if why := why_not(machine):
            return None, why
        try:
            way = member.between_steps, member.steps.after, lambda: member.joined
            runs = MemberRuns(rank, *way, group, passes.short_rows if rank.served.mesh.ranks == 1 else 0)
        except (CompileError, LaunchError) as error:  # the rank serves all other callers
            log.warning("rank %d takes no rows of callers' GPUs: %s", rank.index, error)
            return None, f"the kernels that wait for rows cannot be loaded at this rank: {error}"
        member.on_end, member.on_leave, runs.observe = runs.interrupt, runs.drop, member.steps.ran
        runs.attend, runs.finish_short = member.steps.attend, partial(member.steps.after, short=True)
        runs.room, member.before_entry = lambda short: member.steps.room(short=short), runs.join
        runs.closed = lambda: member.closed_layers
        rank.runs_held = lambda: runs.held
        return runs, ""

    def _epoch_adopted(self, generation: int, epoch: int) -> None:
        """Called by the member between two steps."""
        if self._runs is not None:
            self._runs.adopted()
        self._telemetry.set_group(generation, epoch)

    @property
    def weights_address(self) -> str:
        """The address from which peers copy this rank's experts."""
        return self._weights.address

    def close(self) -> None:
        """Ends doors, the mover, regions and metrics."""
        self._mover.close()
        if self._shadows is not None:
            self._shadows.close()
        self._weights.close()
        self._endpoint.stop(grace=0.5)
        self._device_lanes.close()
        if self._runs is not None:
            self._runs.close()
        self._regions.close()
        self._telemetry.close()

    def _serving(self, generation: int, epoch: int) -> None:
        """Called by the member when its group begins (generation > 0) or stops to serve."""
        self._group_runs.serving(generation)
        with self._telling:
            self._endpoint.set_serving(serving=generation > 0 and not self._draining)
        if generation > 0:
            self._door.admission.go_on()
        else:
            self._door.admission.stand_still()
        self._telemetry.set_group(generation, epoch)

    def _layers_open(self, all_open: bool) -> None:  # noqa: FBT001  # a callback
        """Calls of layers that members still read wait for them: that is not the lane's pace."""
        if all_open:
            self._door.admission.go_on()
        else:
            self._door.admission.stand_still()

    def _drain(self, reason: str) -> None:
        """Begins no further call, unary or another; health says so, also once the group forms again."""
        with self._telling:
            self._draining = True  # and stays so where calls are taken again, for those that had begun
            self._endpoint.set_serving(serving=False)
        self._endpoint.drain(reason)
        self._door.drain(reason)

    def _serve_metrics(self, spec: RankSpec) -> str:
        port = spec.config.server.metrics_port
        if port < 0:
            return ""
        host = spec.metrics_host or spec.host
        bound = self._telemetry.serve(host, port + 1 + spec.rank if port else 0, self._keys)
        return reached_at(host, bound, spec.host)


def _threads_of(spec: RankSpec) -> int:
    """The threads that compute a large step on a CPU."""
    return spec.config.cluster.threads_per_rank or max(1, usable_cores() // spec.ranks_on_host)


def _prepare_process(spec: RankSpec) -> None:
    """Threads, sockets and interpreter settings of a rank's process."""
    torch.set_num_threads(_threads_of(spec))
    tune_process()
    set_environment(spec.host)
    logs.start(spec.config.log, f"rank {spec.rank}")
    logs.hide(spec.token)
