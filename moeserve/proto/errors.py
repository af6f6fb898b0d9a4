"""What a call of the service can end in, as exceptions that a caller acts on.

A server says why in the status message, and in one word in the trailing metadata `moeserve-reason`; on a
stream both stand in the reply's `Error`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import grpc

from moeserve.proto import moe_pb2

REASON_KEY = "moeserve-reason"
PUSHBACK_KEY = "grpc-retry-pushback-ms"

CANCELLED_HERE = ("Locally cancelled", "Channel closed")
"""What gRPC says of a call that its caller has cancelled, or whose channel its caller has closed."""

TIME_IS_OVER = "Deadline Exceeded"
"""What gRPC says of a call whose time was over before an answer came, alone or in brackets."""


class MoeError(Exception):
    """A call that the service, or the way to it, refused.

    code: the gRPC status, e.g. `UNAVAILABLE`; reason: one word for programs, may be empty; message: for
    people; retry_after: seconds after which the server invites another attempt, None when it does not.
    """

    def __init__(self, code: str, reason: str, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(f"{code}{f' ({reason})' if reason else ''}: {message}")
        self.code = code
        self.reason = reason
        self.message = message
        self.retry_after = retry_after


class Unavailable(MoeError):
    """Nobody answers there now (UNAVAILABLE): a lost rank, a group that forms anew.

    The call may be repeated.
    """


class WeightsChanged(Unavailable):
    """The layer was reloaded while parts of one call ran, and they saw different weights."""


class Overloaded(MoeError):
    """The service has no room (RESOURCE_EXHAUSTED); `retry_after` is its pushback."""


class DeadlineExceeded(MoeError, TimeoutError):
    """The answer did not come in time (DEADLINE_EXCEEDED)."""


class InvalidArgument(MoeError, ValueError):
    """A request that can never be answered (INVALID_ARGUMENT); the message names field and value."""


class NotFound(MoeError, LookupError):
    """No such model, layer or region (NOT_FOUND); the message names what there is."""


ERRORS: dict[str, type[MoeError]] = {
    "UNAVAILABLE": Unavailable,
    "RESOURCE_EXHAUSTED": Overloaded,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
    "INVALID_ARGUMENT": InvalidArgument,
    "NOT_FOUND": NotFound,
}

_NAME_OF_CODE = {code.value[0]: code.name for code in grpc.StatusCode}
CODE_OF_NAME: dict[str, int] = {code.name: code.value[0] for code in grpc.StatusCode}


def error(code: str, reason: str, message: str, *, retry_after: float | None = None) -> MoeError:
    """The exception of `code` (`NOT_FOUND` -> NotFound; a code without a class of its own -> MoeError)."""
    return ERRORS.get(code, MoeError)(code, reason, message, retry_after=retry_after)


def client_closed(address: str) -> MoeError:
    """The error of a call whose client was closed before its answer was there."""
    text = f"this client of {address} is closed; make another one"
    return MoeError("CANCELLED", "client_closed", text)


def lane_late(seconds: float) -> DeadlineExceeded:
    """The error of a call that had so many seconds, and to which its lane gave no answer in these."""
    return DeadlineExceeded("DEADLINE_EXCEEDED", "deadline", f"the lane did not answer within {seconds:g} s")


def from_rpc(failed: Any, asked: str = "", timeout: float = 0.0) -> MoeError:
    """The exception of a failed RPC (`grpc.RpcError` or `grpc.aio.AioRpcError`). CANCELLED is one that was
    cancelled here, or whose server says why; a server that stops cancels what has come and not begun.

    asked, timeout: the address that was called, and the seconds it had, which gRPC does not say itself.
    """
    trailing = dict(_pairs(failed.trailing_metadata()))
    reason, pushback = trailing.get(REASON_KEY, ""), trailing.get(PUSHBACK_KEY)
    text = failed.details() or "no message came with the status"
    here = any(word in text for word in CANCELLED_HERE)
    if failed.code() is grpc.StatusCode.CANCELLED and not reason and not here:
        return Unavailable("UNAVAILABLE", "", f"the server gave the call up, as one that stops does: {text}")
    if asked and not reason and TIME_IS_OVER in text:
        text = f"{asked} did not answer within {timeout:g} s"
    if failed.code() is grpc.StatusCode.UNIMPLEMENTED:
        text += "; is this a moeserve service, and of no older release than this client?"
    return error(failed.code().name, str(reason), text, retry_after=_seconds(pushback))


def from_message(failed: moe_pb2.Error) -> MoeError:
    """The exception of an `Error` of a stream's reply."""
    code = _NAME_OF_CODE.get(failed.code, "UNKNOWN")
    retry_after = failed.pushback_ms / 1000 if failed.HasField("pushback_ms") else None
    return error(code, failed.reason, failed.message, retry_after=retry_after)


def _pairs(metadata: Iterable[tuple[str, str | bytes]] | None) -> Iterable[tuple[str, str | bytes]]:
    return metadata if metadata is not None else ()


def _seconds(pushback: str | bytes | None) -> float | None:
    """Pushback in seconds; by gRPC's convention a negative or unreadable value means: do not retry."""
    try:
        milliseconds = int(pushback) if pushback is not None else -1
    except ValueError:
        return None
    return milliseconds / 1000 if milliseconds >= 0 else None


def outcome(reply: moe_pb2.ForwardStreamReply) -> moe_pb2.ForwardReply:
    """The ForwardReply in a reply of a stream. Raises MoeError where it holds an error instead."""
    if reply.WhichOneof("outcome") == "error":
        raise from_message(reply.error)
    return reply.reply
