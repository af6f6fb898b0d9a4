"""Members are killed and stopped under calls or under passes, and what their callers saw of it."""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from bench.service.faults.points import every_process
from bench.service.serving_on.events import Setup as HowStarted
from bench.service.serving_on.events import gaps
from bench.service.serving_on.gpu.asking import PAUSE, Answer, Asking, Order
from bench.service.serving_on.gpu.service import GpuService, Setup
from bench.service.serving_on.gpu.timeline import End, Line, lines_of, moments, shown
from bench.service.serving_on.gpu.told import Told
from bench.service.serving_on.members import collateral, leftover
from bench.service.serving_on.raw import RawAnswer, failed_on_living
from bench.service.serving_on.run import covered, whole

SETTLE_SECONDS, CALM_SECONDS = 0.3, 1.0  # of calls before an event that do not count, and that do
BACK_SECONDS, LOOK_SECONDS = 90.0, 0.1
READY_SECONDS = 60.0  # for shadows to be there
AFTER_SECONDS = 1.0  # in which bare callers learn where a lane is that has come back
FAULTS = ("wrong", "failed", "raw", "missing", "processes")
"""Answers that are wrong, calls that failed with default patience, bare calls that failed on lanes whose
process lived, why the members are not all back, and processes that should not be there.
"""


@dataclass(frozen=True)
class Event:
    """What happens to whom."""

    kind: str  # kill, stop
    rank: int
    whom: str = ""  # in the case's name, where cases are told apart by it

    def __str__(self) -> str:
        return f"{self.kind} of rank {self.rank}{', ' if self.whom else ''}{self.whom}"


@dataclass(frozen=True)
class Seen:
    """What one caller saw, in seconds from the event on."""

    interruption: float  # the longest gap between right answers, less the median call
    losing: float  # the longest of the gaps until a member was to join again, likewise
    returning: float  # the longest of those later
    first: float  # until the first of the right answers after the longest gap
    all_layers: float | None  # until each had answered a call that was made after the event; None: not all
    call: float  # the median call before
    right: int
    other_bits: int
    ended: dict[str, int]  # errors by their words, and how often


@dataclass
class Outcome:
    """What became of one event."""

    seen: dict[str, Seen] = field(default_factory=dict)  # by caller
    whole: float = 0.0  # until all members served again
    source: str = ""  # where the lost experts were, by layers
    faults: dict[str, list[str]] = field(default_factory=dict)


class Scene(NamedTuple):
    """A service, and who asks it, by name; to which lane is an event's."""

    setup: Setup
    service: GpuService
    callers: Mapping[str, Asking]
    raw: Asking | None  # bare calls


def happen(scene: Scene, event: Event, lanes: Mapping[str, int | None], told: Told) -> Outcome:
    """Has one event happen, and waits until all members are back. lanes: to which each caller asks."""
    service, outcome = scene.service, Outcome(source=covered(scene.service, [event.rank]))
    everybody = [*scene.callers.values(), *filter(None, [scene.raw])]
    for name, caller in scene.callers.items():
        caller.order(Order(True, lanes[name]))
    if scene.raw is not None:
        scene.raw.order(Order(True))
    processes, mark = every_process(service.folder), service.logged()
    time.sleep(SETTLE_SECONDS)
    for one in everybody:
        one.answers()
    time.sleep(CALM_SECONDS)
    before = {name: caller.answers() for name, caller in scene.callers.items()}
    victim = service.living()[event.rank][0]
    end, at = End(victim), time.time()
    with contextlib.suppress(ProcessLookupError):  # it has ended by itself, which `collateral` finds
        os.kill(victim, signal.SIGSTOP if event.kind == "stop" else signal.SIGKILL)
    missing = _wait_whole(scene, victim)
    outcome.whole = time.time() - at
    time.sleep(AFTER_SECONDS)
    raw = [] if scene.raw is None else scene.raw.answers()
    for one in everybody:
        one.order(PAUSE)
    after = {name: caller.answers(0.1) for name, caller in scene.callers.items()}
    log = service.log(mark)
    lines = lines_of(log, at)
    known = moments(lines, event.rank)
    for name in scene.callers:
        outcome.seen[name] = seen_of(before[name], after[name], at, known.get("it joins"))
        if first := outcome.seen[name].first:
            lines.append(Line(first, f"-> {name}: the first right answer after its longest gap"))
    if end.at is not None:
        known["it has ended"] = round(end.at - at, 3)
        lines.append(Line(end.at - at, "-> the process has ended, for the kernel"))
    faults = {
        "wrong": _wrong(after | {"bare calls": raw}, at),
        "failed": [one.fault for found in after.values() for one in found if one.fault and not one.wrong],
        "raw": _failed_raw(raw, event.rank, at, at + outcome.whole),
        "missing": [missing] if missing else [],
        "processes": collateral(log, [victim])
        + ([] if missing else leftover(service, HowStarted(), processes)),
    }
    outcome.faults = {name: texts for name, texts in faults.items() if texts}
    _say(scene.setup, event, outcome, told, sorted(lines), known)
    return outcome


def _say(
    setup: Setup, event: Event, outcome: Outcome, told: Told, lines: list[Line], known: dict[str, float]
) -> None:
    print(f"-- {setup}: {event}", flush=True)
    print(shown(lines), flush=True)
    told.say(moments=known)
    for name, seen in outcome.seen.items():
        numbers = {
            key: round(value, 4) if isinstance(value, float) else value for key, value in vars(seen).items()
        }
        told.say(caller=name, **numbers)
    faults = {name: [len(texts), *texts[:3]] for name, texts in outcome.faults.items()}
    told.say(whole=round(outcome.whole, 2), experts_from=outcome.source, faults=faults)


def ready(scene: Scene, rank: int) -> bool:
    """Whether the loss of a rank would be covered as the setup is to show. Waits until shadows are there; a
    member that took experts over keeps them, and later losses are covered by these replicas.
    """
    until = time.monotonic() + READY_SECONDS
    while True:
        found = covered(scene.service, [rank])
        if found and "disk" not in found:
            return scene.setup.source in found
        if time.monotonic() > until:
            return False
        time.sleep(0.2)


def _wait_whole(scene: Scene, victim: int) -> str:
    """Waits until all members serve; why they do not, or nothing."""
    until = time.monotonic() + BACK_SECONDS
    while missing := whole(scene.service, scene.setup.ranks, [victim]):
        if time.monotonic() > until:
            return missing
        time.sleep(LOOK_SECONDS)
    return ""


def _wrong(found: Mapping[str, list[Answer]], at: float) -> list[str]:
    """Answers that were wrong, by who got them."""
    return [
        f"{who}: layer {one.layer}, from {one.began - at:+.3f} to {one.ended - at:+.3f} s: {one.fault}"
        for who, answers in found.items()
        for one in answers
        if one.wrong
    ]


def _failed_raw(answers: list[Answer], rank: int, at: float, back: float) -> list[str]:
    """Bare calls that failed on lanes that lived."""
    raw = [RawAnswer(one.lane, "unary", one.began, one.ended, one.fault) for one in answers if not one.wrong]
    return failed_on_living(raw, {rank: (at, back + AFTER_SECONDS)})


def seen_of(before: list[Answer], after: list[Answer], at: float, joins: float | None) -> Seen:
    """What one caller saw. joins: seconds after which the member was to join again."""
    right = [one for one in before + after if not one.fault]
    call = statistics.median([one.ended - one.began for one in right if one.ended <= at] or [0.0])
    until = max([one.ended for one in after if not one.tried], default=time.time())
    found = gaps([one.ended for one in right], at, max(at, until))
    last = max([one.ended for one in right if one.ended <= at], default=at)
    losing, returning, began, first, longest = 0.0, 0.0, last, 0.0, 0.0
    for gap in found:
        if joins is None or began + gap / 2 <= at + joins:
            losing = max(losing, gap)
        else:
            returning = max(returning, gap)
        began += gap
        if gap > longest:
            longest, first = gap, began - at
    answered = dict[int, float]()
    for one in right:
        if one.began > at:
            answered[one.layer] = min(one.ended - at, answered.get(one.layer, float("inf")))
    complete = {one.layer for one in before if not one.fault} <= answered.keys()
    return Seen(
        interruption=max(0.0, longest - call),
        losing=max(0.0, losing - call),
        returning=max(0.0, returning - call),
        first=first,
        all_layers=max(answered.values(), default=0.0) if complete else None,
        call=call,
        right=len(right),
        other_bits=sum(one.other_bits for one in after),
        ended=dict(Counter(one.fault for one in after if one.fault).most_common(8)),
    )


class Tables:
    """Outcomes of one service's events, and the results that follow from them."""

    def __init__(self, setup: Setup, told: Told, under: str, *, failing: bool) -> None:
        """under: what callers did, for the cases' names. failing: a caller sees errors, and goes on."""
        self._setup, self._told, self._under, self._failing = setup, told, under, failing
        self._seen: dict[tuple[str, str], list[tuple[Seen, Outcome]]] = {}
        self._faults, self._events = Counter[str](), 0

    def __str__(self) -> str:
        return f"{self._setup}, under {self._under}"

    def add(self, event: Event, outcome: Outcome) -> None:
        """One more event: its results are told anew."""
        self._events += 1
        for name, texts in outcome.faults.items():
            self._faults[name] += len(texts)
            if name != "failed" or not self._failing:
                self._told.faults += [f"{self._setup}, {event}: {name}: {text}" for text in texts[:3]]
        for name, seen in outcome.seen.items():
            who = ", ".join(filter(None, [event.whom, name]))
            rows = self._seen.setdefault((event.kind, who), [])
            rows.append((seen, outcome))
            self._tell(event.kind, who, rows)
        counted = {name: float(self._faults[name]) for name in FAULTS}
        expected = counted.pop("failed") if self._failing else None
        case = f"{self}: {', '.join(counted)}"
        peers = counted | {"events": self._events, "passes that ended, and attempts": expected}
        self._told.add(case, sum(counted.values()), "times", 0.0, **peers)

    def _tell(self, kind: str, who: str, rows: list[tuple[Seen, Outcome]]) -> None:
        seconds = sorted(seen.interruption for seen, _ in rows)
        self._told.add(
            f"{self._setup}, {kind} under {self._under}, {who}: longest interruption",
            seconds[-1],
            "s",
            self._setup.aim(kind),
            p50=statistics.median(seconds),
            losing=max(seen.losing for seen, _ in rows),
            returning=max(seen.returning for seen, _ in rows),
            whole=max(outcome.whole for _, outcome in rows),
            all_layers=max((seen.all_layers for seen, _ in rows if seen.all_layers), default=None),
            call_ms=statistics.median(seen.call for seen, _ in rows) * 1e3,
            right=sum(seen.right for seen, _ in rows),
            other_bits=sum(seen.other_bits for seen, _ in rows),
            events=len(rows),
        )
