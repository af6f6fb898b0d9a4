"""The head in a process of its own, and what it and its launcher say to each other over a pipe."""

from __future__ import annotations

import logging
import pickle
import select
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import NamedTuple

from moeserve.runtime.config import Config
from moeserve.runtime.head.reception import RankProcess
from moeserve.runtime.launch.environment import name_process, tune_process
from moeserve.runtime.launch.forking import hear_no_signals
from moeserve.runtime.launch.head_process import HeadInside, HeadProcess, HeadStart, Seated, seated
from moeserve.runtime.telemetry import logs

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.1  # between two looks at who is seated
BEAT_SECONDS = 1.0  # between two words to the launcher, though nothing has changed


@dataclass(frozen=True)
class HeadSpec:
    """What a launcher tells a head's process; picklable."""

    config: Config
    host: str  # where control streams are accepted, and lanes listen
    start: HeadStart
    living: Mapping[int, RankProcess]  # by rank: its process


class Up(NamedTuple):
    """The head listens: at which addresses, `host:port` each, empty where none is."""

    address: str
    probes: str


class CannotStart(NamedTuple):
    """Why the head does not listen."""

    error: Exception


class Now(NamedTuple):
    """How the group is, and who is seated; said whenever it changed, and every BEAT_SECONDS."""

    state: str
    reason: str
    seats: dict[int, Seated]
    metrics: tuple[str, ...]  # host:port of every exporter that is up
    wanted: frozenset[int] | None  # ranks that are to have a process; None while the head does not know
    versions: int = 1  # of the weights that the group has served, or is about to
    aborted: str = ""  # why the last generation ended, until one serves


class GiveUp(NamedTuple):
    """The launcher is to end that process."""

    process: RankProcess


class GivenUp(NamedTuple):
    """The launcher has seen that the process does not run."""

    process: RankProcess
    why: str


class Living(NamedTuple):
    """The process of each rank; any other that a rank had has ended."""

    processes: Mapping[int, RankProcess]


class NoRoom(NamedTuple):
    """A rank that is to have a process cannot have one."""

    rank: int
    why: str


class Fail(NamedTuple):
    """The group is to end as failed."""

    reason: str


class Stop(NamedTuple):
    """The service is to stop, calls under way first."""


FromHead = Up | CannotStart | Now | GiveUp
ToHead = GivenUp | Living | NoRoom | Fail | Stop


def run_head(spec: HeadSpec, launcher: Connection) -> None:
    """Runs the head until its launcher says stop, or has ended."""
    hear_no_signals()
    name_process("moeserve-head")
    tune_process()
    logs.start(spec.config.log, "head")
    try:
        _Child(spec, launcher).run()
    finally:
        logs.finish()


class _Child:
    """The main thread hears the launcher, and one more tells it what changes."""

    def __init__(self, spec: HeadSpec, launcher: Connection) -> None:
        self._spec, self._launcher = spec, launcher
        self._changed, self._over = threading.Event(), threading.Event()
        self._saying = threading.Lock()

    def run(self) -> None:
        """Starts the head, and does what the launcher says."""
        try:
            head = HeadProcess(self._spec.config, self._spec.host, self._spec.start)
        except Exception as error:
            log.info("the head cannot start: %s", error)
            self._say(CannotStart(_picklable(error)))
            return
        inside = HeadInside(head)
        inside.living(self._spec.living)
        inside.on_given_up = lambda process: self._say(GiveUp(process))
        head.on_change = self._changed.set
        self._say(Up(head.address, head.probes_address))
        threading.Thread(target=self._tell, args=(head,), name="tell-launcher", daemon=True).start()
        try:
            self._hear(inside)
            hearing = threading.Thread(target=self._hear, args=(inside,), name="hear-launcher", daemon=True)
            hearing.start()  # of ranks that die while calls under way finish
        finally:
            head.stop()
            self._over.set()
            self._changed.set()
            self._say(now_of(head))  # that it has stopped: any other end is a death

    def _hear(self, head: HeadInside) -> None:
        """Returns once the launcher says stop, or is gone."""
        while True:
            try:
                said: ToHead = self._launcher.recv()
            except (EOFError, OSError):
                log.error("the launcher has ended, and with it the service")
                return
            match said:
                case GivenUp(process, why):
                    head.given_up(process, why)
                case Living(processes):
                    head.living(processes)
                case NoRoom(rank, why):
                    head.refused(rank, why)
                case Fail(reason):
                    head.fail(reason)
                case Stop():
                    return

    def _tell(self, head: HeadProcess) -> None:
        """Tells the launcher how the group is, whenever that has changed, and that the head is alive, which
        takes the group's lock. A launcher that does not listen, since it is stopped, is told changes only.
        """
        told, told_at = None, 0.0
        while not self._over.is_set():
            now = now_of(head)
            if now != told or (time.monotonic() - told_at > BEAT_SECONDS and self._listens()):
                self._say(now)
                told, told_at = now, time.monotonic()
            self._changed.wait(LOOK_SECONDS)
            self._changed.clear()

    def _listens(self) -> bool:
        """Whether there is room for one more word to the launcher."""
        asked = select.poll()  # which any descriptor's number suits, unlike select
        asked.register(self._launcher, select.POLLOUT)
        return bool(asked.poll(0))

    def _say(self, message: FromHead) -> None:
        try:
            with self._saying:
                self._launcher.send(message)
        except OSError as error:
            log.info("the launcher does not hear %s: %s", type(message).__name__, error)


def now_of(head: HeadProcess) -> Now:
    """How the group of `head` is."""
    progress = head.coordinator.progress()
    metrics, wanted = tuple(head.metrics_targets()), head.coordinator.wanted_seats
    versions = len(head.coordinator.epoch.weights)
    return Now(progress.state, progress.reason, seated(head), metrics, wanted, versions, progress.aborted)


def _picklable(error: Exception) -> Exception:
    """`error`, or its text where it cannot travel."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
