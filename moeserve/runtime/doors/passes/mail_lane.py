"""`MailLane`: the lane of a caller's GPU. Rows and answers are on devices; its host only sees that they come.

Where the caller is alone, all steps of a forward pass are launched as soon as the rows of the first are
there; each then waits on the device for its own, and no host is between two of them. A caller whose forward
passes follow one another finds the next one launched before its rows are there, behind the one that runs.
Where others want the rank, or its group, too, a step is launched when its rows are there, so that nobody
waits for this caller's attention; where all of them have GPUs, and no group has to agree, it is launched
behind theirs in its turn, and left where their rows are there first (`Turns`). In a group of several a run
that has waited too long is left, and its steps come one by one; so is one launched before its rows.
"""

from __future__ import annotations

import time

from moeserve.dispatch.mail.kernels import ABORT, CHOICE, MISFIT, YIELD
from moeserve.dispatch.mail.layout import MailLayout
from moeserve.proto.passes import mailbox as m
from moeserve.proto.passes.mailbox import Status, fence, tag_of
from moeserve.runtime.doors.passes.announced import Between, Handed, LaneMemory, LaneTerms
from moeserve.runtime.doors.passes.mail_pass import MailPass, PassLane, UnderWay, told_end
from moeserve.runtime.doors.passes.pauses import Glances
from moeserve.runtime.doors.passes.turns import Company, Turns
from moeserve.runtime.rank.graphs import padded_rows
from moeserve.runtime.rank.runs.mail import Mail
from moeserve.runtime.rank.runs.member_runs import MemberRuns
from moeserve.runtime.rank.runs.runs import Run, Told

OTHER_GPUS = Company.BESIDE, Company.LANES
"""Company of others' GPUs alone."""

COMPANY_SECONDS = 0.0003
"""For the rows of a pass's other stages, before those that are there are launched alone."""


class MailLane(PassLane):
    """A lane of a caller's GPU."""

    ahead = True  # its steps are launched so

    def __init__(
        self, memory: LaneMemory, terms: LaneTerms, mail: tuple[MailLayout, Mail], runs: MemberRuns
    ) -> None:
        super().__init__(memory, terms)
        (self._layout, self._mail), self._runs = mail, runs
        self.turns = Turns()
        self.held = False  # whether no run may begin now
        self.for_calls = 0  # the pass whose next step no run takes: its caller's host brings logits
        self._usual: tuple[tuple[int, ...], int] | None = None  # layers and stages of a whole forward pass
        self._padded = 0  # rows of the last run of one
        self._glances = Glances(memory.layout)

    @property
    def number(self) -> int:
        """Of the pass that runs; 0: none does."""
        run = self._pass
        return 0 if run is None else run.said.number

    @property
    def rings(self) -> bool:
        """Never: also runs that end are to be looked at."""
        return False

    @property
    def soon(self) -> bool:
        """Whether a run is under way: this host is not told when the caller has its last answer."""
        run = self._pass
        return run is not None and run.flying > 0

    @property
    def nbytes(self) -> int:
        """Of the memory of both on their devices."""
        return self._layout.mailbox_bytes + self._layout.answers_bytes

    @property
    def wire(self) -> str:
        """In which its rows come; empty: as they are."""
        return self._layout.wire

    @property
    def rows(self) -> int:
        """The most of a step."""
        return self._layout.rows

    def detach(self, why: str) -> None:
        """Ends the pass that runs, and begins no other; waits on the device end at once."""
        self.detached = self.detached or why
        self._end(Status.DETACHED, why)

    def stirs(self, now: float) -> bool:
        """Whether there may be something to look at. To look takes the interpreter from who launches."""
        run = self._pass
        if self._glances.stirs(self._box, () if run is None else (self.turns.count, self.company()), now):
            return True
        if run is not None and run.may_rest(now) and run.flying:
            self.stirred_at = now
        return False

    def look(self, now: float) -> bool:
        """Does what the caller's words ask for; whether there was anything."""
        under_way = self._pass
        if under_way is None:
            return not self.detached and self._look_for_pass(now)
        if self._box[m.GIVEN_UP] == under_way.said.number:
            self._end(Status.OK, "")
        if under_way.waits and under_way.flying and now - under_way.waited > self._runs.most_seconds:
            under_way.slow = True
            self.yield_steps()
        self._look_for_early(under_way, now)
        with self._lock:
            held = self.held or self._runs.makes_room  # others see that it wants steps, and wait for nobody
            run = None if self._concluded() or held else self._next_run(under_way, now)
            demanded = under_way.demanded
            self._concluded()  # the caller may be late
        if run is None:
            waits, there = held or under_way.said.number == self.for_calls, bool(self._there(under_way))
            if there:  # other stages' rows may follow, or it has to wait
                self._glances.again = True
            return waits and there
        self._runs.begin(run, self, demanded)
        return True

    def yield_steps(self, company: Company = Company.CALLS) -> None:
        """Others want steps: runs that wait for this caller's rows are left, and steps come one by one. Where
        others take turns, what waits in its turn is left by `leave_turn` alone. Beside others on the other
        track only what leaves them no room is left.
        """
        with self._lock:
            run = self._pass
            if run is None or (company is Company.BESIDE and run.all_beside):
                return
            if run.waits or (run.waiting_turn and company is Company.CALLS):
                self._leave(run)

    def leave_turn(self) -> None:
        """Others' rows are there, and this caller's, whose turn it is, are not."""
        with self._lock:
            if (run := self._pass) is not None:
                self._leave(run)

    def _leave(self, run: MailPass) -> None:
        """What waits on the device waits no more; what has its rows there is computed. The lock is held."""
        if run.ends is None and not self._mail.lane.abort[0]:
            self._mail.say(YIELD)

    @property
    def interrupted(self) -> bool:
        """Whether the group has ended since its pass began."""
        return self._mail.interrupted

    def _look_for_pass(self, now: float) -> bool:
        before, said = self._last, self._announced()
        if said is None:
            return before != self._last
        self._goes_on(Between(said, (0,) * said.stages, (now,), said.version))
        return True

    def _goes_on(self, between: Between) -> None:
        self._mail.interrupted = False
        self._mail.lane.abort[0] = 0
        self._pass = MailPass.of(between)
        if self.detached:
            self._end(Status.DETACHED, self.detached)

    def hand_over(self) -> Handed | None:
        """Lets go of a pass, which goes on elsewhere; None where a run of it is under way."""
        with self._lock:
            run = self._pass
            if run is not None and (run.ends is not None or run.flying):
                return None
            self._pass = None
        return self._last, None if run is None else run.between()

    def _next_run(self, run: MailPass, now: float) -> Run | None:
        """What is to be launched now; the lock is held. It counts as launched."""
        if not run.flying:
            run.waits = False
        if run.told is not None:
            if run.flying:
                return None
            run.misfits = run.misfits + 1 if list(run.told) == run.fitted else 0
            run.fitted = list(run.told)
            run.sent, run.told, run.again = list(run.told), None, True
            if self._mail.lane.abort[0] == YIELD:
                run.misfits = 0
        if not run.flying and self._mail.lane.abort[0] == YIELD:
            self._mail.say(0)
        there = self._there(run)
        if max(run.sent) - min(run.sent) > len(run.said.layers):  # one might wait as long as others come
            there.sort(key=run.sent.__getitem__)
        if there and not run.flying:  # who else is on its track depends on its rows
            self.short = self._runs.short(self._rows_of(run, max(self._header(stage)[0] for stage in there)))
        company = self.company()
        if run.full(company):
            return None
        alone = company is Company.NONE or (company is Company.BESIDE and run.resting)
        if there and run.resting and run.begun:
            run.steady = bool(run.flying) or now - run.answered < self._terms.ahead
        foreseen = alone and self._foreseen(run, there)
        if not there and not foreseen:
            if company in OTHER_GPUS and (made := self._in_turn(run, company)) is not None:
                stage = made.steps[0][1]
                return self._begins(run, made, now, {stage: run.sent[stage]}, in_turn=True)
            run.look_for_late(now, self._terms.patience)
            return None
        within = run.cut and run.whole <= self._runs.most_steps  # a longer one has no graph to go on with
        few = alone and run.alike and not within and len(there) < len(run.sent)
        if few and not foreseen and now - run.since < COMPANY_SECONDS:
            return None
        fence()
        headers = [self._header(stage) for stage in (range(len(run.sent)) if foreseen else there)]
        kinds = {kind for _, kind in headers}
        if self._layout.in_host_memory and kinds != {CHOICE}:
            self.for_calls = run.said.number  # a call's logits are routed by the host, with other last bits
            return None
        counts = [min(count, self._layout.rows) for count, _ in headers]
        if run.misfits > 1:  # what is told to this host is not what comes to the device
            run.ends = Status.REFUSED, "bad_step: a header's rows are not those of its step"
            return None
        rows = self._rows_of(run, max(counts))
        begins, kind = 0 if run.begun else run.said.number, headers[0][1]
        least = 0 if there else padded_rows(counts[0]) // 2 + 1
        short = self._runs.short(rows)
        if short is not self.short:  # others' rows than its next ones have just come, or steps are under way
            return None
        how = short, self._beside(company), company in OTHER_GPUS
        made = Run(self._mail.lane, run.ahead(), rows, kind, begins, run.again, least, run.before, *how)
        if not there and self._runs.alone and not self._runs.recorded(made):
            return None  # of the one before, which has no graph either, the first steps alone are launched
        run.slow = run.slow and not run.resting
        early: dict[int, int] | None = None
        together = run.alike and (len(there) == len(run.sent) or foreseen) and len(kinds) == 1
        together = together and alone and not run.slow and (not within or self._runs.recorded(made))
        if together and self._runs.leads(made):
            run.waits, self._padded = True, rows
            if len(there) < len(run.sent):
                early = dict(enumerate(run.sent))
        elif not there:
            return None
        elif not self._filled(there[0]):  # nobody else waits while its caller copies
            run.look_for_late(now, self._terms.patience)
            return None
        else:
            made = made._replace(steps=((run.layer(there[0]), there[0]),))
            run.missed = max(0, run.missed - 1)
        return self._begins(run, made, now, early)

    def _beside(self, company: Company) -> bool:
        """Whether a run has to leave the other track what that needs."""
        return company is Company.BESIDE or self.turns.apart(short=self.short)

    def _rows_of(self, run: MailPass, count: int) -> int:
        """Room for the rows of a step, of which its caller says that there are so many."""
        most = self._layout.rows if run.misfits else min(count, self._layout.rows)
        return min(padded_rows(most), self._runs.most_rows)

    def _begins(
        self, run: MailPass, made: Run, now: float, early: dict[int, int] | None, *, in_turn: bool = False
    ) -> Run:
        """Counts a run as launched."""
        run.waited = run.waited if run.flying else now
        for _, stage in made.steps:
            run.sent[stage] += 1
        run.begun, run.again, run.since = True, False, now
        if len(made.steps) == 1 and run.alike and run.cut:  # its stages go on together: so may the next pass
            self._padded = self._rows_of(run, max(self._header(stage)[0] for stage in range(len(run.sent))))
        turn = self.turns.launched(self, short=made.short)
        run.under_way.append(UnderWay(turn, early, in_turn, made.beside))
        return made

    def _in_turn(self, run: MailPass, company: Company) -> Run | None:
        """The next step of a forward pass, to be launched before its rows are there and with as many as its
        stage had last; None where it is not this lane's turn, or others might wait for long.
        """
        runs = self._runs
        if not run.takes_turns or self._mail.lane.abort[0] or not self.turns.follows(self, short=self.short):
            return None
        under_way = [at for at, steps in enumerate(run.sent) if steps % len(run.said.layers)]
        if not under_way or not self._terms.ahead or not runs.alone or runs.retired:
            return None  # between two forward passes its caller may rest
        stage = min(under_way, key=run.sent.__getitem__)
        count, kind = self._header(stage)
        padded = padded_rows(min(count, self._layout.rows))
        rows, step = min(padded, runs.most_rows), (run.layer(stage), stage)
        if runs.short(rows) is not self.short:
            return None
        how = padded // 2 + 1, (), self.short, self._beside(company), True
        made = Run(self._mail.lane, (step,), rows, kind, 0, run.again, *how)
        return made if runs.recorded(made) else None

    def _foreseen(self, run: MailPass, there: list[int]) -> bool:
        """Whether a forward pass is launched before the rows of all its stages are there, with as many as the
        last one had, of this pass or of one like it, of which the first stage has the most. Not while a
        lane's memory is to be freed.
        """
        between = run.alike and run.resting and not run.awaited
        if there:
            known = run.steady or (not run.begun and self._usual == (run.said.layers, run.said.stages))
            expected = known and 0 in there
        else:
            whole = len(run.ahead()) <= self._runs.most_steps  # the one that runs, too
            expected = run.steady and run.said.standing and run.flying == 1 and whole
        if expected:  # a step is computed for as many rows as a call's is
            count = min(self._header(0)[0], self._layout.rows)
            expected = min(padded_rows(count), self._runs.most_rows) == self._padded
            most = max(self._header(stage)[0] for stage in range(len(run.sent)))
            expected &= self._runs.short(self._rows_of(run, most)) is self.short  # a later stage had more
        return between and expected and self._terms.ahead > 0 and not self._runs.retired

    def _look_for_early(self, run: MailPass, now: float) -> None:
        """Notes that the rows of runs have come that were launched before, or leaves these: their caller
        rests.
        """
        number, head, box = run.said.number, self.memory.layout.header, self._box
        for one in (awaited := run.awaited):
            early = one.early or {}
            there = [box[head(stage) + m.TAG] >= tag_of(number, at) for stage, at in early.items()]
            if all(there):
                with self._lock:
                    one.early = None
                    if not run.waits and self._mail.lane.abort[0] == YIELD:
                        self._mail.say(0)  # it was left as they came
                continue
            if run.flying == len(awaited) and now - run.waited > self._terms.ahead:
                if one.in_turn:
                    self.leave_turn()
                    return
                run.steady, one.early = False, None
                self._usual = None if any(there) else self._usual  # a stage does not come
                self.yield_steps()
            return

    # -- as a Pass of the runs ------------------------------------------------------------------------------

    def ran(self, told: Told, version: int) -> None:
        """A run has ended."""
        with self._lock:
            run = self._pass
            assert run is not None
            self._glances.again = True
            run.since = run.waited = now = time.monotonic()  # before the counts: a look may come in between
            run.ran(misfit=told.ended == MISFIT)
            run.answered = now if told.answered else run.answered
            self.counts.steps += told.answered
            run.version = run.version or version
            stages = len(run.sent)
            done = set(told.steps[:stages])
            if not told.ended and len(done) == 1 and done.pop() % len(run.said.layers) == 0:
                self._usual = run.said.layers, run.said.stages
            if told.ended == MISFIT or (not run.flying and told.steps[:stages] != tuple(run.sent)):
                run.told = told.steps[:stages]
            if told.ended not in (0, MISFIT):
                run.ends = run.ends or told_end(told, self._terms.patience)
            elif run.done and not run.flying and run.told is None:
                run.ends = run.ends or (Status.OK, "")
            self._concluded()

    def lost(self, why: str) -> None:
        """A run could not be launched, or failed."""
        self._failed(Status.LOST, f"lost: {why}")

    def other_weights(self, version: int) -> None:
        """A run was not launched, since its layers have other weights than the pass."""
        with self._lock:
            had = 0 if self._pass is None else self._pass.demanded
        text = f"wrong_version: the layer has weights version {version}, and this pass {had}"
        self._failed(Status.OTHER_WEIGHTS, text)

    def _failed(self, status: Status, text: str) -> None:
        with self._lock:
            run = self._pass
            assert run is not None
            run.under_way.pop()
            run.ends = run.ends or (status, text)
            self._mail.lane.abort[0] = ABORT  # what was launched before has no use
            self._concluded()

    def _end(self, status: Status, text: str) -> None:
        """Ends the pass that runs, if any; its kernels wait no more."""
        with self._lock:
            if self._pass is not None:
                self._pass.ends = self._pass.ends or (status, text)
                self._mail.lane.abort[0] = ABORT
                self._concluded()

    def _concluded(self) -> bool:
        """Whether the pass is over; it is told how once no run can write an answer. The lock is held."""
        run = self._pass
        if run is None or run.ends is None:
            return run is None
        if not run.flying:
            self._pass = None
            self._tell(run.said.number, *run.ends)
        return True

    def close(self) -> None:
        """Lets go of its memory; no pass runs any more."""
        if not self._layout.in_host_memory:  # else the device may touch it until it is detached
            super().close()
        self._runs.detach(self._mail)
