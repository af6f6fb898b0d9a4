"""How long the head waits for whom, and how it backs off from what fails again and again."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

LEAST_SECONDS, MOST_SECONDS = 0.1, 10.0  # of a back-off


@dataclass(frozen=True)
class Patience:
    """Bounds of the head's waits, in seconds; the keys `cluster.*_seconds` give them."""

    give_up: float = 0.0  # without serving, after the group has served; 0: the service never ends by itself


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
