"""Failures as gRPC statuses: one table, used by every door."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

import grpc

from moeserve.proto import moe_pb2
from moeserve.proto.errors import CODE_OF_NAME, PUSHBACK_KEY, REASON_KEY, MoeError
from moeserve.proto.tensors import TensorError
from moeserve.runtime.doors.operations import BadRequest, NothingToBalance
from moeserve.runtime.doors.payloads.errors import NamedRegionRefused, RegionLimit, UnknownRegion
from moeserve.runtime.doors.request import NotServed
from moeserve.runtime.errors import CallerLeft, DeadlinePassed, GroupUnavailable, Overloaded, WrongVersion


@dataclass(frozen=True)
class Status:
    """A gRPC status with a one-word reason for programs."""

    code: str
    reason: str
    message: str
    pushback: float | None = None  # seconds

    def as_message(self) -> moe_pb2.Error:
        """As it travels on a stream."""
        error = moe_pb2.Error(code=CODE_OF_NAME[self.code], reason=self.reason, message=self.message)
        if self.pushback is not None:
            error.pushback_ms = int(self.pushback * 1000)
        return error

    def abort(self, context: grpc.ServicerContext) -> NoReturn:
        """Ends a unary call with it."""
        context.set_trailing_metadata(tuple(self._metadata()))
        context.abort(getattr(grpc.StatusCode, self.code), self.message)
        raise AssertionError("abort does not return")

    def _metadata(self) -> Iterator[tuple[str, str]]:
        yield REASON_KEY, self.reason
        if self.pushback is not None:
            yield PUSHBACK_KEY, str(int(self.pushback * 1000))


_TABLE: tuple[tuple[type[Exception], str, str], ...] = (
    (TensorError, "INVALID_ARGUMENT", "bad_tensor"),
    (BadRequest, "INVALID_ARGUMENT", "bad_request"),
    (NotServed, "NOT_FOUND", "not_served"),
    (UnknownRegion, "NOT_FOUND", "unknown_region"),
    (NamedRegionRefused, "PERMISSION_DENIED", "named_regions_off"),
    (RegionLimit, "RESOURCE_EXHAUSTED", "region_limit"),
    (Overloaded, "RESOURCE_EXHAUSTED", "overloaded"),
    (GroupUnavailable, "UNAVAILABLE", "not_serving"),
    (WrongVersion, "FAILED_PRECONDITION", "wrong_version"),
    (NothingToBalance, "FAILED_PRECONDITION", "nothing_to_balance"),
    (DeadlinePassed, "DEADLINE_EXCEEDED", "deadline"),
    (CallerLeft, "CANCELLED", "caller_left"),
)


def status_of(error: Exception) -> Status:
    """The status of a failure; INTERNAL for one that nobody foresaw."""
    if isinstance(error, MoeError):
        return Status(error.code, error.reason, error.message, error.retry_after)
    for kind, code, reason in _TABLE:
        if isinstance(error, kind):
            return Status(code, reason, str(error), getattr(error, "pushback", None))
    return Status("INTERNAL", "internal", f"{type(error).__name__}: {error}")
