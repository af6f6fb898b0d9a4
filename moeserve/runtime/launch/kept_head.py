"""`KeptHead`: the head as a process that is started again at its address when it ends; what outlives it."""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext

from moeserve.runtime.config import Config
from moeserve.runtime.head.generations.patience import Backoff
from moeserve.runtime.head.reception import RankProcess
from moeserve.runtime.keys.sockets import hold_port
from moeserve.runtime.launch.forking import DEAF, begin
from moeserve.runtime.launch.head_child import (
    CannotStart,
    Fail,
    FromHead,
    GivenUp,
    GiveUp,
    HeadSpec,
    Living,
    NoRoom,
    Now,
    Stop,
    ToHead,
    Up,
    run_head,
)
from moeserve.runtime.launch.head_process import ENDED, HeadStart, Seated
from moeserve.runtime.launch.watch import Child, ProcessWatch
from moeserve.runtime.telemetry import logs

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.1  # between two looks whether the head's process runs
LEAST_SILENT_SECONDS = 5.0  # before a head that runs is killed, however short its probes' patience is
STOP_SECONDS = 15.0  # for the head to end, beside what calls under way have
BACKLOG = 1024  # ranks that come between two heads


class KeptHead:
    """Its owner outlives the head, and keeps what has to stay the same: the token, the socket where ranks
    connect, and the ports, which nobody else can take meanwhile.

    `context` is where processes come from. One thread hears the head and starts it again.
    """

    def __init__(self, config: Config, host: str, context: ForkServerContext) -> None:
        self._config, self._context = config, context
        self.token = secrets.token_hex(16)
        logs.hide(self.token)
        listener = socket.create_server((host, 0), backlog=BACKLOG)
        self.streams = f"{host}:{listener.getsockname()[1]}"
        self._holders = list[socket.socket]()
        server = config.server
        port, metrics, health = map(self._held, (server.port, server.metrics_port, server.health_port))
        self._spec = HeadSpec(config, host, HeadStart(self.token, listener, port, metrics, health), {})
        self.on_given_up: Callable[[RankProcess], None] = lambda process: None
        self.since = 0.0
        self.address = self.probes = ""
        self._now = Now("forming", "the head starts", {}, (), None)
        self._wanted: frozenset[int] | None = None  # as it was last known
        self._used = 1  # versions of the weights that were ever served
        self._told = threading.Condition()  # around what the head has said
        self._saying = threading.Lock()
        self._process: Child | None = None
        self._pipe: Connection | None = None
        self._living: Mapping[int, RankProcess] = {}
        self._failed = ""  # why the service cannot go on
        self._serves_since_start = False  # whether the head's process has said so
        self._served_at = time.monotonic()  # when a head last said so, or this was made
        self._pauses = Backoff()  # between heads that end before they serve
        self._heard_at = self._looked_at = 0.0  # when the head last spoke, and when that was looked at
        self._stopping = threading.Event()
        self._one_more = True  # whether a head that dies while the service stops has one to follow it
        self._watch = ProcessWatch()
        self._keeping = threading.Thread(target=self._keep, name="keep-head", daemon=True)

    # -- for who starts ranks -------------------------------------------------------------------------------

    def seats(self) -> Mapping[int, Seated]:
        """The ranks that are connected now, as far as the head has told."""
        return self._now.seats

    def wanted(self) -> Collection[int] | None:
        """The ranks that are to have a process, as far as the head has told."""
        return self._now.wanted

    def refused(self, rank: int, why: str) -> None:
        """Tells it that a rank cannot have a process."""
        self._say(NoRoom(rank, why))

    def state(self) -> tuple[str, str]:
        """The group's state, and the reason for it."""
        return ("failed", self._failed) if self._failed else (self._now.state, self._now.reason)

    def given_up(self, process: RankProcess, why: str) -> None:
        """Tells it of a process that does not run."""
        self._say(GivenUp(process, why))

    def living(self, processes: Mapping[int, RankProcess]) -> None:
        """Tells it the process of each rank."""
        self._living = dict(processes)
        self._say(Living(self._living))

    def fail(self, reason: str) -> None:
        """Has the group end as failed."""
        self._failed = reason
        self._say(Fail(reason))

    # -- for its owner --------------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        """The head's process."""
        return 0 if self._process is None else self._process.pid

    def metrics_targets(self) -> list[str]:
        """`host:port` of every exporter that is up."""
        return list(self._now.metrics)

    def start(self) -> None:
        """Starts the head, and returns once it listens. Raises what it cannot start for, or TimeoutError."""
        # A signal interrupts the main thread alone: not between a process' start and what it is told.
        with ThreadPoolExecutor(1, "start-head") as starter:
            starter.submit(self._spawn).result()
            self._wait_first(lambda: starter.submit(self._spawn).result())
        self._keeping.start()

    def _wait_first(self, spawn: Callable[[], None]) -> None:
        """Waits until a head listens; one that was stopped before it does is replaced. Raises as `start`."""
        limit, key = self._config.cluster.start_timeout_seconds, "cluster.start_timeout_seconds"
        deadline, killed = time.monotonic() + limit, False
        while not self.address:
            said = None
            try:
                said = self._hear(min(LOOK_SECONDS, deadline - time.monotonic()))
                killed = self._look_whether_it_runs() or killed
            except EOFError:
                how = self._ended()
                if not killed:
                    raise RuntimeError(f"the head ended with {how} before it listened") from None
                killed = False
                spawn()
            if isinstance(said, CannotStart):
                raise said.error
            if said is not None:
                self._take(said)
            if time.monotonic() > deadline:
                raise TimeoutError(f"the head did not listen within {key} = {limit:g}")

    def wait_serving(self, seconds: float) -> None:
        """Returns once the group serves. Raises TimeoutError or RuntimeError, with the reason it does not."""
        with self._told:
            self._told.wait_for(lambda: self.state()[0] in ("serving", *ENDED), seconds)
        state, reason = self.state()
        if state in ENDED:
            raise RuntimeError(reason)
        if state != "serving":
            if (before := self._now.aborted) and before != reason:
                reason += f"; before: {before}"
            raise TimeoutError(f"the group did not serve within {seconds:.0f} s: {reason}")

    def stop(self) -> None:
        """Lets calls under way finish, and ends the head, or one more where it dies meanwhile; once."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._say(Stop())
        until = time.monotonic() + self._config.server.drain_seconds + STOP_SECONDS
        if self._keeping.is_alive():
            self._keeping.join(until - time.monotonic())
        self._one_more = False
        if (process := self._process) is not None:
            process.join(max(0.0, until - time.monotonic()))
            if process.runs:
                log.error("the head (pid %s) does not stop; it is killed", process.pid)
                process.kill()
                process.join(STOP_SECONDS)
        if self._pipe is not None:
            self._pipe.close()
        for holder in (self._spec.start.streams, *self._holders):
            holder.close()

    # -- the process ----------------------------------------------------------------------------------------

    def _held(self, port: int) -> int:
        """`port`, held; as it is where there is none, or somebody has it: then the head says so."""
        if port < 0:
            return port
        try:
            holder, held = hold_port(self._config.server.host, port)
        except OSError as error:
            log.debug("port %d cannot be held: %s", port, error)
            return port
        self._holders.append(holder)
        return held

    def _spawn(self) -> None:
        """Starts a head's process. Raises OSError or EOFError where this host starts none now."""
        mine, theirs = self._context.Pipe()
        start = replace(self._spec.start, stopping=self._stopping.is_set())
        spec = replace(self._spec, start=start, living=self._living)
        process = self._context.Process(
            target=run_head, args=(spec, theirs), name=f"{DEAF}-head", daemon=True
        )
        begin(process)
        theirs.close()
        log.info("the head is process %s", process.pid)
        with self._saying:
            before, self._pipe, self._process = self._pipe, mine, Child(process)
        if before is not None:
            before.close()
        self.since, self._serves_since_start = time.monotonic(), False
        if self._living != spec.living:  # it changed while the process was started
            self._say(Living(self._living))
        if self._failed:
            self._say(Fail(self._failed))
        if self._stopping.is_set():
            self._say(Stop())

    def _say(self, message: ToHead) -> None:
        """Tells the head. What one that has just ended does not hear the next one is told once it has
        started: who lives, and whether it is to fail or to stop.
        """
        try:
            with self._saying:
                if self._pipe is not None:
                    self._pipe.send(message)
        except OSError as error:
            log.info("the head does not hear %s: %s", type(message).__name__, error)

    def _hear(self, seconds: float) -> FromHead | None:
        """What the head says within so many seconds; None for nothing. Raises EOFError once it has ended."""
        pipe = self._pipe
        if pipe is None:
            raise EOFError
        try:
            said: FromHead | None = pipe.recv() if pipe.poll(max(0.0, seconds)) else None
        except OSError as error:
            raise EOFError from error
        if said is not None:
            self._heard_at = time.monotonic()
        return said

    def _take(self, said: FromHead) -> None:
        """Notes what the head has said."""
        if isinstance(said, GiveUp):
            self.on_given_up(said.process)
            return
        with self._told:
            if isinstance(said, Up):
                self.address, self.probes = said.address, said.probes
            elif isinstance(said, Now):
                self._now = said
                if said.state == "serving":
                    self._served_at, self._serves_since_start = time.monotonic(), True
                    self._pauses.reset()
                self._used = max(self._used, said.versions)
                self._wanted = self._wanted if said.wanted is None else said.wanted
            self._told.notify_all()

    # -- the thread -----------------------------------------------------------------------------------------

    def _keep(self) -> None:
        """Hears the head, and starts it again; the service fails, with the reason, where that cannot be."""
        try:
            while not self._hear_until_it_ends():
                pass
            with self._told:
                self._told.notify_all()
        except Exception as error:
            log.exception("the launcher's thread keep-head ends")
            self._failed = f"the launcher cannot go on: {type(error).__name__}: {error}"

    def _hear_until_it_ends(self) -> bool:
        """Whether no head is to follow the one that has ended."""
        try:
            while True:
                if (said := self._hear(LOOK_SECONDS)) is not None:
                    self._take(said)
                self._look_whether_it_runs()
                self._look_whether_it_hangs()
        except EOFError:
            pass
        return self._now.state == "stopped" or not self._start_again()

    def _may_start(self) -> bool:
        """Whether a head is to start: while the service stops one more, however it fares."""
        if not self._stopping.is_set():
            return True
        first, self._one_more = self._one_more, False
        return first

    def _look_whether_it_runs(self) -> bool:
        """Kills a head that is stopped, also while the service stops; it is started again. Whether it was."""
        limit, pid = self._config.cluster.stopped_seconds, self.pid
        seen = self._watch.look([pid])[pid]
        if seen is None or not 0 < limit <= seen[0]:
            return False
        log.warning("the head (pid %d) is killed: %s for %.1f s", pid, seen[1], seen[0])
        self._watch.kill(pid)
        return True

    def _look_whether_it_hangs(self) -> None:
        """Kills a head that runs and has said nothing for too long, though it says every second that it is
        alive. Where this process itself stood still meanwhile, the head may have said it all the same.
        """
        limit, now = max(LEAST_SILENT_SECONDS, self._config.server.stalled_seconds), time.monotonic()
        here, self._looked_at = now - self._looked_at < 1.0, now
        if here and now - self._heard_at > limit and not self._stopping.is_set():
            silent = f"it has said nothing for {limit:g} s (server.stalled_seconds)"
            log.error("the head (pid %d) is killed: %s", self.pid, silent)
            self._watch.kill(self.pid)
            self._heard_at = now

    def _start_again(self) -> bool:
        """Starts heads until one listens, for as long as ranks look for it; whether one does."""
        began, seconds = time.monotonic(), self._config.cluster.head_seconds
        start = replace(self._spec.start, again=True, wanted=self._wanted, used=self._used)
        self._spec = replace(self._spec, start=start)
        why = f"it ended with {self._ended()}"
        pauses = not self._serves_since_start  # as the one before it, perhaps
        while True:
            self.since = time.monotonic()  # before nobody is seated: no rank is late while there is no head
            with self._told:
                self._now = Now("forming", f"the head has ended, and is started again: {why}", {}, (), None)
            if pauses:
                self._stopping.wait(self._pauses.next())
            if time.monotonic() - began >= seconds or not self._may_start():
                break
            if late := self._too_long_without():
                self._failed = f"{late}: {why}"
                break
            log.warning("the head does not run: %s; it is started again", why)
            why, pauses = self._start_one(began + seconds), True
            if not why:
                log.info("the head listens again after %.2f s", time.monotonic() - began)
                return True
        if self._stopping.is_set():
            log.error("the head is not started again while the service stops: %s", why)
        else:
            limit = f"cluster.head_seconds = {seconds:g}"
            self._failed = self._failed or f"the head did not start again within {limit}: {why}"
            log.error("%s", self._failed)
        return False

    def _too_long_without(self) -> str:
        """Why the service ends though a head could start: none has served for too long; else nothing."""
        limit = self._config.cluster.give_up_seconds
        if not limit or time.monotonic() - self._served_at < limit:
            return ""
        return f"no head has served for cluster.give_up_seconds = {limit:g}"

    def _start_one(self, deadline: float) -> str:
        """Starts a head and waits for it to listen; returns why it does not, or nothing."""
        try:
            self._spawn()
        except (OSError, EOFError) as error:  # this host has no more processes, or memory
            return f"its process cannot be started: {error or type(error).__name__}"
        return self._wait_listening(deadline)

    def _wait_listening(self, deadline: float) -> str:
        """Waits for the head that was started to listen; returns why it does not, or nothing."""
        try:
            while time.monotonic() < deadline:
                said = self._hear(LOOK_SECONDS)
                if isinstance(said, CannotStart):
                    self._ended()
                    return f"it cannot start: {said.error}"
                if said is not None:
                    self._take(said)
                if isinstance(said, Up):
                    return ""
                self._look_whether_it_runs()
        except EOFError:
            return f"it ended with {self._ended()}"
        if self._process is not None:
            self._process.kill()
        self._ended()
        return "it did not listen in time"

    def _ended(self) -> int | None:
        """How the head's process has ended."""
        process = self._process
        if process is None:
            return None
        process.join(STOP_SECONDS)
        if process.runs:
            log.error("the head (pid %s) says nothing any more; it is killed", process.pid)
            process.kill()
            process.join(STOP_SECONDS)
        return process.exitcode
