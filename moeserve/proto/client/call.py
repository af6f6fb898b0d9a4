"""One call and its parts: what is fixed about them, and what a driver asks before and after each attempt.

Nothing here does input or output. The synchronous client, the asynchronous client and the front door drive
it: they send what `PartCall.request` makes, wait for the reply, and say how it ended.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from numpy.typing import NDArray

from moeserve.proto import moe_pb2
from moeserve.proto.client.batch import Batch, Part, Reply, whole
from moeserve.proto.client.lanes import Lanes, message_limit
from moeserve.proto.client.payload import Inline, Payload, Placed, Pooled, shares
from moeserve.proto.errors import MoeError, Unavailable
from moeserve.proto.host_id import host_id
from moeserve.proto.transports.shared_memory import RegionPool, RemoteRegion

L = TypeVar("L")


@dataclass(frozen=True, eq=False)
class Call(Generic[L]):
    """One call.

    lanes: where it may go; model: as the caller names it; bound: the only lane it may go to; transport: one
    of payload.TRANSPORTS; turn: where spreading starts.
    """

    batch: Batch
    lanes: Lanes[L]
    model: str = ""
    bound: int | None = None
    transport: str = "auto"
    turn: int = 0
    job_id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def parts(self, topology: moe_pb2.GetTopologyReply) -> tuple[PartCall[L], ...]:
        """The rows, spread over the lanes of `topology`; TensorError when one has no room in a message."""
        lanes = len(topology.lanes) if self.bound is None else 1
        parts = self.batch.parts(lanes, message_limit(topology))
        joined = whole(self.batch, parts)
        return tuple(
            PartCall(self, part, None if joined is None else joined[part.start : part.stop], joined)
            for part in parts
        )

    def reply(self, parts: Sequence[PartCall[L]]) -> Reply:
        """The answer that `parts`, all answered, make together.

        Raises WeightsChanged where they saw different weights: the call has to be made again, whole.
        """
        return self.batch.reply(parts[0].whole_answer(), [part.reply for part in parts])


class PartCall(Generic[L]):
    """One part of a call, over as many attempts as it takes.

    For each attempt a driver calls `aim`, `payload` and `request`, and then `answered` or `failed`.
    """

    def __init__(
        self, call: Call[L], part: Part, into: NDArray[Any] | None, joined: NDArray[Any] | None
    ) -> None:
        self.alone = part.stop - part.start == len(call.batch.hidden.storage)
        self.reply = moe_pb2.ForwardReply()  # empty until `answered`
        self._call = call
        self._part = part
        self._into = into
        self._joined = joined
        self._answer: NDArray[Any] | None = None
        self._topology: moe_pb2.GetTopologyReply | None = None
        self._attempt = 0

    def aim(self, topology: moe_pb2.GetTopologyReply) -> tuple[L, int]:
        """Picks the lane of the next attempt: the way to it, and the bytes of the region that takes the rows
        there, 0 = none. Raises MoeError.
        """
        self._topology = topology
        call, part = self._call, self._part
        lane = call.lanes.pick(topology, call.bound, call.turn + part.index + self._attempt)
        nbytes = call.batch.hidden.rows(part.start, part.stop).spec.nbytes
        near = not call.batch.placed and shares(call.transport, nbytes, lane, host_id())
        return call.lanes.link(topology, lane), Pooled.size(nbytes) if near else 0

    def payload(self, region: RemoteRegion | None, pool: RegionPool) -> Payload:
        """Where the rows go: in `region`, where the caller placed them, or inline."""
        batch = self._call.batch
        if batch.placed:
            return Placed(batch)
        rows = batch.hidden.rows(self._part.start, self._part.stop)
        return Inline(rows) if region is None else Pooled(rows, region, pool)

    def request(self, payload: Payload) -> moe_pb2.ForwardRequest:
        """The request of this attempt, its rows where `payload` has them.

        A part keeps its job id over all attempts.
        """
        request = self._call.batch.request(self._part)
        request.model = self._call.model
        request.job_id = f"{self._call.job_id}.{self._part.index}"
        request.attempt = self._attempt
        payload.fill(request)
        return request

    def answered(self, reply: moe_pb2.ForwardReply, payload: Payload) -> None:
        """Takes the reply's rows. Raises TensorError for an answer that is not like the question."""
        self._answer = payload.answer(reply, self._into)
        self.reply = reply

    def failed(self, error: MoeError) -> None:
        """Notes that the attempt failed: the next one goes elsewhere, where there is another lane."""
        self._attempt += 1
        if isinstance(error, Unavailable):
            self._call.lanes.doubt(self._topology)

    def whole_answer(self) -> NDArray[Any]:
        """The rows of the whole call, as far as its parts are answered."""
        answer = self._answer if self._joined is None else self._joined
        if answer is None:
            raise RuntimeError("a call was put together before its part was answered")
        return answer
