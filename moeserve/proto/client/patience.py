"""How long and how often a client tries: a deadline, and waits between attempts that grow."""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass
from numbers import Integral, Real

from moeserve.proto.errors import DeadlineExceeded, MoeError, Overloaded, Unavailable
from moeserve.proto.timeouts import bounded

MOST_SPIN = 0.1  # seconds
OPERATION_SECONDS = 3600.0  # a rebalance or reload may take, unless its caller says otherwise


def is_whole(value: object) -> bool:
    """Whether `value` is a whole number, of Python or of numpy."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_process(made_by: int) -> None:
    """Raises RuntimeError in a process that was forked from the one that made a client: channels of gRPC do
    not work there, and regions and connections are its parent's.
    """
    if made_by != os.getpid():
        raise RuntimeError("this client was made before a fork; make another one in this process")


@dataclass(frozen=True)
class Patience:
    """The time and the attempts a call may take.

    timeout: seconds in all, over every attempt; more than 2e6 (23 days) count as 2e6. attempts: at most so
    many, None = as many as fit into the timeout. first_wait, longest_wait: seconds between attempts, doubling
    from the first to the longest. spin: seconds for which a call past gRPC looks for its answer again and
    again before its thread sleeps: worth it only with a core to spare. None: 0, but for a call over a data
    connection while no other thread of its client has one: that looks for half a millisecond at most, about
    when its answer is expected, on a host with four cores or more.
    """

    timeout: float = 60.0
    attempts: int | None = None
    first_wait: float = 0.02
    longest_wait: float = 1.0
    spin: float | None = None

    def __post_init__(self) -> None:
        for name in ("timeout", "first_wait", "longest_wait", "spin"):
            value = getattr(self, name)
            if name == "spin" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, Real):
                raise TypeError(f"{name}={value!r} must be a number of seconds")
        if self.attempts is not None and not is_whole(self.attempts):
            raise TypeError(f"attempts={self.attempts!r} must be a whole number, or None")
        if not self.timeout > 0:  # nor when it is NaN
            raise ValueError(f"timeout={self.timeout} must be more than 0 seconds")
        if self.attempts is not None and self.attempts < 1:
            raise ValueError(f"attempts={self.attempts} must be at least 1, or None for as many as fit")
        if not 0 < self.first_wait <= self.longest_wait:
            raise ValueError(
                f"0 < first_wait={self.first_wait} <= longest_wait={self.longest_wait} must hold"
            )

        if self.spin is not None and not 0 <= self.spin <= MOST_SPIN:
            raise ValueError(f"spin={self.spin} must be 0 to {MOST_SPIN} seconds")

    @classmethod
    def of(cls, timeout: float | Patience) -> Patience:
        """`timeout` itself, or the default patience with so many seconds."""
        return timeout if isinstance(timeout, Patience) else cls(timeout=timeout)

    @property
    def seconds(self) -> float:
        """The timeout, as gRPC can take it."""
        return bounded(float(self.timeout))


class Clock:
    """The time of one call, from when this was made."""

    def __init__(self, patience: Patience) -> None:
        self.patience = patience
        self.deadline = time.monotonic() + patience.seconds
        self._before: MoeError | None = None

    @property
    def remaining(self) -> float:
        """Seconds left, never below 0."""
        return max(0.0, self.deadline - time.monotonic())

    def wait_after(self, failed: MoeError, attempt: int) -> float:
        """Seconds to wait after attempt `attempt` (from 0); raises `failed` where there is to be no other.

        Forward is pure, so UNAVAILABLE may be repeated; RESOURCE_EXHAUSTED only after the server's own
        pushback. When the time runs out over repeating, what kept failing is raised: it says more.
        """
        patience = self.patience
        if isinstance(failed, Overloaded) and failed.retry_after is not None:
            wait = failed.retry_after
        elif isinstance(failed, Unavailable):
            longest = min(patience.longest_wait, patience.first_wait * 2.0 ** min(attempt, 30))
            wait = longest * random.uniform(0.5, 1.0)
        elif isinstance(failed, DeadlineExceeded) and self._before is not None:
            raise self._before from failed
        else:
            raise failed
        if patience.attempts is not None and attempt + 1 >= patience.attempts:
            raise failed
        if wait >= self.remaining:
            raise failed
        self._before = failed
        return wait

    def expired(self) -> DeadlineExceeded:
        """The error of a call whose time passed before it was sent."""
        text = f"{self.patience.timeout} s passed before the lanes were known"
        return DeadlineExceeded("DEADLINE_EXCEEDED", "", text)


class Retries:
    """Counts the attempts at one thing, within the time of its call's clock."""

    def __init__(self, clock: Clock) -> None:
        self.attempt = 0
        self._clock = clock

    def wait_after(self, failed: MoeError) -> float:
        """Seconds to wait before the next attempt; raises as Clock.wait_after where there is to be none."""
        wait = self._clock.wait_after(failed, self.attempt)
        self.attempt += 1
        return wait
