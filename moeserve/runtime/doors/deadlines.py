"""How long the caller of an RPC waits, and what is noted when its call ends: alike at both doors."""

from __future__ import annotations

from collections.abc import Callable

import grpc

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
