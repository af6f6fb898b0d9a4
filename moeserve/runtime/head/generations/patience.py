"""How long the head waits for whom, and how it backs off from what fails again and again."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

LEAST_SECONDS, MOST_SECONDS = 0.1, 10.0  # of a back-off


@dataclass(frozen=True)
class Patience:
    """Bounds of the head's waits, in seconds; the keys `cluster.*_seconds` give them."""

    give_up: float = 0.0  # without serving, after the group has served; 0: the service never ends by itself
    answer: float = 10.0  # until a member's process answers that a generation forms
    leave: float = 35.0  # for the step that a member was in: its collectives have ended by then
    prepare: float = 120.0  # between two layers that a member reads
    join: float = 300.0  # for the process group and dispatchers, of all members together
    adopt: float = 60.0  # until every member serves a change that was decided
    hello: float | None = None  # until whoever connects has introduced itself; None: as `Reception` has it
    send: float = 5.0  # while a member takes nothing of what is sent to it
    reach: float = 30.0  # while a member's host does not answer
    late: float = 10.0  # while a step does not go on; then who holds it up is named


class Formation:
    """Who of the members has answered, prepared and joined while a generation forms; whom it waits for too
    long.

    It decides, and nothing else: no thread, no lock, no clock of its own.
    """

    def __init__(self, seats: Iterable[int], patience: Patience, now: float) -> None:
        self._patience, self.began = patience, now  # when members began to prepare, and then to join
        self._heard: dict[int, float] = {}  # seat -> when it last said that it reads its experts
        self._stepping = set[int]()  # seats that answer, and are still in a step of the generation before
        self._seats, self._prepared, self._joined = frozenset(seats), set[int](), set[int]()

    @property
    def prepared(self) -> bool:
        """Whether every member has prepared."""
        return self._prepared >= self._seats

    @property
    def joined(self) -> bool:
        """Whether every member has joined."""
        return self._joined >= self._seats

    def heard(self, seat: int, now: float, *, stepping: bool = False) -> None:
        """Notes that a member answers, or has read one more layer; whether it still is in a step."""
        self._heard[seat] = now
        self._stepping = self._stepping | {seat} if stepping else self._stepping - {seat}

    def has_prepared(self, seat: int, now: float) -> None:
        """Notes that a member has its experts; the last one begins the joining."""
        self._prepared.add(seat)
        if self.prepared:
            self.began = now

    def has_joined(self, seat: int) -> None:
        """Notes that a member is in the process group."""
        self._joined.add(seat)

    def due(self) -> float:
        """When the first bound of those that prepare passes; infinite when all have prepared."""
        if self.prepared:
            return math.inf
        return min(self._limit(seat) for seat in self._seats - self._prepared)

    def silent(self, now: float) -> dict[int, str]:
        """Members that prepare and were not heard of for too long, each with the reason to part with it."""
        late = sorted(seat for seat in self._seats - self._prepared if self._limit(seat) <= now)
        return {seat: self._reason(seat) for seat in late}

    def _limit(self, seat: int) -> float:
        heard = self._heard.get(seat)
        if seat in self._stepping:
            return self.began + self._patience.leave
        return self.began + self._patience.answer if heard is None else heard + self._patience.prepare

    def _reason(self, seat: int) -> str:
        if seat in self._stepping:
            return f"it has not left its step for {self._patience.leave:g} s, step.timeout_seconds and 5 s"
        if seat in self._heard:
            return f"it read no layer for cluster.prepare_seconds = {self._patience.prepare:g}"
        return f"it did not answer within cluster.answer_seconds = {self._patience.answer:g}"


@dataclass(eq=False)
class Backoff:
    """Pauses that double from LEAST_SECONDS to MOST_SECONDS. Each is drawn from the upper half of its bound,
    so that those who failed together do not come again together.
    """

    draw: Callable[[], float] = field(default=random.random)  # 0 to 1
    failures: int = 0  # in a row

    def next(self) -> float:
        """Seconds to wait after one more failure."""
        bound = min(MOST_SECONDS, LEAST_SECONDS * 2.0 ** min(self.failures, 32))
        self.failures += 1
        return max(LEAST_SECONDS, bound * (1.0 + self.draw()) / 2.0)

    def reset(self) -> None:
        """Forgets the failures: what was tried has succeeded."""
        self.failures = 0
