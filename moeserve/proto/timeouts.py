"""The longest time that a call waits for its answer, and timeouts as the contract carries them."""

from __future__ import annotations

from numbers import Real

LONGEST_SECONDS = 2e6
"""About 23 days. A longer timeout is cut to it: gRPC answers DEADLINE_EXCEEDED at once from about 7e9 s on,
`timeout_ms` holds 4.2e6 s, and `poll` 2.1e6 s.
"""


def bounded(seconds: float) -> float:
    """`seconds`, or LONGEST_SECONDS where that is less."""
    return min(seconds, LONGEST_SECONDS)


def checked(name: str, seconds: object) -> float:
    """`seconds` that somebody is to wait, as `bounded` gives them. Raises TypeError for what is no number,
    and ValueError for one that is negative or NaN, after which no wait would end; both say the name.
    """
    if isinstance(seconds, bool) or not isinstance(seconds, Real):
        raise TypeError(f"{name}={seconds!r} must be a number of seconds")
    if not (number := float(seconds)) >= 0:  # nor when it is NaN
        raise ValueError(f"{name}={seconds} must be 0 seconds or more")
    return bounded(number)


def milliseconds(seconds: float) -> int:
    """`seconds` as a request's `timeout_ms`: whole milliseconds, at least 1, since 0 means none."""
    return max(1, int(bounded(seconds) * 1000))
