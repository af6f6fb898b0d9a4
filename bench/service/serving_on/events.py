"""What happens to members, drawn from a seed, and what became of it: values that go to a file and back."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

KINDS = ("kill", "stop", "double")
"""A member is killed; one is stopped (SIGSTOP); two are killed, at once or within a second."""

LARGEST_PAUSE = 1.0  # seconds between the two of a double kill, of those that are not killed at once


@dataclass(frozen=True)
class Setup:
    """How the service is configured: one row of the tables."""

    launcher: str = "local"
    redundant: int = 0  # slots beside one for every expert
    shadows: bool = False
    cold: bool = False  # the checkpoint is dropped from the page cache before each event
    spares: int = 0  # actors under Ray that a lost member's heir begins in

    def __str__(self) -> str:
        words = [self.launcher, f"64+{self.redundant} slots", "shadows" if self.shadows else "no shadows"]
        words += ["cold disk"] if self.cold else []
        return ", ".join(words + ([f"spares {self.spares}"] if self.spares else []))


@dataclass(frozen=True)
class Event:
    """What happens to which members; `number` counts those of a setup."""

    number: int
    kind: str
    ranks: tuple[int, ...]
    apart: float = 0.0  # seconds between the first and the second of a double kill

    def __str__(self) -> str:
        apart = f", {self.apart:.2f} s apart" if self.apart else ""
        return f"event {self.number}: {self.kind} of {' and '.join(map(str, self.ranks))}{apart}"


@dataclass(frozen=True)
class Outcome:
    """What became of an event. Seconds are counted from it on."""

    setup: Setup
    event: Event
    interruption: float = 0.0  # longest gap between right answers of the one caller, less its median call
    returning: float = 0.0  # the longest of the gaps once answers had come again: of the members' return
    whole: float = 0.0  # until all members served again
    call: float = 0.0  # the caller's median call before
    covered: str = ""  # where the lost members' experts were, by layers: "replicas", "shadow", "disk", ...
    in_memory: float = 1.0  # share of the checkpoint in the page cache when it happened
    right: int = 0
    faults: dict[str, list[str]] = field(default_factory=dict)  # what is not as it should be, by its name

    def line(self) -> str:
        """As a line of a file that `outcomes_of` reads."""
        return json.dumps(asdict(self)) + "\n"

    def __str__(self) -> str:
        numbers = f"interrupted {self.interruption:.3f} s (returning {self.returning:.3f} s)"
        said = f"{numbers}, whole after {self.whole:.2f} s, call {self.call * 1e3:.1f} ms, {self.covered}"
        wrongs = "".join(f"\n    {name}: {texts[:3]}" for name, texts in self.faults.items())
        return f"{self.setup}, {self.event}: {said}{wrongs}"


FAULTS = ("wrong", "failed", "twice", "raw", "missing", "processes")
"""Answers that are wrong, calls that failed with default patience, requests that were answered twice, bare
calls that failed on living lanes, why the members are not all back, and processes that should not be there.
"""


def outcomes_of(paths: list[Path]) -> list[Outcome]:
    """Those in the files; the last of an event that was run more than once."""
    found: dict[tuple[Setup, int], Outcome] = {}
    for path in paths:
        for line in map(json.loads, path.read_text().splitlines() if path.exists() else ()):
            event = Event(**line.pop("event") | {})
            event = Event(event.number, event.kind, tuple(event.ranks), event.apart)
            outcome = Outcome(Setup(**line.pop("setup")), event, **line)
            found[outcome.setup, event.number] = outcome
    return list(found.values())


def drawn(setup: Setup, seed: int, counts: dict[str, int], ranks: int) -> list[Event]:
    """Events of a setup in an order of the seed's: so many of each kind, over the ranks in turn."""
    draw = random.Random(f"{seed}, {setup}, {sorted(counts.items())}")
    kinds = [kind for kind in KINDS for _ in range(counts.get(kind, 0))]
    draw.shuffle(kinds)
    turns, events = Counter[str](), []
    for number, kind in enumerate(kinds):
        first = turns[kind] % ranks
        turns[kind] += 1
        if kind != "double":
            events.append(Event(number, kind, (first,)))
            continue
        second = draw.choice([rank for rank in range(ranks) if rank != first])
        apart = draw.choice([0.0, round(draw.uniform(0.0, LARGEST_PAUSE), 3)])
        events.append(Event(number, kind, (first, second), apart))
    return events


def gaps(ended: list[float], since: float, until: float) -> list[float]:
    """Seconds between right answers, by when they ended, from the last before `since` to `until`.

    The time until `until` counts as a gap as well: nobody has answered since the last one.
    """
    ended = sorted(ended)
    before = [at for at in ended if at <= since]
    seen = [*before[-1:], *(at for at in ended if since < at <= until), until]
    return [later - earlier for earlier, later in pairwise(seen)]
