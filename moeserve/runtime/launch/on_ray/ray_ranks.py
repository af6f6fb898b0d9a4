"""`RankActors`: ranks as Ray actors, started by the launcher and started again when they have ended.

Ray places actors, and does not restart them: the launcher does, here as on one machine, so that who cannot
start backs off, and no process that was given up lives on beside its heir. A watch on every node that has
ranks tells which of their processes run, and kills those that the head gives up. Ray's own word on an actor
is no proof: it calls one dead that it was told to kill, also while a stopped process is still there.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from moeserve.runtime.config import Config
from moeserve.runtime.head.reception import RankProcess
from moeserve.runtime.launch import openmp
from moeserve.runtime.launch.head_process import Head
from moeserve.runtime.launch.on_ray.niceness import workers_environment
from moeserve.runtime.launch.on_ray.node_watches import Looks, NodeWatches, first_line, is_ready
from moeserve.runtime.launch.on_ray.ray_rank import ALL_GPUS, NO_GPU, Placed, RankActor
from moeserve.runtime.launch.on_ray.ray_spares import Spares, SpareTerms
from moeserve.runtime.launch.restarts import Restarts, why_given_up

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.1  # between looks at what actors and watches have answered
ENDING_SECONDS = 0.01  # the same while a process is about to end: the head forms no generation before it has
SOON_SECONDS = 1.0  # within which a process that is killed ends, unless its kernel holds it
STOP_SECONDS = 5.0  # for the thread that watches to end


@dataclass(eq=False)
class _Actor:
    """One process of a rank, from the actor's creation until it is seen dead."""

    handle: Any
    placed: Any  # its process and node, once Ray has started it
    since: float  # when it was created, and then when its rank was started
    ended: Any = None  # the rank's end, once it was started
    pid: int = 0
    node: str = ""
    host_id: str = ""
    gpu: int = NO_GPU
    condemned: str = ""  # why it is killed
    killed_at: float = -math.inf
    gone: bool = False


class RankActors:
    """One thread, which alone talks to Ray. `resources` is what an actor takes of its bundle of `group`."""

    def __init__(
        self, config: Config, head: Head, group: PlacementGroup, resources: dict[str, float]
    ) -> None:
        self._config, self._head = config, head
        self._group, self._resources = group, resources
        self._actors: dict[int, _Actor | None] = {}  # by rank; None: it is to be started again
        self._last: dict[int, _Actor] = {}  # by rank: the one that ended last
        cluster, ranks = config.cluster, config.parallel.mesh.ranks
        self._environment = ALL_GPUS | workers_environment() | openmp.environment(os.environ)
        terms = SpareTerms(cluster.spares, ranks, cluster.begin_seconds, cluster.spare_rest_seconds)
        self._spares = Spares(terms, self._create_spare, self._end_spare)
        bounds = cluster.begin_seconds, cluster.watch_seconds
        self._watches = NodeWatches(bounds, self._processes, self._take_looks, self._lose_node)
        self._restarts = Restarts(cluster.others_first_seconds)
        self._retiring: dict[int, float] = {}  # rank -> since when it has no seat any more and is to end
        self._given_up: deque[RankProcess] = deque()  # as the head says
        self._watching = threading.Thread(target=self._watch, name="watch-ranks", daemon=True)
        self._stopping, self._ended = threading.Event(), threading.Event()
        self._news = threading.Event()  # the thread is to look now
        self._told: dict[int, RankProcess] = {}  # what the head knows of the ranks' processes
        head.on_given_up = self._give_up

    def start(self) -> None:
        """Creates the actors, and begins to watch them."""
        for rank in range(self._config.parallel.mesh.ranks):
            self._actors[rank] = self._create(rank)
        self._watching.start()

    def stop(self, stop_head: Callable[[], None] = lambda: None) -> None:
        """Starts nothing any more, has the head stopped, and ends the actors."""
        self._stopping.set()
        stop_head()
        actors = list(self._actors.values())
        running = [one.ended for one in actors if one is not None and one.ended is not None]
        if running:
            ray.wait(running, num_returns=len(running), timeout=self._config.cluster.stop_seconds)
        self._ended.set()
        self._news.set()
        self._end_watching()
        for actor in list(self._actors.values()):
            if actor is not None:
                self._kill(actor)
        self._spares.stop()
        self._watches.stop()

    def _end_watching(self) -> None:
        """Waits for the watching thread, so that what it has just started is ended like all else."""
        if self._watching.is_alive():
            self._watching.join(STOP_SECONDS)
        if self._watching.is_alive():
            log.error("watch-ranks is still at work after %g s: what it starts is left", STOP_SECONDS)

    def pid(self, rank: int) -> int:
        """The process of a rank's actor; 0 while it has none."""
        actor = self._actors.get(rank)
        return 0 if actor is None else actor.pid

    def spares(self) -> list[int]:
        """The processes of the spares that are warm."""
        return self._spares.pids()

    def _tell_living(self) -> None:
        """Tells the head which processes there are, where that has changed. One that was not seen dead is
        there, whatever Ray says.
        """
        living = {
            rank: RankProcess(rank, actor.pid, actor.host_id)
            for rank, actor in self._actors.items()
            if actor is not None and actor.pid
        }
        if living != self._told:
            self._told = living
            self._head.living(living)

    def _create(self, rank: int) -> _Actor:
        placed = rank < self._config.parallel.mesh.ranks  # others came later: they have no bundle
        handle = self._actor_in(
            rank if placed else None, self._resources["CPU"], self._resources.get("GPU", 0)
        )
        return _Actor(handle, handle.place.remote(), time.monotonic())

    def _actor_in(self, bundle: int | None, cpus: float, gpus: float) -> Any:
        """An actor in a bundle of the group; None: wherever Ray has room."""
        seat: Any = "DEFAULT"
        if bundle is not None:
            seat = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        return (
            ray.remote(RankActor)
            .options(
                num_cpus=cpus,
                num_gpus=gpus,
                scheduling_strategy=seat,
                max_restarts=0,
                max_task_retries=0,
                runtime_env={"env_vars": self._environment},
            )
            .remote()
        )

    # -- the thread -----------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Runs the watching thread; the group fails, with the reason, when it cannot go on."""
        try:
            while not self._ended.is_set():
                self._look()
                self._news.wait(ENDING_SECONDS if self._some_end else LOOK_SECONDS)
                self._news.clear()
        except Exception as error:
            if self._ended.is_set():
                return
            log.exception("the launcher's thread watch-ranks ends")
            self._head.fail(f"the launcher cannot go on: {type(error).__name__}: {error}")

    def _give_up(self, process: RankProcess) -> None:
        """The head has given a process up: from any thread."""
        self._given_up.append(process)
        self._news.set()

    @property
    def _some_end(self) -> bool:
        """Whether a process was killed just now, and is not seen dead yet."""
        since = time.monotonic() - SOON_SECONDS
        return any(
            one is not None and one.killed_at > since and not one.gone for one in self._actors.values()
        )

    def _look(self) -> None:
        """Takes what actors and watches have answered, and does what follows from it."""
        self._note_joined()
        self._follow_seats(self._head.wanted())
        self._kill_given_up()
        for rank, actor in self._actors.items():
            if actor is None:
                continue
            if actor.ended is None and not actor.condemned:
                self._take_place(rank, actor)
            elif is_ready(actor.ended) and not actor.condemned:
                self._condemn(rank, actor.pid, _end_of(actor.ended))
        self._watches.look(again=self._some_end)
        for rank, actor in self._actors.items():
            if actor is not None and actor.gone:
                self._note_ended(rank, actor)
        self._tell_living()  # the head waits for that, and not for their heirs
        self._start_due()
        self._tell_living()
        state, lacks = self._head.state()
        if state == "serving" and not self._stopping.is_set():
            self._spares.keep(whole=not lacks)

    def _start_due(self) -> None:
        """Starts ranks that have ended and whose pause is over, in a spare where one is near."""
        for rank, actor in self._actors.items():
            again = actor is None and not self._stopping.is_set() and rank not in self._retiring
            if again and self._restarts.due(rank, time.monotonic()):
                self._actors[rank] = self._from_spare(rank) or self._create(rank)

    def _from_spare(self, rank: int) -> _Actor | None:
        """A rank in a warm spare of the node where it was, with the GPU that it had."""
        last = self._last.get(rank)
        if last is None or (spare := self._spares.take(last.node)) is None or spare.place is None:
            return None
        log.info("rank %d starts in a spare, pid %d", rank, spare.place.pid)
        actor = _Actor(spare.handle, spare.placed, time.monotonic(), gpu=last.gpu)
        self._begin(rank, actor, spare.place._replace(gpu=last.gpu))
        return actor

    def _create_spare(self, bundle: int) -> Any:
        """An actor on the node of a bundle; it reserves nothing of it."""
        return self._actor_in(bundle, 0.0, 0.0)

    def _end_spare(self, handle: Any, place: Placed | None) -> None:
        """Ends a spare's process."""
        if place is not None:
            self._watches.kill(place.node, place.pid)
        ray.kill(handle)

    def _follow_seats(self, wanted: Collection[int] | None) -> None:
        """Creates actors for new seats, and ends those whose seats are no more. None: nobody knows."""
        if wanted is None or self._stopping.is_set():
            return
        for rank in self._retiring.keys() | self._actors.keys() - set(wanted):
            if self._retired(rank):
                self._restarts.forget(rank)
                del self._actors[rank], self._retiring[rank]
                log.info("rank %d has left", rank)
        for rank in sorted(set(wanted) - self._actors.keys()):
            if why := self._why_not(rank):
                self._head.refused(rank, why)
            else:
                self._actors[rank] = self._create(rank)

    def _retired(self, rank: int) -> bool:
        """Whether the process of a rank that was told to stop has ended; it is killed if it does not."""
        actor, now = self._actors[rank], time.monotonic()
        since = self._retiring.setdefault(rank, now)
        if actor is not None and now > since + self._config.cluster.stop_seconds:
            self._condemn(rank, actor.pid, "it was told to stop, and does not")
        return actor is None

    def _why_not(self, rank: int) -> str:
        """Why the Ray cluster has no room for one more rank; empty where it has."""
        free = ray.available_resources()
        for kind, each in self._resources.items():
            if (found := free.get(kind, 0.0)) < each:
                return f"rank {rank} needs {each:g} {kind}s, and the Ray cluster has {found:g} free"
        return ""

    def _kill_given_up(self) -> None:
        """Has the processes killed that the head has given up; their heirs live on."""
        while self._given_up:
            process = self._given_up.popleft()
            actor = self._actors.get(process.rank)
            if actor is not None and (actor.pid, actor.host_id) == (process.pid, process.host_id):
                self._condemn(process.rank, process.pid, "the head has given it up")

    def _note_joined(self) -> None:
        """Forgets the failed starts of ranks whose process has joined a generation."""
        for rank, seat in self._head.seats().items():
            actor = self._actors.get(rank)
            if actor is not None and seat.generation and seat.pid == actor.pid:
                self._restarts.joined(rank)

    def _take_place(self, rank: int, actor: _Actor) -> None:
        """Starts the rank of an actor that Ray has placed; one that it does not place is created anew."""
        begin = self._config.cluster.begin_seconds
        if not is_ready(actor.placed):
            if time.monotonic() - actor.since > begin:
                why = f"Ray has not started its actor within cluster.begin_seconds = {begin:g}"
                self._condemn(rank, 0, why)
            return
        try:
            place = Placed(*ray.get(actor.placed))
        except RayError as error:
            self._condemn(rank, 0, first_line(error))
            return
        self._begin(rank, actor, place)
        self._tell_living()

    def _begin(self, rank: int, actor: _Actor, place: Placed) -> None:
        """Has an actor that is placed run its rank."""
        actor.pid, actor.node, actor.host_id, actor.gpu = place
        actor.since, head = time.monotonic(), self._head
        actor.ended = actor.handle.run.remote(self._config, rank, head.streams, head.token, actor.gpu)
        self._watches.watch(actor.node)

    def _condemn(self, rank: int, pid: int, why: str) -> None:
        """Has a process killed; one that never told its id has done nothing yet, and counts as gone."""
        actor = self._actors.get(rank)
        if actor is None or actor.pid != pid or actor.condemned:
            return
        log.warning("rank %d (pid %d) is killed: %s", rank, pid, why)
        actor.condemned, actor.killed_at = why, time.monotonic()
        actor.gone = not pid
        self._kill(actor)

    def _kill(self, actor: _Actor) -> None:
        """Kills the process by its node's watch, which a stopped one does not survive; then tells Ray."""
        if actor.pid:
            self._watches.kill(actor.node, actor.pid)
        ray.kill(actor.handle)

    def _note_ended(self, rank: int, actor: _Actor) -> None:
        """Notes that a process was seen dead: its rank is started again once its pause is over."""
        self._actors[rank] = None
        if actor.node:
            self._last[rank] = actor
        if self._stopping.is_set() or rank in self._retiring:
            log.info("rank %d (pid %s) has ended", rank, actor.pid or "none")
            return
        pause = self._restarts.ended(rank, time.monotonic(), self._head.state()[0])
        text = "rank %d (pid %s) has ended; it is started again in %.1f s (failed starts in a row: %d)"
        log.warning(text, rank, actor.pid or "none", pause or 0.0, self._restarts.failures(rank))

    # -- nodes ----------------------------------------------------------------------------------------------

    def _processes(self, node: str) -> list[int]:
        """The processes of ranks and spares on a node."""
        return [*self._ranks_of(node), *self._spares.pids(node)]

    def _ranks_of(self, node: str) -> dict[int, tuple[int, _Actor]]:
        """The ranks that run on a node, by their processes."""
        return {
            one.pid: (rank, one)
            for rank, one in self._actors.items()
            if one is not None and one.node == node and not one.gone
        }

    def _take_looks(self, node: str, looks: Looks) -> None:
        """What a node's watch has seen of the ranks there."""
        self._spares.seen(looks, self._config.cluster.stopped_seconds)
        seats = self._head.seats()
        for pid, (rank, actor) in self._ranks_of(node).items():
            if pid not in looks:
                continue
            if (look := looks[pid]) is None:
                actor.gone = True
                continue
            if actor.condemned:
                self._watches.kill(node, pid)
                continue
            began = max(actor.since, self._head.since)
            waited = None if rank in seats or self._stopping.is_set() else time.monotonic() - began
            if why := why_given_up(self._config.cluster, look, waited):
                log.warning("rank %d (pid %d) is given up: %s", rank, pid, why)
                self._head.given_up(RankProcess(rank, pid, actor.host_id), why)
                self._condemn(rank, pid, why)

    def _lose_node(self, node: str) -> None:
        """Notes that a node is dead, and all that ran there."""
        self._spares.lose_node(node)
        for pid, (rank, actor) in self._ranks_of(node).items():
            why = f"its node {node} is dead"
            log.warning("rank %d (pid %d) is given up: %s", rank, pid, why)
            actor.condemned, actor.gone = why, True
            self._head.given_up(RankProcess(rank, pid, actor.host_id), why)


def _end_of(ended: Any) -> str:
    """How a rank's `run` has ended."""
    try:
        ray.get(ended)
    except RayError as error:
        return first_line(error)
    return "its rank has returned"
