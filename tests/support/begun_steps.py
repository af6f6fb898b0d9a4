"""Steps of a device lane that were begun as calls, and end by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moeserve.proto import moe_pb2


@dataclass
class Step:
    """A step that was begun. Given up, it ends as one whose caller left, when its test says so."""

    request: moe_pb2.ForwardRequest
    ended: Callable[[moe_pb2.ForwardStreamReply], None]
    given_up: bool = False

    def give_up(self) -> None:
        self.given_up = True

    def answer(self, version: int = 1) -> None:
        reply = moe_pb2.ForwardReply(epoch=3, weights_version=version)
        self.ended(moe_pb2.ForwardStreamReply(reply=reply))

    def fail(self, code: int, reason: str, pushback: int | None = None) -> None:
        error = moe_pb2.Error(code=code, reason=reason, message="so it is", pushback_ms=pushback)
        self.ended(moe_pb2.ForwardStreamReply(error=error))
