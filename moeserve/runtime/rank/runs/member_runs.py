"""`MemberRuns`: when a member launches runs of its callers' passes, what they may see, and how they end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

import torch

from moeserve.dispatch.mail.layout import MailLayout
from moeserve.dispatch.peers.memory import Mapped, memory_on
from moeserve.runtime.rank.rank import Rank
from moeserve.runtime.rank.runs.runs import Flight, OwnerLane, PassRuns, Run, Told

log = logging.getLogger(__name__)

Act = Callable[[], None]


class Pass(Protocol):
    """Whose run it is. Its methods are called once in all for each run, from any thread."""

    def ran(self, told: Told, version: int) -> None:
        """The run has ended, with this version of the weights."""

    def lost(self, why: str) -> None:
        """It cannot be launched, or is lost on the way."""

    def other_weights(self, version: int) -> None:
        """It was not launched: its layers have this version of the weights."""


class CannotRun(Exception):
    """Runs cannot be launched here; names the reason and the way out."""


@dataclass(eq=False)
class Mail:
    """A lane's memory on the owner's GPU, the caller's as it is mapped here, and the lane."""

    lane: OwnerLane
    memory: Mapped

    @property
    def handle(self) -> bytes:
        """What the caller needs to map the owner's memory."""
        return bytes(self.memory.handle())


class MemberRuns:
    """Runs of one member, which is alone in its group. Attach and detach from any thread.

    between: has an act done by the thread that launches steps, between two of them. finish: has one done
    after the steps that were launched before. serving: whether the group serves.
    """

    def __init__(
        self,
        rank: Rank,
        between: Callable[[Act], None],
        finish: Callable[[Act], None],
        serving: Callable[[], bool],
    ) -> None:
        self._rank, self._between, self._finish, self._serving = rank, between, finish, serving
        self._runs = PassRuns(rank)
        self.observe: Callable[[int], None] = lambda steps: None  # is told of steps that have ended
        self._lock = threading.Lock()
        self._versions: tuple[int, ...] = ()
        self._attached = set[Mail]()
        self._flying = 0
        self._retired: list[Mail] = []  # to be freed when nothing runs

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

    def check(self, rows: int) -> None:
        """Raises CannotRun where steps of so many rows cannot be launched ahead."""
        if (members := len(self._rank.epoch.members)) != 1:
            raise CannotRun(
                f"this group has {members} members, whose steps the head orders one by one; device lanes "
                "of a GPU are served by a group of one owner. Attach with rows in host memory (cpu)"
            )
        for layer, plan in self._rank.plans.items():
            if plan.span(rows).dispatcher.host_sync:
                name = plan.span(rows).dispatcher.name
                raise CannotRun(f"layer {layer}: {name} reads a count on the host for {rows} rows")

    def attach(self, layout: MailLayout, answers: bytes, patience: float) -> Mail:
        """Memory for a lane whose caller's has the CUDA IPC handle `answers`. Raises CannotRun."""
        device = str(torch.device(self._rank.device))
        try:
            memory = memory_on(device, layout.mailbox_bytes)
        except RuntimeError as error:
            raise CannotRun(f"{layout.mailbox_bytes} bytes on {device}: {error}") from error
        try:
            there = memory.open(answers, layout.answers_bytes)
        except RuntimeError as error:
            memory.close()
            raise CannotRun(f"the caller's memory for answers cannot be mapped: {error}") from error
        addresses = memory.mine.data_ptr(), there.data_ptr()
        mail = Mail(self._runs.lane(layout, addresses, patience), memory)
        with self._lock:
            self._attached.add(mail)
        return mail

    def detach(self, mail: Mail) -> None:
        """Frees a lane's memory as soon as nothing runs on the device that could touch it."""
        with self._lock:
            self._attached.discard(mail)
            self._retired.append(mail)
        self._between(self._sweep)

    def begin(self, run: Run, of: Pass, version: int) -> None:
        """Has a run launched between two steps. version: of the weights that it must have; 0: any."""
        self._between(lambda: self._launch(run, of, version))

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
                mail.lane.abort[0] = 1

    def _launch(self, run: Run, of: Pass, version: int) -> None:
        epoch, served = self._rank.epoch, self._rank.served
        if not self._serving():
            of.lost("the group forms anew")
            return
        if len(epoch.members) != 1:
            of.lost(f"the group has {len(epoch.members)} members now, and launches no run ahead")
            return
        versions = {layer: epoch.version(at) for at, layer in enumerate(served.layers)}
        first = versions[run.steps[0][0]]
        if version not in (0, first):
            of.other_weights(first)
            return
        alike = tuple(takewhile(lambda step: versions[step[0]] == first, run.steps))  # a reload is under way
        try:
            flight = self._runs.launch(run._replace(steps=alike), (epoch.number, first))
        except Exception as error:
            log.exception("a run of a pass cannot be launched")
            of.lost(f"it cannot be launched: {type(error).__name__}: {error}")
            return
        with self._lock:
            self._flying += 1
        self._finish(lambda: self._ended(flight, of, first))

    def _ended(self, flight: Flight, of: Pass, version: int) -> None:
        try:
            flight.event.synchronize()
            self._rank.late(next(iter(self._rank.plans)))  # raises where a kernel's wait has expired
            told = flight.read()
        except Exception as error:
            log.exception("a run of a pass failed")
            of.lost(f"it failed: {type(error).__name__}: {error}")
        else:
            self.observe(len(flight.steps))
            of.ran(told, version)
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
            self._runs.forget(mail.lane)
            mail.memory.close()

    def close(self) -> None:
        """Frees everything; nothing runs any more."""
        self._sweep()
