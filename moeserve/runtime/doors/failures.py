"""Which gRPC status a failure becomes: one table, which every door uses."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NoReturn, TypeVar

import grpc
from google.protobuf.message import DecodeError

from moeserve.proto import moe_pb2
from moeserve.proto.errors import CODE_OF_NAME, PUSHBACK_KEY, REASON_KEY, MoeError
from moeserve.proto.tensors import TensorError
from moeserve.proto.texts import clipped
from moeserve.runtime.control.stream import StreamClosed
from moeserve.runtime.doors.device_errors import DeviceRefused, LanesTaken, NameTaken, UnknownLane
from moeserve.runtime.doors.operations import BadRequest, NothingToBalance
from moeserve.runtime.doors.payloads.errors import NamedRegionRefused, RegionLimit, UnknownRegion
from moeserve.runtime.doors.request import NotServed
from moeserve.runtime.errors import (
    BatchTooLarge,
    CallerLeft,
    DeadlinePassed,
    GroupUnavailable,
    LaneFull,
    WrongVersion,
)
from moeserve.runtime.head.scaling import CannotScale

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class GrpcStatus:
    """How a call ends that failed: a gRPC code, one word why for programs, and a message for people."""

    code: str
    reason: str
    message: str
    pushback: float | None = None  # seconds

    def __post_init__(self) -> None:
        """Cuts a message over a kibibyte: it travels in the trailers of a call."""
        object.__setattr__(self, "message", clipped(self.message))

    def as_message(self) -> moe_pb2.Error:
        """The `Error` that says so in a reply of a stream."""
        error = moe_pb2.Error(code=CODE_OF_NAME[self.code], reason=self.reason, message=self.message)
        if self.pushback is not None:
            error.pushback_ms = int(self.pushback * 1000)
        return error

    def log(self) -> None:
        """Says in the log that a call ends so; lines of different reasons are counted apart."""
        text = "a call ends with %s (%s): %s"
        log.info(text, self.code, self.reason, self.message, extra={"sort": f"{self.code} {self.reason}"})

    def abort(self, context: grpc.ServicerContext) -> NoReturn:
        """Ends the RPC of `context` with this status."""
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
    (DecodeError, "INVALID_ARGUMENT", "bad_message"),
    (NotServed, "NOT_FOUND", "not_served"),
    (UnknownRegion, "NOT_FOUND", "unknown_region"),
    (NamedRegionRefused, "PERMISSION_DENIED", "named_regions_off"),
    (RegionLimit, "RESOURCE_EXHAUSTED", "region_limit"),
    (UnknownLane, "NOT_FOUND", "unknown_lane"),
    (NameTaken, "ALREADY_EXISTS", "name_taken"),
    (LanesTaken, "RESOURCE_EXHAUSTED", "lanes_taken"),
    (DeviceRefused, "FAILED_PRECONDITION", "device_refused"),
    (LaneFull, "RESOURCE_EXHAUSTED", "overloaded"),
    (BatchTooLarge, "INVALID_ARGUMENT", "too_many_rows"),
    (GroupUnavailable, "UNAVAILABLE", "not_serving"),
    (StreamClosed, "UNAVAILABLE", "not_serving"),  # of the rank to its coordinator
    (WrongVersion, "FAILED_PRECONDITION", "wrong_version"),
    (NothingToBalance, "FAILED_PRECONDITION", "nothing_to_balance"),
    (CannotScale, "FAILED_PRECONDITION", "cannot_scale"),
    (DeadlinePassed, "DEADLINE_EXCEEDED", "deadline"),
    (CallerLeft, "CANCELLED", "caller_left"),
)


def status_of(error: Exception) -> GrpcStatus:
    """The status that `error` ends a call with: what a lane said, or what the table has; else INTERNAL.

    `error` has no traceback afterwards: a call keeps what it failed with, and the frames of the traceback
    keep the call and its rows.
    """
    status = _status_of(error)
    error.__traceback__ = None
    status.log()
    return status


def _status_of(error: Exception) -> GrpcStatus:
    if isinstance(error, MoeError):
        return GrpcStatus(error.code, error.reason, error.message, error.retry_after)
    for kind, code, reason in _TABLE:
        if isinstance(error, kind):
            return GrpcStatus(code, reason, str(error), getattr(error, "pushback", None))
    log.error("a request failed unforeseen", exc_info=error)
    return GrpcStatus("INTERNAL", "internal", f"{type(error).__name__}: {error}")


def guarded(context: grpc.ServicerContext, work: Callable[[], T]) -> T:
    """What `work` returns; where it raises, the RPC of `context` ends with the failure's status."""
    try:
        return work()
    except Exception as error:
        status_of(error).abort(context)
