"""Failures that a caller acts on, as the runtime raises them."""

from __future__ import annotations

import random
from collections.abc import Iterable


class GroupUnavailable(RuntimeError):
    """The group is not serving; says why. The call changed nothing and may be made again."""


class WrongVersion(RuntimeError):
    """The layer is served with other weights than the caller demands; names both."""


def one_version(versions: Iterable[int]) -> int:
    """The version of the weights that all parts of a call saw. Raises GroupUnavailable where they differ."""
    found = sorted(set(versions))
    if len(found) > 1:
        raise GroupUnavailable(
            f"the layer was reloaded while parts of this call ran, with weights versions {found}; ask again"
        )
    return found[0]


class LaneFull(RuntimeError):
    """The lane holds as many calls as it may; try again after `pushback` seconds."""

    def __init__(self, message: str, pushback: float) -> None:
        super().__init__(message)
        self.pushback = pushback


FIRST_PUSHBACK = 0.05  # seconds, after a first refusal
LONGEST_PUSHBACK = 2.0


def pushback(refusals: int) -> float:
    """Seconds after which whoever was refused so often in a row may come back: longer each time, and never
    at the same time as others.
    """
    longest: float = min(LONGEST_PUSHBACK, FIRST_PUSHBACK * 2.0 ** min(refusals - 1, 30))
    return longest * random.uniform(0.5, 1.0)


class BatchTooLarge(ValueError):
    """A call has more rows than a lane takes at once; names both."""


class DeadlinePassed(TimeoutError):
    """The caller's deadline passed before the answer was there."""


class CallerLeft(RuntimeError):
    """The caller left before its answer was there."""
