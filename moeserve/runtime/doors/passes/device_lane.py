"""`DeviceLane`: one attached caller's memory and the pass that runs on it.

The rank's one thread of passes looks at it (`look`). It copies a header before it checks it, and what it
gives on are places in regions, whose contents the door checks: the caller may write anything at any time.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from moeserve.proto import moe_pb2
from moeserve.proto.passes import mailbox as m
from moeserve.proto.passes.mailbox import Status, fence, tag_of
from moeserve.proto.tensors import Spec, describe_into
from moeserve.runtime.doors.passes.announced import (
    Announcement,
    Between,
    Handed,
    HandedLane,
    LaneMemory,
    LaneTerms,
)
from moeserve.runtime.doors.passes.turns import Company

SOON_SECONDS = 0.0005
"""After which a step is tried again that the lane had no room for, where it does not say when."""

INVALID_ARGUMENT, NOT_FOUND, RESOURCE_EXHAUSTED = 3, 5, 8
"""Codes of gRPC's statuses."""

WRONG = (
    (INVALID_ARGUMENT, "bad_tensor"),
    (INVALID_ARGUMENT, "bad_request"),
    (INVALID_ARGUMENT, "too_many_rows"),
    (NOT_FOUND, "not_served"),
)
"""How a step fails that its caller has got wrong. After another failure the caller may try again."""


class Call(Protocol):
    """A step of this lane that is under way."""

    def give_up(self) -> None:
        """Ends it soon; its `ended` is called all the same."""


Begin = Callable[[moe_pb2.ForwardRequest, Callable[[moe_pb2.ForwardStreamReply], None]], Call | None]
"""Begins a step, whose reply the function gets, once, from any thread. None: it has ended already."""


@dataclass
class _Stage:
    """Where a stage of a pass is."""

    since: float  # when its next rows were first wanted
    steps: int = 0  # that were answered
    busy: bool = False
    call: Call | None = None
    again: float = -math.inf  # not to be begun before
    refused: float = math.inf  # when the lane first had no room for the step that is next


@dataclass
class _Pass:
    number: int
    layers: tuple[int, ...]
    standing: bool
    any_weights: bool
    version: int  # of the weights that its steps must have; 0: whichever comes first
    stages: list[_Stage]
    ends: tuple[Status, str] | None = None  # how, once the steps under way have ended

    @classmethod
    def of(cls, between: Between) -> _Pass:
        """One that goes on."""
        said = between.said
        stages = [_Stage(*one) for one in zip(between.since, between.steps, strict=True)]
        return cls(said.number, said.layers, said.standing, said.any_weights, between.version, stages)

    def between(self) -> Between:
        """How far it is; no step is under way."""
        modes = self.standing, self.any_weights, self.version
        return Between(
            Announcement(self.number, self.layers, len(self.stages), *modes),
            tuple(stage.steps for stage in self.stages),
            tuple(stage.since for stage in self.stages),
            self.version,
        )

    @property
    def done(self) -> bool:
        return not self.standing and all(stage.steps == len(self.layers) for stage in self.stages)

    def layer(self, stage: _Stage) -> int:
        return self.layers[stage.steps % len(self.layers)]

    def wants(self, stage: _Stage) -> bool:
        """Whether the stage has a step that the caller may bring rows for."""
        return not stage.busy and (self.standing or stage.steps < len(self.layers))

    def late(self, stage: _Stage, now: float, patience: float) -> bool:
        """Whether the caller is; between the rounds of a standing pass it may rest."""
        resting = self.standing and stage.steps % len(self.layers) == 0
        return not resting and now - stage.since > patience


class DeviceLane(HandedLane):
    """A lane whose rows lie in host memory; each of its steps is begun as a call."""

    def __init__(self, memory: LaneMemory, terms: LaneTerms, begin: Begin) -> None:
        super().__init__(memory, terms)
        self.held = False  # whether no step may begin now
        self.step_ended: Callable[[], None] = lambda: None  # one has; from any thread
        self._begin = begin
        self._pass: _Pass | None = None
        self._lock = threading.Lock()

    @property
    def number(self) -> int:
        """Of the pass that runs; 0: none does."""
        run = self._pass
        return 0 if run is None else run.number

    @property
    def rings(self) -> bool:
        """Whether its caller says when there is something to look at; nobody does of a step that is to be
        tried again, nor of the end of one that was given up.
        """
        run = self._pass
        waits = run is None or (run.ends is None and all(one.refused == math.inf for one in run.stages))
        return waits and super().rings

    def pause(self, now: float) -> float:
        """Seconds for which its caller's words need not be looked at: while each stage has a step under way,
        they begin none.
        """
        run = self._pass
        if run is not None and run.ends is None and not any(map(run.wants, run.stages)):
            return math.inf
        return super().pause(now)

    @property
    def under_way(self) -> int:
        """Steps that were begun, and have not ended."""
        run = self._pass
        return 0 if run is None else sum(stage.busy for stage in run.stages)

    def hand_over(self) -> Handed | None:
        """Lets go of a pass that runs, which goes on elsewhere; None where a step of it is under way."""
        with self._lock:
            run = self._pass
            if run is not None and (run.ends is not None or any(stage.busy for stage in run.stages)):
                return None
            self._pass = None
        return self._last, None if run is None else run.between()

    def detach(self, why: str) -> None:
        """Ends the pass that runs, and begins no other. Steps under way are given up."""
        with self._lock:
            self.detached = self.detached or why
            run = self._pass
        if run is not None:
            self._end(run, Status.DETACHED, why)

    def yield_steps(self, company: Company) -> None:
        """Nothing waits for rows: steps begin when these are there."""

    def look(self, now: float) -> bool:
        """Does what the caller's words ask for; whether there was anything."""
        run = self._pass
        if run is None:
            return not self.detached and self._look_for_pass(now)
        with self._lock:  # a step that ends changes all that is looked at here
            ending = run.ends is not None
            ends = run.ends or self._over(run, now)
            there = [at for at, stage in enumerate(run.stages) if self._is_there(run, at, stage, now)]
            begun = [] if self.held or ends is not None else there
            for at in begun:
                run.stages[at].busy = True
        if ends is not None:
            self._end(run, *ends)
            return not ending
        self._start_all(run, begun)
        return bool(there)

    def _start_all(self, run: _Pass, begun: list[int]) -> None:
        """Starts the steps of stages that count as busy; those that could not be started do so no more."""
        for done, at in enumerate(begun):
            try:
                self._start(run, at)
            except BaseException:
                with self._lock:
                    for other in begun[done:]:
                        run.stages[other].busy = False
                raise

    def _over(self, run: _Pass, now: float) -> tuple[Status, str] | None:
        """How the caller, or too long a wait, ends a pass; None where it goes on. The lock is held."""
        if self._box[m.GIVEN_UP] == run.number:
            return Status.OK, ""
        for at, stage in enumerate(run.stages):
            if now - stage.refused > self._terms.answer:
                return Status.LOST, f"overloaded: no room for stage {at} within {self._terms.answer:g} s"
            if run.wants(stage) and run.late(stage, now, self._terms.patience) and not self._has_tag(run, at):
                key = f"passes.patience_seconds = {self._terms.patience:g}"
                text = f"late: stage {at} brought no rows of layer {run.layer(stage)} within {key}"
                return Status.LATE, text
        return None

    def _look_for_pass(self, now: float) -> bool:
        before, said = self._last, self._announced()
        if said is None:
            return before != self._last
        begun = Between(said, (0,) * said.stages, (now,) * said.stages, said.version)
        self._goes_on(begun)
        return True

    def _goes_on(self, between: Between) -> None:
        with self._lock:
            run = self._pass = _Pass.of(between)
        if self.detached:
            self._end(run, Status.DETACHED, self.detached)

    def _is_there(self, run: _Pass, at: int, stage: _Stage, now: float) -> bool:
        """Whether the rows of a stage's next step are there."""
        return run.wants(stage) and now >= stage.again and self._has_tag(run, at)

    def _has_tag(self, run: _Pass, at: int) -> bool:
        tag = self._box[self.memory.layout.header(at) + m.TAG]
        return bool(tag == tag_of(run.number, run.stages[at].steps))

    def _start(self, run: _Pass, at: int) -> None:
        fence()
        stage, layout = run.stages[at], self.memory.layout
        head = layout.header(at)
        _, layer, named, count, kind = self._box[head : head + 5]
        wanted = run.layer(stage)
        if (layer, named) != (wanted, at):
            text = f"a header names layer {layer} and stage {named}; layer {wanted} of stage {at} is next"
        elif count > layout.rows:
            text = f"{count} rows in a step; this lane was attached with {layout.rows} at most"
        elif kind not in (m.CHOICE, m.LOGITS):
            text = f"kind {kind} of a step is neither {m.CHOICE}, a choice, nor {m.LOGITS}, logits"
        else:
            self._run(run, at, self._request(at, (layer, count, kind), run.version))
            return
        with self._lock:
            stage.busy = False
            run.ends = run.ends or (Status.REFUSED, f"bad_step: {text}")
        self._conclude(run)

    def _run(self, run: _Pass, at: int, request: moe_pb2.ForwardRequest) -> None:
        stage = run.stages[at]
        call = self._begin(request, lambda reply: self._ended(run, at, reply))
        with self._lock:
            if stage.busy:
                stage.call = call
            over = stage.busy and run.ends is not None
        if over and call is not None:
            call.give_up()

    def _request(self, at: int, header: tuple[int, int, int], version: int) -> moe_pb2.ForwardRequest:
        layer, count, kind = header
        layout = self.memory.layout
        hidden, ids, weights, logits = layout.columns(at)
        hidden_spec = layout.hidden_spec(count)
        id_spec, weight_spec, logit_spec = layout.route_specs(count)
        request = moe_pb2.ForwardRequest(
            layer=layer, weights_version=version, timeout_ms=max(1, int(self._terms.answer * 1000))
        )
        self._place(request.hidden, hidden, hidden_spec)
        if kind == m.CHOICE:
            self._place(request.choice.ids, ids, id_spec)
            self._place(request.choice.weights, weights, weight_spec)
        else:
            self._place(request.logits, logits, logit_spec)
        out = request.output
        out.name, out.offset, out.size = self.memory.answers, layout.answer(at), hidden_spec.nbytes
        return request

    def _place(self, message: moe_pb2.Tensor, offset: int, spec: Spec) -> None:
        describe_into(message, spec)
        region = message.region
        region.name, region.offset, region.size = self.memory.mailbox, offset, spec.nbytes

    def _ended(self, run: _Pass, at: int, reply: moe_pb2.ForwardStreamReply) -> None:
        """Takes the end of a step, from any thread."""
        stage, failed = run.stages[at], None
        if reply.WhichOneof("outcome") == "error":
            failed = reply.error
        with self._lock:
            stage.busy, stage.call = False, None
            self.stirred_at = _now()
            if run.ends is None:
                self._count(run, at, reply.reply, failed)
        self._conclude(run)
        self.step_ended()

    def _count(self, run: _Pass, at: int, reply: moe_pb2.ForwardReply, failed: moe_pb2.Error | None) -> None:
        """Notes how a step of a pass that runs has ended; the lock is held."""
        stage = run.stages[at]
        if failed is None:
            self._answered(run, at, reply)
        elif failed.code == RESOURCE_EXHAUSTED:
            stage.again, stage.refused = _again(failed), min(stage.refused, _now())
        else:
            run.ends = _status(failed), f"{failed.reason}: {failed.message}"
        if run.done:
            run.ends = Status.OK, ""

    def _answered(self, run: _Pass, at: int, reply: moe_pb2.ForwardReply) -> None:
        """Tells the caller that its answer is there; the lock is held."""
        stage, head = run.stages[at], self.memory.layout.answer_header(at)
        self._out[head + m.EPOCH], self._out[head + m.VERSION] = reply.epoch, reply.weights_version
        if not run.any_weights:
            run.version = run.version or reply.weights_version
        tag = tag_of(run.number, stage.steps)
        stage.steps, stage.since, stage.refused = stage.steps + 1, _now(), math.inf
        self.counts.steps += 1
        fence()
        self._out_words.write(head + m.TAG, tag)

    def _end(self, run: _Pass, status: Status, text: str) -> None:
        """Ends a pass, unless it ends already."""
        with self._lock:
            run.ends = run.ends or (status, text)
        self._conclude(run)

    def _conclude(self, run: _Pass) -> None:
        """Gives up the steps of a pass that ends, and says how it ended when none of them can write an answer
        any more; `look` asks again until then.
        """
        with self._lock:
            if run.ends is None or run is not self._pass:
                return
            busy = [stage for stage in run.stages if stage.busy]
            calls = [stage.call for stage in busy if stage.call is not None]
            if not busy and (run.done or self.memory.quiet()):  # a step given up may be on a device still
                self._pass = None
                self._tell(run.number, *run.ends)
        for call in calls:
            call.give_up()


def _now() -> float:
    return time.monotonic()


def _again(failed: moe_pb2.Error) -> float:
    """When a step may be tried again that the lane had no room for."""
    told = failed.pushback_ms / 1000 if failed.HasField("pushback_ms") else SOON_SECONDS
    return _now() + told


def _status(failed: moe_pb2.Error) -> Status:
    """How a pass ends of which a step failed so."""
    if failed.reason == "wrong_version":
        return Status.OTHER_WEIGHTS
    return Status.REFUSED if (failed.code, failed.reason) in WRONG else Status.LOST
