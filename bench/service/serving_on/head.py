"""The head is killed under calls, again and again: clients wait, and members keep their experts."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field

from bench.lib.record import Result
from bench.service.faults.callers import Callers
from bench.service.faults.points import head_processes
from bench.service.faults.service import Service
from bench.service.serving_on.events import Setup, gaps
from bench.service.serving_on.run import Run, bytes_read, median_call, quantile, right_times, wait_whole

BACK_SECONDS, CALM_SECONDS = 60.0, 1.0
AIM_SECONDS = 5.0  # from the kill until answers come again


@dataclass
class Kill:
    """What became of a head that was killed."""

    seconds: float = 0.0  # until a right answer to a call that was made afterwards
    interruption: float = 0.0
    read: int = 0  # bytes that members read from the checkpoint meanwhile
    faults: list[str] = field(default_factory=list)


def heads(run: Run, setup: Setup) -> tuple[list[Result], list[str]]:
    """Kills the head `--kills` times in one service; the numbers, and what is not as it should be."""
    kills: list[Kill] = []
    with run.service(setup) as service, run.callers(service) as callers:
        callers.answers(CALM_SECONDS)
        while len(kills) < run.args.kills:
            kills.append(kill_head(run, service, callers))
            print(f"{setup}, kill {len(kills)} of the head: {kills[-1]}", flush=True)
            if kills[-1].faults:
                print(service.log()[-6000:])
                break
    seconds = [one.seconds for one in kills if not one.faults] or [BACK_SECONDS]
    faults = [fault for one in kills for fault in one.faults] + callers.wrong
    read = sum(one.read for one in kills)
    case = f"{setup.launcher}, {len(kills)} kills of the head"
    peers = {"p50": quantile(seconds, 0.5), "p95": quantile(seconds, 0.95), "right answers": callers.right}
    return [
        Result("serve_on", f"{case}: answers again, longest", max(seconds), "s", "lower", AIM_SECONDS, peers),
        Result("serve_on", f"{case}: bytes read again", read, "bytes", "lower", 0),
        Result("serve_on", f"{case}: calls failed or wrong", len(callers.wrong), "calls", "lower", 0),
    ], faults


def kill_head(run: Run, service: Service, callers: Callers) -> Kill:
    """Kills the head once, and waits until the service is whole."""
    callers.answers(0.0)
    before, read = callers.answers(CALM_SECONDS), bytes_read(service)
    victims, ranks = head_processes(service.folder), service.living()
    if len(victims) != 1:
        return Kill(faults=[f"there are heads {victims}, and there should be one"])
    at = time.time()
    os.kill(victims[0], signal.SIGKILL)
    answers, back = [], 0.0
    while not back and time.time() < at + BACK_SECONDS:
        answers += callers.answers(0.1)
        back = min((one.ended for one in answers if one.began > at and not one.wrong), default=0.0)
    missing = wait_whole(service, run.args.ranks, BACK_SECONDS)
    answers += callers.answers(CALM_SECONDS)
    if missing or not back:
        return Kill(faults=[missing or f"no answer within {BACK_SECONDS:g} s"])
    faults, now = [], service.living()
    if now != ranks:
        faults.append(f"members were {ranks}, and now they are {now}")
    if len(heads_now := head_processes(service.folder)) != 1:
        faults.append(f"there are heads {heads_now} afterwards")
    again = sum(count - read.get(pid, 0) for pid, count in bytes_read(service).items())
    if again:
        faults.append(f"members have read {again} bytes again")
    longest = max(gaps(right_times(before + answers), at, time.time()))
    return Kill(back - at, longest - median_call(before), again, faults)
