"""`MemberSteps`: a member's steps, from the header of each to its callers' answers, and their counts."""

from __future__ import annotations

import time
from collections.abc import Callable

from moeserve.runtime.control.reached import Phase
from moeserve.runtime.control.stream import Message
from moeserve.runtime.epoch import Epoch
from moeserve.runtime.errors import WrongVersion
from moeserve.runtime.rank.answers import on_host
from moeserve.runtime.rank.lane import Lane
from moeserve.runtime.rank.rank import Rank
from moeserve.runtime.rank.reports import Counted, Reports
from moeserve.runtime.step import Header, Job, LaneInput, Stamp, StepRecord, empty_input

REPORT_SECONDS = 1.0  # between reports of load to the coordinator


class MemberSteps:
    """Runs steps of `rank` on the jobs of `lane`, None where it has none; the executing thread's alone."""

    def __init__(
        self,
        rank: Rank,
        lane: Lane | None,
        send: Callable[[Message], None],
        observe: Callable[[StepRecord], None],
    ) -> None:
        self._rank, self._lane, self._send, self._observe = rank, lane, send, observe
        self.steps = self.expert_rows = 0  # since the start
        self._reports = Reports(send)
        self._reported = 0  # steps in the last report
        self._reported_at = 0.0

    def run(self, header: Header, generation: int, epoch: Epoch | None) -> None:
        """Runs one step and answers its callers. Raises RuntimeError for a header of another epoch."""
        started = time.monotonic()
        version = self._version(header, epoch)
        jobs = [] if self._lane is None else [wanted_in(job, version) for job in self._lane.take(header.jobs)]
        served, top_k = self._rank.served, self._rank.plans[header.layer].problem.top_k
        rows = LaneInput.gather(header, jobs, empty_input(served.checkpoint.hidden, top_k, served.dtype))
        answer, phases = self._rank.step(header.layer, rows, header.lane_rows, header.number)
        answer, at = on_host(answer), 0
        late = self._rank.late(header.layer)
        self._rank.progress.enter(Phase.DONE)
        for (_, size), job in zip(header.jobs, jobs, strict=True):
            if job is not None:
                job.finish(answer[at : at + size], Stamp(header.epoch, version))
            at += size
        self.steps += 1
        self.expert_rows += max(0, phases.expert_rows)
        self._send({"kind": "done", "generation": generation, "step": header.number})
        if time.monotonic() - self._reported_at > REPORT_SECONDS:
            self.look_after(generation)
        wait = max((started - job.created for job in jobs if job is not None), default=0.0)
        self._observe(StepRecord(header.number, header.layer, len(jobs), at, wait, phases, late))

    def look_after(self, generation: int | None) -> None:
        """Fails jobs whose time is over, and has what was counted reported, when it changed.

        None: no generation is live, and nothing is reported.
        """
        if self._lane is not None:
            self._lane.expire(time.monotonic())
        if self.steps == self._reported or generation is None:
            return
        self._reported, self._reported_at = self.steps, time.monotonic()
        if (meter := self._rank.meter) is not None:
            load = meter.snapshot(time.monotonic())
            self._reports.put(Counted(generation, self.steps, self.expert_rows, load))

    def close(self) -> None:
        """Reports nothing any more."""
        self._reports.close()

    def _version(self, header: Header, epoch: Epoch | None) -> int:
        """The version of the weights that the step's layer is at here."""
        if epoch is None or epoch.number != header.epoch:
            found = "none" if epoch is None else str(epoch.number)
            raise RuntimeError(f"step {header.number} is of epoch {header.epoch}; this rank holds {found}")
        return epoch.version(self._rank.served.layers.index(header.layer))


def wanted_in(job: Job | None, version: int) -> Job | None:
    """The job, unless it demands other weights: then it fails, and its rows travel without experts."""
    if job is None or job.weights_version in (0, version):
        return job
    job.fail(
        WrongVersion(
            f"layer {job.layer} is served with weights version {version}, and {job.weights_version} is "
            "demanded; begin the pass again with the served one"
        )
    )
    return None
