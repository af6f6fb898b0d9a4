"""`MemberRuns`: when a member launches runs of its callers' passes, what they may see, and how they end."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from itertools import takewhile

import torch

from moeserve.device.machine import Machine
from moeserve.device.nvrtc import NEEDED_MODULE
from moeserve.device.sharing import by_service
from moeserve.dispatch.mail.host_layout import HostMailLayout
from moeserve.dispatch.mail.kernels import ABORT
from moeserve.dispatch.mail.layout import MailLayout
from moeserve.dispatch.peers.memory import memory_on
from moeserve.runtime.planning.passes import rows_wire
from moeserve.runtime.rank.all2all import PeersLate
from moeserve.runtime.rank.graphs import padded_rows
from moeserve.runtime.rank.memory import RunsHeld
from moeserve.runtime.rank.rank import Rank
from moeserve.runtime.rank.runs.begun import Begun
from moeserve.runtime.rank.runs.group_runs import ANEW, Act, GroupRuns, OwnRun, Pass
from moeserve.runtime.rank.runs.host_memory import HostMemory
from moeserve.runtime.rank.runs.mail import Mail
from moeserve.runtime.rank.runs.runs import Flight, PassRuns, Run

log = logging.getLogger(__name__)

ALONE = "local"
"""The dispatcher of a group that never had another member."""


def why_not(machine: Machine) -> str:
    """Why no run is launched on such a machine; empty where runs are."""
    if machine.device == "cpu":
        return "this rank computes on the CPU"
    if not machine.arch.startswith("sm"):
        return f"the kernels that wait for rows are CUDA's, and this rank's GPU is of {machine.arch}"
    if NEEDED_MODULE not in machine.modules:
        return f"{NEEDED_MODULE} is not installed at this rank, which compiles the kernels that wait for rows"
    return ""


class CannotRun(Exception):
    """Runs cannot be launched here; names the reason and the way out."""


class MemberRuns:
    """Runs of one member's lanes. Attach and detach from any thread.

    A member that is alone launches them by itself; in a group of several the head orders them, by `group`.
    between: has an act done by the thread that launches steps, between two of them. finish: has one done
    after the steps that were launched before. serving: whether the group serves. short_rows: of steps that
    have a track of their own, while the member is alone; 0: none has.
    """

    def __init__(
        self,
        rank: Rank,
        between: Callable[[Act], None],
        finish: Callable[[Act], None],
        serving: Callable[[], bool],
        group: GroupRuns,
        short_rows: int = 0,
    ) -> None:
        self._rank, self._between, self._finish, self._serving = rank, between, finish, serving
        self._runs = PassRuns(rank, group.graphs, short_rows)
        self._group = group
        group.launch, group.flies, group.over = self._runs.launch, self._flies, self._over
        self.closed: Callable[[], Collection[int]] = lambda: ()  # layers that no step may take now
        self.observe: Callable[[Sequence[int]], None] = lambda layers: None  # of steps that have ended
        self.attend: Act = lambda: None  # has the thread that launches steps look after lanes for a while
        self.finish_short: Callable[[Act], None] = finish  # has one done after those that it had before
        self.room: Callable[[bool], bool] = lambda short: False  # whether that one waits for nothing
        self.keeps: Act = lambda: None  # is told that runs wait behind others that may wait for their callers
        self.looked_here = False  # the thread that launches steps looks at lanes, and begins what they want
        self._lock = threading.Lock()
        self._versions: tuple[int, ...] = ()
        self._position = {layer: at for at, layer in enumerate(rank.served.layers)}
        self._attached = set[Mail]()
        self._flying = 0
        self._retired: list[Mail] = []  # to be freed when nothing runs
        self._begun = Begun()

    @property
    def dtype(self) -> torch.dtype:
        """Of hidden states and answers."""
        return self._rank.served.dtype

    @property
    def most_rows(self) -> int:
        """Of one step."""
        return min(plan.problem.lane_rows for plan in self._rank.plans.values())

    @property
    def device_uuid(self) -> str:
        """Of the GPU that computes here."""
        return str(torch.cuda.get_device_properties(self._rank.device).uuid)

    @property
    def by_service(self) -> bool:
        """Whether this process is a client of NVIDIA's multi-process service."""
        return by_service(self._rank.device)

    @property
    def alone(self) -> bool:
        """Whether runs are launched without the head's word. A group of several that has lost all others but
        this one keeps what carries its rows, whose steps count numbers that the head gives.
        """
        spans = (span for plan in self._rank.plans.values() for span in plan.dispatchers)
        return len(self._rank.epoch.members) == 1 and all(span.dispatcher.name == ALONE for span in spans)

    @property
    def most_seconds(self) -> float:
        """After which a run that waits for its caller is left: in a group of several its other members wait
        for it, and none may be taken for late.
        """
        return math.inf if self.alone else self._rank.served.patience / 2

    def short(self, rows: int) -> bool:
        """Whether a step of so many padded rows is on the track of those of few rows."""
        return rows <= self._runs.short_rows and self.alone

    def join(self) -> None:
        """What the thread that launches steps launches next is no run: it follows all runs before."""
        if self._runs.join():
            self.keeps()

    def leads(self, run: Run) -> bool:
        """Whether its steps may be launched before the rows of all are there. In a group of several each has
        run once before: what a step needs is loaded by one whose rows are there.
        """
        return self.alone or self._runs.known(run)

    def recorded(self, run: Run) -> bool:
        """Whether it has a graph, and so needs nothing while others wait on the device."""
        return self._runs.recorded(run)

    def check(self, rows: int, patience: float) -> None:
        """Raises CannotRun where steps of so many rows cannot be launched ahead, for which a caller may take
        so many seconds.
        """
        if not self._rank.loaded:
            raise CannotRun("this rank has loaded no experts yet; attach again when the service serves")
        if not self.alone:
            self._check_group(min(padded_rows(rows), self.most_rows), patience)

    def _check_group(self, rows: int, patience: float) -> None:
        if self._rank.member.lane is None:
            raise CannotRun("this rank has no lane, by which rows come to its group; attach to one that has")
        if patience > self.most_seconds:
            raise CannotRun(
                f"passes.patience_seconds = {patience:g} is more than half of the "
                f"{self._rank.served.patience:g} s after which a rank counts as late that waits for a "
                "caller: lower it, or raise step.late_seconds"
            )
        for layer, plan in self._rank.plans.items():
            for span in plan.dispatchers:
                if not span.dispatcher.living:
                    raise CannotRun(
                        f"layer {layer}: {span.dispatcher.name} carries steps of up to {span.up_to} rows, "
                        "and its kernels do not say whether all members are there; attach with rows in host "
                        "memory (cpu), or set plan.all2all_backend to nvlink_ll or nvlink_ht"
                    )
                if span.up_to >= rows:
                    break

    def wire(self, rows: int) -> str:
        """In which rows of a caller's steps may come, up to so many, so that answers have the bits of calls;
        empty: as they are.
        """
        return rows_wire(self._rank.plans.values(), min(padded_rows(rows), self.most_rows))

    def attach(self, layout: MailLayout, answers: bytes, patience: float) -> Mail:
        """Memory for a lane whose caller's has the CUDA IPC handle `answers`. Raises CannotRun."""
        device = torch.device(self._rank.device)
        with torch.cuda.device(device), ExitStack() as undone:
            try:
                memory = memory_on(str(device), layout.mailbox_bytes)
                undone.callback(memory.close)
            except RuntimeError as error:
                raise CannotRun(f"{layout.mailbox_bytes} bytes on {device}: {error}") from error
            try:
                there = memory.open(answers, layout.answers_bytes)
            except RuntimeError as error:
                raise CannotRun(f"the caller's memory for answers cannot be mapped: {error}") from error
            addresses = memory.mine.data_ptr(), there.data_ptr()
            mail = Mail(self._runs.lane(layout, addresses, patience), memory)
            undone.pop_all()
        return self._added(mail)

    def attach_host(self, layout: HostMailLayout, memory: HostMemory, patience: float) -> Mail:
        """A lane whose mailbox and answers lie in registered memory of this host. Raises RuntimeError."""
        with torch.cuda.device(torch.device(self._rank.device)):
            torch.cuda.current_stream()  # the context is there
            lane = self._runs.lane(layout, memory.on_device(), patience)
            return self._added(Mail(lane, memory))

    def _added(self, mail: Mail) -> Mail:
        with self._lock:
            self._attached.add(mail)
        return mail

    @property
    def held(self) -> RunsHeld:
        """Device memory that is held for lanes and their runs, by any thread."""
        with self._lock:
            mails = [*self._attached, *self._retired]
        held = self._runs.held
        mailboxes = sum(mail.nbytes for mail in mails)
        return held._replace(rooms=held.rooms + self._group.nbytes, mailboxes=mailboxes)

    @property
    def retired(self) -> int:
        """Lanes that were detached, and whose memory is not free yet."""
        return len(self._retired)

    @property
    def makes_room(self) -> bool:
        """Whether no run should begin now: a lane's memory is freed when those under way have ended. In a
        group of several it is not waited for: others' runs are under way too.
        """
        return bool(self._retired) and self._flying > 0 and self.alone

    def waits_for(self, of: Pass) -> bool:
        """Whether the thread that launches waits, or is about to, for all that lies on the device, or runs of
        others do: one of another than `of` is recorded, or a lane's memory is to be freed.
        """
        return self._begun.records_another_than(of) or self.makes_room

    @property
    def most_steps(self) -> int:
        """Of a run that is launched whole, since it is recorded."""
        return self._runs.most_steps

    def detach(self, mail: Mail) -> None:
        """Frees a lane's memory as soon as nothing runs on the device that could touch it."""
        with self._lock:
            self._attached.discard(mail)
            self._retired.append(mail)
        self._between(self._sweep)

    def begin(self, run: Run, of: Pass, version: int) -> None:
        """Has a run launched between two steps: at once where the thread that launches them begins it, and
        nothing would keep it for long. version: of the weights that it must have; 0: any.
        """
        if self.alone:
            recorded = self._runs.recorded(run)
            first = self._begun.put(run, of, recorded=recorded)
            if first and self.looked_here and recorded and self.room(run.short):
                self._launch(run, of, version)
            else:
                self._between(lambda: self._launch(run, of, version))
        elif waits := self._closed(run):
            of.lost(waits)
        else:
            self._group.ask(OwnRun(run, of, version))

    def await_launches(self, seconds: float) -> None:
        """Returns once all runs that were begun are launched, or wait for others to end, or after so many
        seconds. Who looks for rows meanwhile takes the interpreter from the thread that launches, each time
        that it calls the driver.
        """
        self._begun.wait(seconds)

    @property
    def open(self) -> bool:
        """Whether the group serves, and steps of all layers may be taken now."""
        return self._serving() and self._group.live and not self.closed()

    def _closed(self, run: Run) -> str:
        """Why no step of the run may be taken now; empty where it may."""
        closed = self.closed()
        waits = [layer for layer, _ in run.steps if layer in closed]
        return f"layer {waits[0]} is being restored" if waits else ""

    def drop(self) -> None:
        """What runs have recorded is about to change, and none is under way. By the thread that launches."""
        self._runs.drop()

    def adopted(self) -> None:
        """Another epoch is served. By the thread that launches."""
        if (versions := self._rank.epoch.versions) != self._versions:  # gates are reloaded with experts
            self._versions = versions
            self._runs.drop()

    def interrupt(self) -> None:
        """Ends the waits of all runs under way: the group has ended. From any thread."""
        with self._lock:
            for mail in self._attached:
                mail.interrupted = True
                mail.lane.abort[0] = ABORT
        self._group.end()

    def _launch(self, run: Run, of: Pass, version: int) -> None:
        """Launches a run, or says why not: whose run it is hears of it once, whatever happens."""
        try:
            launched = self._launched(run, of, version)
        except Exception as error:
            log.exception("a run of a pass cannot be launched")
            of.lost(f"it cannot be launched: {type(error).__name__}: {error}")
            return
        finally:
            self._begun.launched(run)
        if launched is None:
            return
        flight, found, layers = launched
        self._flies()
        if run.flows and len(run.steps) == 1:  # the next one of whomever is to be launched soon
            self.attend()
        self._begun.note_full(full=True)
        try:
            (self.finish_short if run.short else self._finish)(lambda: self._ended(flight, of, found, layers))
        except Exception as error:  # what was launched before does not end
            log.exception("a run of a pass is not waited for")
            why = f"{type(error).__name__}: {error}"
            self._over(lambda: of.lost(why))
        finally:
            self._begun.note_full(full=False)

    def _launched(self, run: Run, of: Pass, version: int) -> tuple[Flight, int, list[int]] | None:
        """What was launched, its weights, and the layers of its steps; None where `of` was told why nothing
        was.
        """
        if not self._serving():
            of.lost(ANEW)
            return None
        if not self.alone:  # it has grown since
            of.lost(ANEW)
            return None
        if waits := self._closed(run):
            of.lost(waits)
            return None
        epoch, position = self._rank.epoch, self._position
        first = epoch.version(position[run.steps[0][0]])
        if version not in (0, first):
            of.other_weights(first)
            return None
        if any(one != first for one in epoch.versions):  # a reload is under way
            alike = takewhile(lambda step: epoch.version(position[step[0]]) == first, run.steps)
            run = run._replace(steps=tuple(alike))
        return self._runs.launch(run, (epoch.number, first)), first, [layer for layer, _ in run.steps]

    def _ended(self, flight: Flight, of: Pass, version: int, layers: Sequence[int]) -> None:
        """layers: of the steps that were launched, in their order."""
        try:
            flight.event.synchronize()
            self._rank.late(next(iter(self._rank.plans)))  # raises where a kernel's wait has expired
            told = flight.read()
        except PeersLate as ended:
            lost = str(ended)
            self._over(lambda: of.lost(lost))
            return
        except Exception as error:
            log.exception("a run of a pass failed")
            why = f"it failed: {type(error).__name__}: {error}"
            self._over(lambda: of.lost(why))
            return
        self.observe(layers[: told.answered])
        self._over(lambda: of.ran(told, version))

    def _flies(self) -> None:
        with self._lock:
            self._flying += 1

    def _over(self, tell: Act) -> None:
        """A run is over: whose it was is told, and what was detached meanwhile is freed."""
        try:
            tell()
        finally:
            with self._lock:
                self._flying -= 1
                free = not self._flying and bool(self._retired)
            if free:
                self._between(self._sweep)

    def _sweep(self) -> None:
        """Frees what was detached, while nothing runs: to free memory waits for the device."""
        with self._lock:
            free = [] if self._flying else self._retired
            self._retired = [] if not self._flying else self._retired
        for mail in free:
            try:
                self._runs.forget(mail.lane)
                mail.memory.close()
            except Exception:  # the others' memory is freed all the same
                log.exception("the memory of a lane is not freed")

    def close(self) -> None:
        """Frees everything; nothing runs any more."""
        self._sweep()
