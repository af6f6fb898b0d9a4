"""`Lane`: a member's jobs between its doors and its step thread."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence

from moeserve.runtime.errors import (
    BatchTooLarge,
    DeadlinePassed,
    GroupUnavailable,
    LaneFull,
    pushback,
)
from moeserve.runtime.rank.lanes.lane_call import LaneBatch, LaneCall
from moeserve.runtime.rank.lanes.together import Together
from moeserve.runtime.rank.transfers.transfers import Transfers
from moeserve.runtime.step import Announcement, Job, Upload

log = logging.getLogger(__name__)

LOOK_SECONDS, IDLE_LOOKS = 0.1, 50
"""Between looks for deadlines that have passed, and after how many without a job no more are made."""


class Lane:
    """Jobs of one lane. Doors submit; the step thread takes what a header names and finishes it.

    A job stays here until it ends or its caller leaves. A header may name a job that is gone: its rows still
    travel, as rows without experts. Where the group comes together again the lane is held: it keeps the jobs
    that have no answer and takes more, and announces all of them to the next generation.
    """

    def __init__(self, number: int, capacity: int, queue_limit: int) -> None:
        self.number = number  # among the group's lanes
        self.capacity = capacity
        self.announce: Callable[[Announcement], None] = _nobody
        self.withdraw: Callable[[list[int]], None] = lambda jobs: None  # of callers who have left
        self.transfers: Transfers | None = None  # to and from the device; None: jobs stay on the host
        self.retire: Callable[[Upload], None] = _let_go  # of a job that ended without a step
        self.hold_seconds = 30.0  # at most, while the group comes together again (`members.hold_seconds`)
        self._queue_limit = queue_limit
        self._jobs: dict[int, Job] = {}
        self._callers = 0  # of these jobs
        self._looks = False  # whether a thread looks for deadlines
        self._numbers = itertools.count(1)
        self._refusals = 0  # since a call was last taken
        self._lock = threading.Lock()
        self._generation: int | None = None  # that jobs are announced to; None: none serves now
        self._held = 0  # counts how often it was held or no more
        self._waits = ""  # why the group comes together again, while it is held
        self._unserved_since: float | None = None  # while it is held, and until a step takes jobs again
        self._unwhole: dict[int, float] = {}  # layers that no step takes yet -> since when
        self._closed: str | None = "the group is forming"
        self._draining: str | None = None  # why it never takes another job, whatever the group does

    @property
    def in_flight(self) -> int:
        """How many callers' rows the lane holds now; those of a call count as often as it has parts."""
        return self._callers

    @property
    def calls(self) -> int:
        """How many calls it holds now, each once. For who asks seldom: it looks at all jobs."""
        with self._lock:
            jobs = list(self._jobs.values())
        alone = {job.ended for job in jobs if job.several is None}  # parts of one call tell the same call
        return len(alone) + sum(job.callers for job in jobs if job.several is not None)

    @property
    def drained(self) -> bool:
        """Whether it takes no other job until `drain` says that it does."""
        return self._draining is not None

    @property
    def closed(self) -> str | None:
        """Why no job is taken now, or None."""
        return self._closed

    @property
    def why_not(self) -> str:
        """Why no step takes jobs now, though it may keep them; empty while the group serves."""
        return self._closed or self._waits

    @property
    def room(self) -> int:
        """Of how many callers more it takes rows now; as many as it ever holds where it takes none."""
        return max(0, self._queue_limit - self._callers) or self._queue_limit

    @property
    def most_rows(self) -> int:
        """The rows that one call may have."""
        return self._queue_limit * self.capacity

    def unavailable(self) -> GroupUnavailable:
        """The failure that a call gets now."""
        return GroupUnavailable(self._closed or "the group is forming")

    def open(self, generation: int = 0) -> None:
        """Takes jobs from now on, unless it was drained: the group serves. Announces those that were held."""
        with self._lock:
            self._closed, self._generation = self._draining, generation
            self._waits = ""
            self._held += 1
            self._unwhole = {}
            held = list(self._jobs.values())
        for job in held:
            if job.upload is not None and job.upload.claimed:
                job.upload = None  # by a step that gave no answer; the rows are still the caller's
            if not job.over:
                self._announce(job, generation)

    def hold(self, reason: str) -> None:
        """Keeps the jobs that have no answer, and takes more if it did, until the group serves again. After
        `hold_seconds` it is closed instead, at once where they are 0. They count from the first time that it
        was held since a step took jobs: a group that comes together again and again serves nobody.
        """
        if self.hold_seconds <= 0:
            self.close(reason)
            return
        with self._lock:
            self._generation, self._waits = None, reason
            self._held += 1
            turn = self._held
            since = self._unserved_since
            if since is None or not self._jobs:
                since = self._unserved_since = time.monotonic()
            nothing = self._closed is not None and not self._jobs
        if not nothing:
            until = since + self.hold_seconds
            threading.Thread(
                target=self._keep, args=(turn, until, reason), name="held-lane", daemon=True
            ).start()

    def _keep(self, turn: int, until: float, reason: str) -> None:
        """Fails all jobs once it lasts too long that the lane is held."""
        while self._held == turn:
            if time.monotonic() >= until:
                limit = f"members.hold_seconds = {self.hold_seconds:g}"
                self._close_held(turn, f"{reason}; the group is not back within {limit}")
                return
            time.sleep(min(LOOK_SECONDS, max(0.0, until - time.monotonic())))

    def _close_held(self, turn: int, reason: str) -> None:
        with self._lock:
            if self._held != turn:
                return
            failed = self._shut(reason)
        for job in failed:
            job.fail(GroupUnavailable(reason))

    def drain(self, reason: str) -> None:
        """Takes no further job, and goes on with those it holds: the service is about to stop. Without a
        reason it takes jobs again.
        """
        with self._lock:
            if self._closed == self._draining:
                self._closed = None
            self._draining = reason or None
            self._closed = self._closed or self._draining

    def close(self, reason: str) -> None:
        """Fails waiting jobs, and new ones, with GroupUnavailable: the group stopped serving."""
        with self._lock:
            failed = self._shut(reason)
        for job in failed:
            job.fail(GroupUnavailable(reason))

    def _shut(self, reason: str) -> list[Job]:
        """Takes no job from now on; returns those that it held. The caller holds the lock."""
        self._closed, self._generation = reason, None
        self._held += 1
        jobs, self._jobs, self._callers = list(self._jobs.values()), {}, 0
        return jobs

    def submit(self, batch: LaneBatch, ended: Callable[[LaneCall], None] = lambda call: None) -> LaneCall:
        """Starts a batch of at least one row; one over the lane's capacity is split and answered whole.

        `ended` is called once, by the thread that ends the call, and never where this raises: a call that
        ended while it could not be started is returned. Raises GroupUnavailable, LaneFull, or BatchTooLarge
        for a batch that the lane could not take even while it holds no other.
        """
        rows = batch.hidden.shape[0]
        if rows > self.most_rows:
            raise BatchTooLarge(
                f"hidden: {rows} rows in one call, and lane {self.number} takes {self._queue_limit} x "
                f"{self.capacity} at most; send them in several calls"
            )

        def leave(done: LaneCall) -> None:
            self._forget(done)
            self._retire(done.jobs)
            ended(done)

        call = LaneCall(leave)
        call.home = None if batch.lent is None else batch.lent.home
        call.expect([self._job(batch, part, call) for part in batch.parts(self.capacity)])
        generation = self._take_in(call.jobs)
        try:
            self._upload(call.jobs)
            if call.ended:  # meanwhile, and its end saw no upload
                self._retire(call.jobs)
            if generation is not None:
                for job in call.jobs:
                    self._announce(job, generation)  # where the lane is held by now, that does not count
        except BaseException as error:
            revoked = call.revoke()
            self._forget(call)
            self._retire(call.jobs)
            if revoked or not isinstance(error, Exception):
                raise
            log.info(
                "lane %d: a call ended (%s) while it could not be started: %s",
                *(self.number, call.error, error),
            )
        return call

    def submit_together(
        self, together: Together, what: tuple[int, int], deadline: float, reached: tuple[bool, bool]
    ) -> None:
        """Starts rows of several callers as one job, of at most the capacity; as `Together.job` has it.

        Raises GroupUnavailable and LaneFull, and then tells nobody. What fails later ends the job.
        """
        job = together.job(next(self._numbers), what, deadline, reached)
        generation = self._take_in([job])
        try:
            self._upload([job])
            if job.over:  # meanwhile, and its end saw no upload
                self.forget(job)
            elif generation is not None:
                self._announce(job, generation)
        except Exception as error:
            log.info("lane %d: a job could not be started: %s", self.number, error)
            job.fail(error)

    def forget(self, job: Job) -> None:
        """Holds a job no more that was started together with others and has ended."""
        held = self._drop([job])
        self._retire([job])
        if held and job.output is None:  # a step that has it, if any, is done with it
            self.withdraw([job.number])

    def _take_in(self, jobs: Sequence[Job]) -> int | None:
        """Holds jobs of one call, none where it has no rows, or one of several; the generation to which they
        are to be announced. Raises GroupUnavailable, LaneFull.
        """
        with self._lock:
            if self._closed is not None:
                raise GroupUnavailable(self._closed)
            callers = sum(job.callers for job in jobs)
            # of a call in parts one has to find room: all at once find none while others come and go
            if self._callers + sum(job.callers for job in jobs[:1]) > self._queue_limit:
                text = (
                    f"lane {self.number} has {self._callers} parts of calls under way, and "
                    f"server.max_concurrent_calls is {self._queue_limit}; a call has one for every "
                    f"{self.capacity} rows (step.lane_rows)"
                )
                self._refusals += 1
                raise LaneFull(text, pushback(self._refusals))
            self._refusals = 0
            if not self._jobs and self._generation is not None:
                self._unserved_since = None  # nobody has waited since the group serves again
            if not self._looks:  # first: the process may have no further thread
                threading.Thread(target=self._look, name="lane-deadlines", daemon=True).start()
                self._looks = True
            self._jobs.update({job.number: job for job in jobs})
            self._callers += callers
            return self._generation

    def _announce(self, job: Job, generation: int) -> None:
        rows = job.hidden.shape[0]
        gathered = job.several is not None and job.several.gathered
        self.announce(
            Announcement(self.number, job.number, job.layer, rows, job.deadline, generation, gathered)
        )

    def _upload(self, jobs: Sequence[Job]) -> None:
        """Begins to bring large rows to the device, before anybody waits for them."""
        if self.transfers is not None:
            for job in jobs:
                job.upload = self.transfers.upload(job)

    def _retire(self, jobs: Sequence[Job]) -> None:
        """Lets go of what was uploaded for jobs that no step has taken."""
        for job in jobs:
            if job.upload is not None and job.upload.claim():
                self.retire(job.upload)

    def _job(self, batch: LaneBatch, part: slice, call: LaneCall) -> Job:
        columns, lent, routed = (batch.hidden, batch.experts, batch.weights), batch.lent, batch.routed
        if part.stop - part.start < batch.hidden.shape[0]:
            columns = tuple(column[part] for column in columns)  # type: ignore[assignment]
            lent = None if lent is None else lent.part(part)
            routed = None if routed is None else routed._replace(logits=routed.logits[part])
        return Job(
            next(self._numbers),
            batch.layer,
            *columns,
            batch.deadline,
            call.part_ended,
            batch.weights_version,
            lent,
            routed=routed,
        )

    def cancel(self, call: LaneCall) -> None:
        """Forgets a call whose caller has left: its jobs that are in no step yet are withdrawn."""
        self._forget(call)

    def take(self, named: tuple[tuple[int, int], ...]) -> list[Job | None]:
        """The jobs of a header, in its order; None for one that is gone.

        What was uploaded of them is the step's from now on.
        """
        with self._lock:
            self._unserved_since = None
            jobs = [self._jobs.get(number) for number, _ in named]
        return [None if job is None or not _claimed(job) else job for job in jobs]

    def wait_for_layers(self, layers: Collection[int]) -> None:
        """Jobs of these layers (decoder indices) wait, as members still read experts of them: for at most
        `hold_seconds`. Those of all others do not, or no more.
        """
        with self._lock:
            now = time.monotonic()
            self._unwhole = {layer: self._unwhole.get(layer, now) for layer in layers}

    def _look(self) -> None:
        """Looks for deadlines that have passed, until for a while there are no jobs; by a thread of its own:
        the one that runs steps may be in one that does not end.
        """
        idle = 0
        while True:
            time.sleep(LOOK_SECONDS)
            idle = 0 if self._jobs else idle + 1
            if not idle:
                self.expire(time.monotonic())
            elif idle >= IDLE_LOOKS:
                with self._lock:
                    self._looks = bool(self._jobs)
                    if not self._looks:
                        return

    def expire(self, now: float) -> None:
        """Fails jobs whose deadline passed; the sequencer drops such jobs without a word. And those that have
        waited for too long for their layer to be whole.
        """
        with self._lock:
            late = [job for job in self._jobs.values() if job.deadline < now]
            since = self._unwhole
            waiting = [job for job in self._jobs.values() if job.layer in since and job not in late]
        for job in late:
            job.fail(DeadlinePassed(f"layer {job.layer}: no answer within the deadline"))
        for job in waiting:
            if now - max(job.created, since[job.layer]) > self.hold_seconds:
                limit = f"members.hold_seconds = {self.hold_seconds:g}"
                job.fail(
                    GroupUnavailable(f"layer {job.layer} is being restored, and not whole within {limit}")
                )

    def _forget(self, call: LaneCall) -> None:
        """Holds a call's jobs no more; withdraws those without an answer."""
        if left := [job.number for job in self._drop(call.jobs) if not job.over]:
            self.withdraw(left)

    def _drop(self, jobs: Sequence[Job]) -> list[Job]:
        """Holds jobs no more; those that it held."""
        with self._lock:
            held = [job for job in jobs if self._jobs.pop(job.number, None) is not None]
            self._callers -= sum(job.callers for job in held)
        return held


def _claimed(job: Job) -> bool:
    """Whether the step that takes `job` has what was uploaded of it; the job has ended where not."""
    return job.upload is None or job.upload.claim()


def _let_go(upload: Upload) -> None:
    upload.event.synchronize()
    upload.release()


def _nobody(job: Announcement) -> None:
    raise GroupUnavailable("the rank is not connected to its coordinator")
