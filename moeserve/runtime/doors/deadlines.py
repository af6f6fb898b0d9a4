"""How long the caller of an RPC waits, and what is noted when its call ends: alike at both doors."""

from __future__ import annotations

import math
from collections.abc import Callable

import grpc

NEAR_SECONDS, NEAR_SHARE = 0.05, 0.012
"""A caller that leaves so shortly before its deadline has waited until then, by its own clock, which began
earlier; and gRPC rounds what it says of the seconds that are left up, by a hundredth of them at most. Of a
short deadline half is waited for at least.
"""

LONGEST_SECONDS = 1e8  # of a deadline; gRPC says centuries where the caller set none

Observe = Callable[[str, str, str, float], None]
"""`(method, transport, code, seconds)` of an ended request, as metrics count it."""


def uncounted(method: str, transport: str, code: str, seconds: float) -> None:
    """Counts nothing."""


def seconds_left(context: grpc.ServicerContext) -> float | None:
    """Seconds until the caller's deadline; None where it set none, for which gRPC says centuries.

    No clock takes that number: handed on as a timeout it has passed before the call begins.
    """
    remaining: float | None = context.time_remaining()
    return None if remaining is None or remaining > LONGEST_SECONDS else remaining


def waited_out(left: float | None, whole: float | None) -> bool:
    """Whether a caller that leaves has waited until its deadline: `left` seconds of `whole` are left. Neither
    has a number where it set none.
    """
    if left is None or whole is None or not math.isfinite(left):
        return False
    return left <= min(NEAR_SECONDS, whole / 2) + NEAR_SHARE * whole
