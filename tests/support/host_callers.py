"""A lane of rows in host memory, its calls that end by hand, and a device that runs its steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from begun_steps import Step
from mail_callers import AHEAD, PATIENCE, Caller, Memory

from moeserve.dispatch.mail.host_layout import HostMailLayout
from moeserve.dispatch.mail.kernels import ABORT, MISFIT, words
from moeserve.proto import moe_pb2
from moeserve.proto.passes import mailbox as m
from moeserve.proto.passes.mailbox import Status, tag_of
from moeserve.runtime.doors.passes.announced import LaneTerms
from moeserve.runtime.doors.passes.device_lane import DeviceLane
from moeserve.runtime.doors.passes.host_lane import HostLane
from moeserve.runtime.doors.passes.mail_lane import MailLane
from moeserve.runtime.doors.passes.turns import Company
from moeserve.runtime.rank.runs.mail import Mail
from moeserve.runtime.rank.runs.runs import OwnerLane, Run, Told

LAYOUT = HostMailLayout(40, 2, 8, 4, 2, torch.bfloat16)
WORDS = LAYOUT.words


@dataclass
class HostCaller(Caller):
    """A host lane with the caller's words, its calls, and who else wants steps."""

    calls: list[Step] = field(default_factory=list)
    can: bool = True  # whether runs can be launched
    others: Company = Company.NONE

    def __post_init__(self) -> None:
        memory = self.memory_of(self.regions, WORDS)
        terms = LaneTerms(frozenset({3, 5}), PATIENCE, 9.0, self.observed.append, ahead=AHEAD)
        abort = torch.zeros(1, dtype=torch.int32)
        owner = OwnerLane(LAYOUT, (0, 0), abort, PATIENCE, words(torch.device("cpu")))
        self.mail = Mail(owner, Memory())  # type: ignore[arg-type]
        runs = MailLane(memory, terms, (LAYOUT, self.mail), self)  # type: ignore[arg-type]
        both = DeviceLane(memory, terms, self.call), runs
        self.host: HostLane = HostLane(memory, terms, both, lambda: self.can)
        self.lane, runs.turns = self.host, runs.turns  # type: ignore[assignment]
        self.host.company_of = lambda lane: self.others

    def call(
        self, request: moe_pb2.ForwardRequest, ended: Callable[[moe_pb2.ForwardStreamReply], None]
    ) -> Step:
        self.calls.append(Step(request, ended))
        return self.calls[-1]

    def fill(self, stage: int, rows: int) -> None:
        """So many of the stage's hidden states are there."""
        self.box[WORDS.header(stage) + m.FILLED] = rows + 1

    def bring(self, stage: int, step: int, count: int = 2, kind: int = m.CHOICE, layer: int = -1) -> None:
        head, wanted = WORDS.header(stage), self.layers[step % len(self.layers)] if layer < 0 else layer
        values = {m.LAYER: wanted, m.STAGE: stage, m.COUNT: count, m.KIND: kind}
        for at, value in (values | {m.TAG: tag_of(self.number, step)}).items():
            self.box[head + at] = value

    def announce(self, layers: list[int], stages: int = 1, flags: int = 0, version: int = 0) -> None:
        self.layers = layers
        super().announce(layers, stages, flags, version)

    def answered(self, stage: int, step: int) -> bool:
        return bool(self.out[WORDS.answer_header(stage) + m.TAG] == tag_of(self.number, step))

    def looked(self) -> bool:
        """Looks as the thread of the lanes does; whether there was anything."""
        found = self.look()
        if self.others is not Company.NONE:
            self.host.yield_steps(self.others)
        return found


@dataclass
class HostDevice:
    """Runs a lane's runs as the kernels do: by what its caller's header says when its step has its turn."""

    caller: HostCaller
    version: int = 1
    computed: list[tuple[int, int, str]] = field(default_factory=list)  # stage, step, and how
    queue: deque[Run] = field(default_factory=deque)
    steps: list[int] = field(default_factory=lambda: [0, 0])
    ended = 0
    seen = 0  # runs that were taken from the caller's list
    at = 0  # of the steps of the run that is on the device
    answered = 0
    number = 0

    def work(self) -> bool:
        """Goes on until it has to wait; whether a run has ended."""
        self.queue.extend(run for run, _ in self.caller.begun[self.seen :])
        self.seen = len(self.caller.begun)
        if not self.queue:
            return False
        run = self.queue[0]
        if not self.at:
            self._begins(run)
        while self.at < len(run.steps):
            if not self.ended and not self._step(run, *run.steps[self.at]):
                return False
            self.at += 1
            if self.ended not in (0, MISFIT):
                self.steps[run.steps[self.at - 1][1]] += 1  # they are counted, and have no answer
        self.queue.popleft()
        told = Told(self.ended, tuple(self.steps), self.answered if self.ended in (0, MISFIT) else 0)
        self.at = self.answered = 0
        self.caller.host._runs.ran(told, self.version)
        return True

    def _begins(self, run: Run) -> None:
        if run.begins:
            self.number, self.ended = run.begins, 0
            self.steps = list(run.before or (0, 0)) + [0] * (2 - len(run.before or (0, 0)))
        if run.again:
            self.ended = 0

    def _step(self, run: Run, layer: int, stage: int) -> bool:
        """Whether the step needs to wait no more."""
        box, out, head = self.caller.box, self.caller.out, WORDS.header(stage)
        tag, filled = box[head + m.TAG], box[head + m.FILLED]
        if tag != tag_of(self.number, self.steps[stage]) or 0 < filled <= box[head + m.COUNT]:
            said = int(self.caller.mail.lane.abort[0])
            if said:
                self.ended = int(Status.LOST) if said == ABORT else MISFIT
            return said != 0
        found, named, count, kind = box[head + m.LAYER : head + m.KIND + 1]
        least = run.least if not self.at else 0
        wrong = (found, named) != (layer, stage) or kind > m.LOGITS
        if (wrong and not least) or count > WORDS.rows:
            self.ended = int(Status.REFUSED)
        elif wrong or kind != run.kind or not least <= count <= run.rows:
            self.ended = MISFIT
        else:
            self.computed.append((stage, self.steps[stage], "run"))
            told = WORDS.answer_header(stage)
            out[told + m.EPOCH], out[told + m.VERSION] = 3, self.version
            out[told + m.TAG] = tag_of(self.number, self.steps[stage])
            self.steps[stage] += 1
            self.answered += 1
        return True
