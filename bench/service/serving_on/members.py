"""Members are killed and stopped under calls, one event after the other in one service."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator

from bench.service.faults.callers import Callers
from bench.service.faults.points import TELL_STACKS, every_process
from bench.service.faults.service import Service
from bench.service.serving_on.events import Event, Outcome, Setup, gaps
from bench.service.serving_on.pages import drop, in_memory
from bench.service.serving_on.raw import RawAnswer, RawCalls, failed_on_living
from bench.service.serving_on.run import EXPERTS, Run, covered, median_call, right_times, wait_whole

WAITS = "the group waits for ranks"  # what the head logs where the others cannot serve without them
CALM_SECONDS = 1.0  # of calls before an event, and after its end
BACK_SECONDS = 90.0
READY_SECONDS = 60.0  # for shadows, or replicas, to be there again
AFTER_SECONDS = 1.0  # in which bare callers learn where a lane is that has come back
STACKS_SECONDS = 1.0  # for ranks to write where they are
SETTLE_SECONDS = 20.0  # for processes that end to be gone


def members(run: Run, setup: Setup, todo: list[Event]) -> Iterator[Outcome]:
    """Has the events happen; a service that does not come back is followed by a fresh one."""
    todo = list(todo)
    while todo:
        with (
            run.service(setup) as service,
            run.callers(service) as callers,
            RawCalls(service.address, run.calls, run.args.raw_pause, run.args.ranks) as raw,
        ):
            processes = every_process(service.folder)
            while todo:
                outcome = happen(run, (setup, todo.pop(0)), (service, callers, raw), processes)
                yield outcome
                if "missing" in outcome.faults:
                    print(service.log()[-40000:])
                    break
            wrong = len(callers.wrong)
        for late in callers.wrong[wrong:]:
            print(f"after the last event: {late}")


def happen(
    run: Run, what: tuple[Setup, Event], parts: tuple[Service, Callers, RawCalls], processes: dict[int, str]
) -> Outcome:
    """Has one event happen, and waits until all members are back."""
    (setup, event), (service, callers, raw) = what, parts
    source, mark = wait_ready(run, setup, service, event), service.logged()
    callers.answers(0.0)
    raw_answers = raw.answers(0.0)
    before = callers.answers(CALM_SECONDS)
    victims = [service.living()[rank][0] for rank in event.ranks]
    alive = [pid for pids in service.living().values() for pid in pids]
    resident = drop(run.files, alive) if setup.cold else in_memory(run.files)
    at = strike(event, victims)
    missing = wait_whole(service, run.args.ranks, BACK_SECONDS, victims)
    if missing:
        tell_stacks(service)
    back = time.time()
    if WAITS in service.log(mark):  # two may have been lost where the slots stand the loss of one
        source = f"waits; of each alone: {source}"
    after = callers.answers(CALM_SECONDS)
    raw_answers += raw.answers(max(0.0, back + AFTER_SECONDS - time.time()))
    call, until = median_call(before), after[-1].ended if after else time.time()
    found = gaps(right_times(before + after), at, until)
    longest = max(found)
    where = found.index(longest)
    dead = dict.fromkeys(event.ranks, (at, back + AFTER_SECONDS))
    faults = {
        "wrong": [one.wrong for one in after if "relative error" in one.wrong],
        "failed": [one.wrong for one in after if one.wrong and "relative error" not in one.wrong],
        "twice": [f"{one.kind} at lane {one.seat}" for one in raw_answers if one.twice],
        "raw": failed_on_living(raw_answers, dead),
        "missing": [missing] if missing else [],
        "processes": collateral(service.log(mark), victims)
        + ([] if missing else leftover(service, setup, processes)),
    }
    return Outcome(
        *(setup, event),
        max(0.0, longest - call),
        max(0.0, max(found[where + 1 :], default=0.0) - call),
        *(back - at, call, source, resident),
        sum(not one.wrong for one in after) + rightly(raw_answers),
        {name: texts for name, texts in faults.items() if texts},
    )


def tell_stacks(service: Service) -> None:
    """Has the log say where each rank's threads are."""
    for pids in service.living().values():
        for pid in pids:
            os.kill(pid, TELL_STACKS)
    time.sleep(STACKS_SECONDS)


def rightly(answers: list[RawAnswer]) -> int:
    """How many of them were right."""
    return sum(not one.fault for one in answers)


def wait_ready(run: Run, setup: Setup, service: Service, event: Event) -> str:
    """Waits until shadows are there, or second replicas of all experts, and spares are warm, where the setup
    is to have them; says where the experts of the members are.
    """
    until, found = time.monotonic() + READY_SECONDS, covered(service, event.ranks)
    comes = run.args.wait_shadows and (setup.shadows or setup.redundant >= EXPERTS)
    while comes and "disk" in found and time.monotonic() < until:
        time.sleep(0.2)
        found = covered(service, event.ranks)
    while _warm(service.log()) < setup.spares:
        if time.monotonic() > until:
            raise SystemExit(f"{setup}: {setup.spares} spares are not warm within {READY_SECONDS:g} s")
        time.sleep(0.2)
    return found


def _warm(log: str) -> int:
    """How many spares are warm, by what a service has logged."""
    return log.count("a spare is warm") - log.count("starts in a spare")


def strike(event: Event, victims: list[int]) -> float:
    """Does what the event says; when it began."""
    at = time.time()
    for number, pid in enumerate(victims):
        if number:
            time.sleep(event.apart)
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself, which `collateral` finds
            os.kill(pid, signal.SIGSTOP if event.kind == "stop" else signal.SIGKILL)
    return at


def collateral(log: str, victims: list[int]) -> list[str]:
    """Members that ended though nothing was done to them."""
    ended = re.findall(r"(rank \d+) \(pid (\d+)\) (?:ended with (\S+);|has ended;)", log)
    return [f"{rank} (pid {pid}) ended too {how}" for rank, pid, how in ended if int(pid) not in victims]


def leftover(service: Service, setup: Setup, processes: dict[int, str]) -> list[str]:
    """Processes beyond as many as there were, by what they were started as; Ray's idle workers excepted."""
    until = time.monotonic() + SETTLE_SECONDS
    while True:
        now = every_process(service.folder)
        more = len(now) - len(processes)
        new = [f"{pid}: {now[pid][:120]}" for pid in now.keys() - processes.keys()]
        if setup.launcher == "ray":
            ours = [text for text in new if "ray::" in text and "ray::IDLE" not in text]
            more = len(ours) - sum("ray::" in t and "ray::IDLE" not in t for t in gone(processes, now))
            new = ours
        if more <= 0:
            return []
        if time.monotonic() > until:
            return [f"{more} more processes than before; new: {new}"]
        time.sleep(0.2)


def gone(before: dict[int, str], now: dict[int, str]) -> list[str]:
    """What those were started as that have ended."""
    return [text for pid, text in before.items() if pid not in now]
