"""The service on this machine without Ray: each rank is a process that is started again when it dies.

`LocalService` has the head in a process of its own, and starts that again too: what `moeserve serve` is.
`LocalCluster` has it in the caller's process: programs and tests see into it, and it ends with them.

Processes come from one that has imported everything and done nothing (multiprocessing's forkserver): it has
no thread, socket or CUDA context to inherit, and a rank that is started again saves the seconds of imports.
"""

from __future__ import annotations

import logging
import multiprocessing
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext

import torch

from moeserve.proto.host import host_id
from moeserve.runtime.config import Config
from moeserve.runtime.config_checks import is_loopback
from moeserve.runtime.head.reception import RankProcess
from moeserve.runtime.launch.environment import machine_for, name_process
from moeserve.runtime.launch.forking import DEAF, begin, hear_no_signals, warm_processes
from moeserve.runtime.launch.head_child import run_head
from moeserve.runtime.launch.head_process import ENDED, Head, HeadInside, HeadProcess
from moeserve.runtime.launch.kept_head import KeptHead
from moeserve.runtime.launch.rank_process import RankSpec, run_rank
from moeserve.runtime.launch.restarts import Restarts, why_given_up
from moeserve.runtime.launch.watch import Child, ProcessWatch

log = logging.getLogger(__name__)

IMPORTED = (run_rank.__module__, run_head.__module__, "triton", "cuda.bindings.driver", "cuda.bindings.nvrtc")
"""What processes come with; the forkserver leaves out what is not installed."""

LANES_HOST = "127.0.0.1"
"""Where lanes and control streams listen, whatever `server.host` says: all of it is on this machine."""

STOP_SECONDS = 10.0  # for a process that was killed, or for the thread that watches, to end
WATCH_SECONDS = 0.1


class LocalRanks:
    """The ranks of a head, a process each on this machine. One thread watches them."""

    def __init__(self, config: Config, head: Head, context: ForkServerContext) -> None:
        self._config, self._head, self._context = config, head, context
        self._ranks = config.parallel.mesh.ranks
        self._processes: dict[int, Child] = {}
        self._restarts = Restarts(config.cluster.others_first_seconds)
        self._processes_watch = ProcessWatch()
        self._began: dict[int, float] = {}  # rank -> when its process was started
        self._retiring: dict[int, float] = {}  # rank -> since when it has no seat any more and is to end
        self._stopping = threading.Event()  # no seat is filled any more
        self._watched = threading.Event()  # until calls under way were answered: a rank may stop meanwhile
        self._watching = threading.Thread(target=self._watch, name="watch-ranks", daemon=True)
        self._lock = threading.Lock()
        self._told: dict[int, RankProcess] = {}  # what the head knows of the ranks' processes
        head.on_given_up = lambda process: self._kill(process.rank, process.pid)

    def start(self) -> None:
        """Starts the ranks, and begins to watch them."""
        # A signal interrupts the main thread alone: not between a process' start and what it is told.
        with ThreadPoolExecutor(1, "start-ranks") as starter:
            list(starter.map(self._spawn, range(self._ranks)))
        self._watching.start()

    def stop(self, stop_head: Callable[[], None]) -> None:
        """Has the head stopped, which lets calls under way finish, and ends every process that was started
        here. No seat is filled any more; ranks that die before the head has ended are started again.
        """
        if self._stopping.is_set():
            return
        self._stopping.set()
        stop_head()
        self._watched.set()
        self._end_watching()
        with self._lock:
            processes = list(self._processes.values())
        until = time.monotonic() + self._config.cluster.stop_seconds
        for process in processes:
            process.join(max(0.0, until - time.monotonic()))
        late = [process for process in processes if process.runs]
        for process in late:
            log.warning("rank process %s does not stop; it is killed", process.pid)
            process.kill()
        until = time.monotonic() + STOP_SECONDS
        for process in late:
            process.join(max(0.0, until - time.monotonic()))
            if process.runs:  # its kernel does not let it go: in a driver, or on a dead disk
                log.error("rank process %s is killed and has not ended", process.pid)

    def _end_watching(self) -> None:
        """Waits for the watching thread, so that a rank that it has just started is ended like all others."""
        if self._watching.is_alive():
            self._watching.join(STOP_SECONDS)
        if self._watching.is_alive():
            log.error("watch-ranks is still at work after %g s: a rank that it starts is left", STOP_SECONDS)

    def pid(self, rank: int) -> int:
        """The id of a rank's process. KeyError before it has started."""
        return self._processes[rank].pid

    def _spawn(self, rank: int) -> None:
        """Starts a rank's process. Raises OSError or EOFError where this host starts none now."""
        head, exporter = self._head, self._config.server.host  # as the head's own
        spec = RankSpec(self._config, rank, head.streams, head.token, LANES_HOST, self._ranks, rank, exporter)
        process = self._context.Process(target=_run_rank, args=(spec,), name=f"{DEAF}-{rank}", daemon=True)
        begin(process)
        log.info("rank %d is process %s", rank, process.pid)
        with self._lock:
            self._processes[rank], self._began[rank] = Child(process), time.monotonic()
        self._tell_living()

    def _tell_living(self) -> None:
        """Tells the head which processes there are, where that has changed."""
        with self._lock:
            living = {
                rank: RankProcess(rank, process.pid, host_id())
                for rank, process in self._processes.items()
                if process.runs
            }
            if living == self._told:
                return
            self._told = living
        self._head.living(living)

    def _watch(self) -> None:
        """Runs the watching thread; the group fails, with the reason, when it cannot go on."""
        try:
            while not self._watched.is_set():
                if self._head.state()[0] in ENDED:
                    return
                self._look()
                self._wait()
        except Exception as error:
            log.exception("the launcher's thread watch-ranks ends")
            self._head.fail(f"the launcher cannot go on: {type(error).__name__}: {error}")

    def _wait(self) -> None:
        """Waits until it is time to look again, which it is as soon as a process ends."""
        with self._lock:
            living = [process for process in self._processes.values() if process.runs]
        sentinels = [sentinel for process in living if (sentinel := process.sentinel) is not None]
        wait(sentinels, WATCH_SECONDS)
        if not sentinels:
            self._watched.wait(WATCH_SECONDS)

    def _look(self) -> None:
        """Starts ended ranks again, and gives up those that do not run or do not come to the head."""
        self._tell_living()
        self._note_joined()
        self._follow_seats(self._head.wanted())
        for rank, process in list(self._processes.items()):
            if rank not in self._retiring and not process.runs and self._is_to_run(process):
                self._start_again(rank, process)
        for rank, pid, why in self._standing():
            log.warning("rank %d (pid %d) is given up: %s", rank, pid, why)
            self._head.given_up(RankProcess(rank, pid, host_id()), why)
            self._kill(rank, pid)

    def _is_to_run(self, process: Child) -> bool:
        """Whether a rank that has ended is to be started again: also while the service stops, since calls
        under way wait for it, but for one that the head has told to stop.
        """
        return not self._stopping.is_set() or process.exitcode != 0

    def _follow_seats(self, wanted: Collection[int] | None) -> None:
        """Starts ranks for seats that are new, and ends those whose seats are no more. None: nobody knows."""
        if wanted is None or self._stopping.is_set():
            return
        for rank in self._retiring.keys() | self._processes.keys() - set(wanted):
            if self._retired(rank):
                self._restarts.forget(rank)
                with self._lock:
                    del self._processes[rank], self._began[rank], self._retiring[rank]
                log.info("rank %d has left", rank)
        for rank in sorted(set(wanted) - self._processes.keys()):
            if why := self._why_not(rank) or self._spawned(rank):
                self._head.refused(rank, why)

    def _spawned(self, rank: int) -> str:
        """Starts a rank's process; why that cannot be now, or nothing."""
        try:
            self._spawn(rank)
        except (OSError, EOFError) as error:  # no more processes, or memory
            log.error("rank %d cannot be started now: %s", rank, error or type(error).__name__)
            return f"rank {rank}: its process cannot be started: {error or type(error).__name__}"
        return ""

    def _retired(self, rank: int) -> bool:
        """Whether the process of a rank that was told to stop has ended; it is killed if it does not."""
        process, now = self._processes[rank], time.monotonic()
        since = self._retiring.setdefault(rank, now)
        if process.runs and now > since + self._config.cluster.stop_seconds:
            log.warning("rank process %s does not stop; it is killed", process.pid)
            process.kill()
        return not process.runs

    def _why_not(self, rank: int) -> str:
        """Why this machine has no room for one more rank; empty where it has."""
        if machine_for(self._config).device != "cuda" or rank < torch.cuda.device_count():
            return ""
        return f"rank {rank} needs a GPU of its own, and this machine has {torch.cuda.device_count()}"

    def _standing(self) -> list[tuple[int, int, str]]:
        """Ranks whose process is alive and does not do what it is there for: rank, process id and why."""
        cluster, now = self._config.cluster, time.monotonic()
        living = {rank: one.pid for rank, one in self._processes.items() if one.runs}
        stopped = self._processes_watch.look(living.values())
        seats = self._head.seats()
        found = []
        for rank, pid in living.items():
            began = max(self._began[rank], self._head.since)
            waited = None if rank in seats or self._stopping.is_set() else now - began
            if why := why_given_up(cluster, stopped[pid] or (0.0, ""), waited):
                found.append((rank, pid, why))
        return found

    def _kill(self, rank: int, pid: int) -> None:
        """Kills a rank's process that the head has given up; it is started again once it is seen dead."""
        with self._lock:
            process = self._processes.get(rank)
        if process is not None and process.pid == pid and process.runs:
            log.warning("rank %d (pid %d) is killed", rank, pid)
            process.kill()

    def _note_joined(self) -> None:
        """Forgets the failed starts of ranks whose process has joined a generation."""
        for rank, seat in self._head.seats().items():
            process = self._processes.get(rank)  # none: it has left, which the head has yet to say
            if process is not None and seat.generation and seat.pid == process.pid:
                self._restarts.joined(rank)

    def _start_again(self, rank: int, process: Child) -> None:
        """Starts a rank whose process has ended, once its pause is over; where that cannot be now, after the
        next one.
        """
        now = time.monotonic()
        if (pause := self._restarts.ended(rank, now, self._head.state()[0])) is not None:
            log.warning(
                "rank %d (pid %s) ended with %s; it is started again in %.1f s (failed starts in a row: %d)",
                rank,
                process.pid,
                process.exitcode,
                pause,
                self._restarts.failures(rank),
            )
        if self._restarts.due(rank, now):
            self._spawned(rank)


class LocalCluster:
    """A context: ranks run inside it, and the head in the caller's process."""

    def __init__(self, config: Config) -> None:
        self._config = config.checked()
        self.head = HeadProcess(self._config, LANES_HOST)
        self.ranks = LocalRanks(self._config, HeadInside(self.head), warm_processes(IMPORTED))

    @property
    def address(self) -> str:
        """The front door's `host:port`."""
        return self.head.address

    def start(self) -> LocalCluster:
        """Starts the ranks and waits until the group serves. Raises RuntimeError or TimeoutError with the
        reason.
        """
        try:
            self.ranks.start()
            self.head.coordinator.wait_serving(self._config.cluster.start_timeout_seconds)
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Ends every process that was started here."""
        self.ranks.stop(self.head.stop)

    def state(self) -> tuple[str, str]:
        """The group's state and reason."""
        progress = self.head.coordinator.progress()
        return progress.state, progress.reason

    def metrics_targets(self) -> list[str]:
        """`host:port` of every exporter that is up."""
        return self.head.metrics_targets()

    def probes_address(self) -> str:
        """`host:port` where probes are answered; empty where none are."""
        return self.head.probes_address

    def pid(self, rank: int) -> int:
        """The id of a rank's process. RuntimeError before it has started."""
        return self.ranks.pid(rank)

    def __enter__(self) -> LocalCluster:
        return self.start()

    def __exit__(self, *ended: object) -> None:
        self.stop()


class LocalService:
    """A context: head and ranks run inside it, a process each, and each is started again when it dies."""

    def __init__(self, config: Config) -> None:
        self._config = config.checked()
        context = warm_processes(IMPORTED, heed_sigterm=False)
        self.head = KeptHead(self._config, LANES_HOST, context)
        self.ranks = LocalRanks(self._config, self.head, context)

    @property
    def address(self) -> str:
        """The front door's `host:port`; empty before it has started."""
        return self.head.address

    def start(self) -> LocalService:
        """Starts the head and the ranks, and waits until the group serves. Raises what the head cannot start
        for, RuntimeError or TimeoutError with the reason.
        """
        if not is_loopback(self._config.server.host):
            log.warning(
                "server.host = %r opens the front door to other hosts, and no lane: those of the local "
                "launcher listen on %s, so that a MoeClient of another host, or pod, cannot call layers; it "
                "can with cluster.launcher = 'ray', and any gRPC client by the front door's Forward",
                *(self._config.server.host, LANES_HOST),
            )
        try:
            self.head.start()
            self.ranks.start()
            self.head.wait_serving(self._config.cluster.start_timeout_seconds)
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Ends every process that was started here."""
        self.ranks.stop(self.head.stop)

    def state(self) -> tuple[str, str]:
        """The group's state and reason."""
        return self.head.state()

    def metrics_targets(self) -> list[str]:
        """`host:port` of every exporter that is up."""
        return self.head.metrics_targets()

    def probes_address(self) -> str:
        """`host:port` where probes are answered; empty where none are."""
        return self.head.probes

    def pid(self, rank: int) -> int:
        """The id of a rank's process. RuntimeError before it has started."""
        return self.ranks.pid(rank)

    def __enter__(self) -> LocalService:
        return self.start()

    def __exit__(self, *ended: object) -> None:
        self.stop()


def _run_rank(spec: RankSpec) -> None:
    """The head alone decides when ranks stop, or the launcher's end."""
    hear_no_signals()
    name_process(f"moeserve-rank{spec.rank}")
    launcher, ended = multiprocessing.parent_process(), threading.Event()

    def wait_for_end() -> None:
        if launcher is not None:
            launcher.join()
        ended.set()

    threading.Thread(target=wait_for_end, name="launcher", daemon=True).start()
    try:
        run_rank(spec, ended)
    except Exception as error:  # which is in the log; multiprocessing would write it once more, past that
        raise SystemExit(1) from error
