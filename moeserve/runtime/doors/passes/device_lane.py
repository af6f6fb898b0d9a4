"""`DeviceLane`: one attached caller's memory and the pass that runs on it.

The rank's one thread of passes looks at it (`look`). It copies a header before it checks it, and what it
gives on are places in regions, whose contents the door checks: the caller may write anything at any time.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from functools import partial

from moeserve.proto import moe_pb2
from moeserve.proto.passes import mailbox as m
from moeserve.proto.passes.mailbox import Status, fence, tag_of
from moeserve.proto.tensors import Spec, describe_into
from moeserve.runtime.doors.passes.announced import (
    Between,
    Handed,
    HandedLane,
    LaneMemory,
    LaneTerms,
)
from moeserve.runtime.doors.passes.host_pass import Call, HostPass
from moeserve.runtime.doors.passes.host_steps import HostStep, HostSteps, Outcome, Places
from moeserve.runtime.doors.passes.pauses import LONGEST_LOOK
from moeserve.runtime.doors.passes.turns import Company
from moeserve.runtime.step import Stamp

Begin = Callable[[moe_pb2.ForwardRequest, Callable[[moe_pb2.ForwardStreamReply], None]], Call | None]
"""Begins a step, whose reply the function gets, once, from any thread. None: it has ended already."""


Header = tuple[int, int, int, int]
"""What a step says of itself, once it is checked: layer, rows, kind, and its answer's buffer."""


class DeviceLane(HandedLane):
    """A lane whose rows lie in host memory; its steps are begun together with those of others for the layer,
    where `steps` takes such rows, and else each as a call.
    """

    def __init__(self, memory: LaneMemory, terms: LaneTerms, begin: Begin) -> None:
        super().__init__(memory, terms)
        self.held = False  # whether no step may begin now
        self.step_ended: Callable[[], None] = lambda: None  # one has; from any thread
        self.steps: HostSteps | None = None
        self.peer = ""  # who its caller is
        self._begin = begin
        # of a stage's last rows with their answer in a buffer: how many they are, and where both are, if they
        # are begun with others'
        self._places: dict[tuple[int, int], tuple[int, Places | None]] = {}
        stages = range(memory.layout.stages)
        self._heads = [memory.layout.header(stage) for stage in stages]
        self._answers = [memory.layout.answer_header(stage) for stage in stages]
        self._lent = 0  # steps for which the rank may touch its memory
        self._bell, self._looked = 0, -math.inf  # BELL at the last look, and when that was
        self._waits = False  # rows are there of a step that could not begin then
        self._tries = False  # a step is to be tried again, or a pass ends that was given up
        self._pass: HostPass | None = None
        self._lock = threading.Lock()

    @property
    def number(self) -> int:
        """Of the pass that runs; 0: none does."""
        run = self._pass
        return 0 if run is None else run.number

    @property
    def rings(self) -> bool:
        """Whether its caller says when there is something to look at."""
        return self._box[m.BELL] != 0 and not self._waits and not self._tries

    @property
    def unseen(self) -> bool:
        """Whether its caller may have said something that no look has seen."""
        return self._bell != self._box[m.BELL]

    @property
    def silent(self) -> bool:
        """Whether nothing is to be looked at before its caller rings."""
        bell = self._box[m.BELL]
        return bell != 0 and bell == self._bell and not self._waits and not self._tries

    def pause(self, now: float) -> float:
        """Seconds for which its caller's words need not be looked at: while each stage has a step under way,
        they begin none.
        """
        run = self._pass
        if run is None or run.ends is not None:
            return super().pause(now)
        for stage in run.stages:
            if not stage.busy and run.wants(stage) and self._open(run.layer(stage)):
                return super().pause(now)
        return math.inf

    def stirs(self, now: float) -> bool:
        """Whether there may be something to look at; of a caller that rings there is none until it does, but
        for what takes too long.
        """
        bell, waits = self._box[m.BELL], self._waits or self._tries
        if bell and bell == self._bell and not waits:
            if now < self._looked + LONGEST_LOOK:
                return False
            if (run := self._pass) is not None and all(stage.busy for stage in run.stages):
                return False
        self._bell, self._looked = bell, now
        return True

    def _open(self, layer: int) -> bool:
        """Whether a step of this layer may begin now."""
        return self.steps is None or self.steps.open(layer)

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
            self._pass, self._waits, self._tries = None, False, False
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
            found = not self.detached and self._look_for_pass(now)
            if found:
                self._bell = 0  # the caller may have rung once for the pass and the rows of its first step
            return found
        with self._lock:  # a step that ends changes all that is looked at here
            ending, there = run.ends is not None, self._there(run, now)
            ends = run.ends or self._over(run, now, there)
            begun = [] if self.held or ends is not None else there
            begun = [at for at in begun if self._open(run.layer(run.stages[at]))]
            self._waits = len(begun) < len(there)
            for at in there:
                stage = run.stages[at]
                stage.there = min(stage.there, now)
            for at in begun:
                run.stages[at].busy = True
        if ends is not None:
            self._end(run, *ends)
            return not ending
        self._start_all(run, begun)
        return bool(there)

    def _start_all(self, run: HostPass, begun: list[int]) -> None:
        """Starts the steps of stages that count as busy; those that could not be started do so no more."""
        for done, at in enumerate(begun):
            try:
                self._start(run, at)
            except BaseException:
                with self._lock:
                    for other in begun[done:]:
                        run.stages[other].busy = False
                raise

    def _over(self, run: HostPass, now: float, there: list[int]) -> tuple[Status, str] | None:
        """How the caller, or too long a wait, ends a pass; None where it goes on. there: stages whose rows
        are. The lock is held.
        """
        if self._box[m.GIVEN_UP] == run.number:
            return Status.OK, ""
        for at, stage in enumerate(run.stages):
            if now - stage.refused > self._terms.answer:
                return Status.LOST, f"overloaded: no room for stage {at} within {self._terms.answer:g} s"
            if stage.busy:
                continue
            if now - stage.there > self._terms.answer:
                layer, limit = run.layer(stage), f"{self._terms.answer:g} s"
                return Status.LOST, f"overloaded: no step of layer {layer} for stage {at} within {limit}"
            if at in there or not run.wants(stage):
                continue
            if run.late(stage, now, self._terms.patience) and not self._has_tag(run, at):
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
            run = self._pass = HostPass.of(between)
            self._tries = False
        if self.detached:
            self._end(run, Status.DETACHED, self.detached)

    def _there(self, run: HostPass, now: float) -> list[int]:
        """The stages whose next step's rows are there, and may be begun."""
        return [
            at
            for at, stage in enumerate(run.stages)
            if not stage.busy and now >= stage.again and self._has_tag(run, at) and run.wants(stage)
        ]

    def _has_tag(self, run: HostPass, at: int) -> bool:
        """Whether all rows of a stage's next step are there."""
        there = self._box[self._heads[at] + m.TAG] == tag_of(run.number, run.stages[at].steps)
        return there and self._filled(at)

    def _start(self, run: HostPass, at: int) -> None:
        fence()
        stage, layout, head = run.stages[at], self.memory.layout, self._heads[at]
        _, layer, named, count, kind, _, buffer = self._box[head : head + 7]
        wanted = run.layer(stage)
        if (layer, named) != (wanted, at):
            text = f"a header names layer {layer} and stage {named}; layer {wanted} of stage {at} is next"
        elif count > layout.rows:
            text = f"{count} rows in a step; this lane was attached with {layout.rows} at most"
        elif kind not in (m.CHOICE, m.LOGITS):
            text = f"kind {kind} of a step is neither {m.CHOICE}, a choice, nor {m.LOGITS}, logits"
        elif buffer >= layout.buffers:
            text = f"answer buffer {buffer} of a step; this lane was attached with {layout.buffers}"
        else:
            self._run(run, at, (layer, count, kind, buffer))
            return
        with self._lock:
            stage.busy, self._tries = False, True
            run.ends = run.ends or (Status.REFUSED, f"bad_step: {text}")
        self._conclude(run)

    def _run(self, run: HostPass, at: int, header: Header) -> None:
        stage = run.stages[at]
        call = self._begun_together(run, at, header)
        if call is None:
            request = self._request(at, header, run.version)
            call = self._begin(request, lambda reply: self._ended(run, at, _outcome(reply)))
        with self._lock:
            if stage.busy:
                stage.call = call
            over = stage.busy and run.ends is not None
        if over and call is not None:
            call.give_up()

    def _begun_together(self, run: HostPass, at: int, header: Header) -> Call | None:
        """A step that begins with others'; None for one that is to be a call."""
        layer, count, kind, buffer = header
        if self.steps is None or kind != m.CHOICE or not count:
            return None
        known = self._places.get((at, buffer))
        if known is None or known[0] != count:
            found = Places.of(self.memory.layout, self.memory.held, at, count, buffer)
            known = self._places[at, buffer] = count, found if self.steps.takes(found) else None
        if (places := known[1]) is None:
            return None
        with self._lock:
            self._lent += 1
        caller = self.peer, run.stages[at].there
        step = HostStep((layer, run.version), places, caller, partial(self._told, run, at), self._given_back)
        self.steps.add(step)
        return step

    def _given_back(self) -> None:
        with self._lock:
            self._lent -= 1

    def _request(self, at: int, header: Header, version: int) -> moe_pb2.ForwardRequest:
        layer, count, kind, buffer = header
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
        out.name, out.offset, out.size = self.memory.answers, layout.answer(at, buffer), hidden_spec.nbytes
        return request

    def _place(self, message: moe_pb2.Tensor, offset: int, spec: Spec) -> None:
        describe_into(message, spec)
        region = message.region
        region.name, region.offset, region.size = self.memory.mailbox, offset, spec.nbytes

    def _ended(self, run: HostPass, at: int, outcome: Outcome) -> None:
        """Takes the end of a step that was a call, from any thread."""
        self._told(run, at, outcome)
        self.step_ended()

    def _told(self, run: HostPass, at: int, outcome: Outcome) -> None:
        """Takes the end of a step, from any thread."""
        stage = run.stages[at]
        with self._lock:
            stage.busy, stage.call = False, None
            self.stirred_at = self._looked = now = _now()
            if run.ends is None:
                self._count(run, at, outcome, now)
            ends = run.ends is not None
            self._tries = ends or any(one.refused < math.inf for one in run.stages)
        if ends:
            self._conclude(run)

    def _count(self, run: HostPass, at: int, outcome: Outcome, now: float) -> None:
        """Notes how a step of a pass that runs has ended; the lock is held."""
        stage = run.stages[at]
        if isinstance(outcome, Stamp):
            self._answered(run, at, outcome, now)
        else:
            run.failed(stage, outcome, now)
        if run.done:
            run.ends = Status.OK, ""

    def _answered(self, run: HostPass, at: int, stamp: Stamp, now: float) -> None:
        """Tells the caller that its answer is there; the lock is held."""
        stage, head = run.stages[at], self._answers[at]
        self._out[head + m.EPOCH], self._out[head + m.VERSION] = stamp
        self._out[head + m.ANSWERED] = 0
        if not run.any_weights:
            run.version = run.version or stamp.weights_version
        tag = tag_of(run.number, stage.steps)
        stage.steps, stage.since, stage.refused = stage.steps + 1, now, math.inf
        stage.there = math.inf
        self.counts.steps += 1
        fence()
        self._out_words.write(head + m.TAG, tag)

    def _end(self, run: HostPass, status: Status, text: str) -> None:
        """Ends a pass, unless it ends already."""
        with self._lock:
            run.ends = run.ends or (status, text)
            self._tries = self._tries or run is self._pass
        self._conclude(run)

    def _conclude(self, run: HostPass) -> None:
        """Gives up the steps of a pass that ends, and says how it ended when none of them can write an answer
        any more; `look` asks again until then.
        """
        with self._lock:
            if run.ends is None or run is not self._pass:
                return
            busy = [stage for stage in run.stages if stage.busy]
            calls = [stage.call for stage in busy if stage.call is not None]
            if not busy and (run.done or self._quiet()):  # a step given up may be on a device still
                self._pass, self._bell, self._waits, self._tries = None, 0, False, False
                self._tell(run.number, *run.ends)
        for call in calls:
            call.give_up()

    def _quiet(self) -> bool:
        """Whether no step can write an answer any more."""
        return not self._lent and self.memory.quiet()


def _outcome(reply: moe_pb2.ForwardStreamReply) -> Outcome:
    """How a step ended that was a call."""
    if reply.WhichOneof("outcome") == "error":
        return reply.error
    return Stamp(reply.reply.epoch, reply.reply.weights_version)


def _now() -> float:
    return time.monotonic()
