"""One call and its parts: what is fixed about them, and what a driver asks before and after each attempt.

Nothing here does input or output. The synchronous client, the asynchronous client and the front door drive
it: they send what `PartCall.request` makes, wait for the reply, and say how it ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from numpy.typing import NDArray

from moeserve.proto import moe_pb2
from moeserve.proto.client.again import new_job_id
from moeserve.proto.client.batch import BatchPart, ClientBatch, Reply, whole
from moeserve.proto.client.lanes import Lanes, message_limit
from moeserve.proto.client.payload import InlineRows, Payload, Placed, Pooled, shares
from moeserve.proto.errors import MoeError, Unavailable
from moeserve.proto.host import host_id
from moeserve.proto.transports.shared_memory import RegionPool, RemoteRegion

L = TypeVar("L")

NO_REGION = ("region_limit", "region_lost")
"""Why a lane has no region for a call that it could take inline."""


@dataclass(frozen=True, eq=False)
class ClientCall(Generic[L]):
    """One call: its rows, and where they may go.

    lanes: those there are; model: as the caller names it; bound: the only lane it may go to; transport: one
    of payload.TRANSPORTS; start: the number of the lane that takes its first part, as `Lanes.begun` has it.
    """

    batch: ClientBatch
    lanes: Lanes[L]
    model: str = ""
    bound: int | None = None
    transport: str = "auto"
    start: int = 0
    job_id: str = field(default_factory=new_job_id)

    def parts(self, topology: moe_pb2.GetTopologyReply) -> tuple[PartCall[L], ...]:
        """The rows, spread over the lanes of `topology`; TensorError when one has no room in a message."""
        parts = self._cut(topology)
        joined = whole(self.batch, parts)
        return tuple(PartCall(self, part, joined) for part in parts)

    def _cut(self, topology: moe_pb2.GetTopologyReply) -> tuple[BatchPart, ...]:
        """A call bound to a lane goes there whole; rows in shared memory go to as few lanes as hold them, and
        rows that ride inline are carried by several.
        """
        limit, lanes = message_limit(topology), topology.lanes
        if self.bound is not None:
            return self.batch.parts(1, limit)
        nbytes, host = self.batch.hidden.storage.nbytes, host_id()
        if self.transport != "inline" and all(shares("auto", nbytes, lane, host) for lane in lanes):
            return self.batch.parts(1, limit, min(lane.capacity for lane in lanes))
        return self.batch.parts(len(lanes), limit)

    def placed_request(self) -> moe_pb2.ForwardRequest:
        """The request of a call whose rows and answer lie in regions: it is one part."""
        part = BatchPart(0, 0, len(self.batch.hidden.storage))
        return PartCall(self, part, None).request(Placed(self.batch))

    def reply(self, parts: Sequence[PartCall[L]]) -> Reply:
        """The answer that `parts`, all answered, make together.

        Raises WeightsChanged where they saw different weights: the call has to be made again, whole.
        """
        answers = [part.answer for part in parts]
        joined = parts[0].joined
        rows = answers[0][1] if joined is None else joined
        return self.batch.reply(rows, [reply for reply, _ in answers])


class PartCall(Generic[L]):
    """One part of a call, over as many attempts as it takes.

    For each attempt a driver calls `aim`, `payload` and `request`, and then `answered` or `failed`.
    joined: [T, H], where the answers of all parts go; None where this part is the whole call.
    """

    def __init__(self, call: ClientCall[L], part: BatchPart, joined: NDArray[Any] | None) -> None:
        self.alone = joined is None  # whether it is all of its call
        self._call = call
        self._part = part
        self._rows = call.batch.hidden.rows(part.start, part.stop)
        self.joined = joined
        self._answered: tuple[moe_pb2.ForwardReply, NDArray[Any]] | None = None
        self._topology: moe_pb2.GetTopologyReply | None = None
        self._attempt = 0
        self._asked = ""  # the address of the lane of the last attempt

    def aim(self, topology: moe_pb2.GetTopologyReply) -> tuple[L, int]:
        """Picks the lane of the next attempt: the way to it, and the bytes of the region that takes the rows
        there, 0 = none. Raises MoeError.
        """
        self._topology, self._asked = topology, ""
        call, nbytes = self._call, self._rows.storage.nbytes
        lane = call.lanes.pick(topology, call.bound, call.start + self._part.index + self._attempt)
        call.batch.check_regions(lane.address)
        self._asked = lane.address
        near = not call.batch.placed and shares(call.transport, nbytes, lane, host_id())
        return call.lanes.link(topology, lane), Pooled.size(nbytes) if near else 0

    def without_region(self, failed: MoeError) -> None:
        """Returns where the rows may ride inline because their region `failed`; raises `failed` otherwise."""
        if self._call.transport != "auto" or failed.reason not in NO_REGION:
            raise failed

    def payload(self, region: RemoteRegion | None, pool: RegionPool) -> Payload:
        """Chooses where the rows go: in `region`, where the caller placed them, or inline."""
        batch = self._call.batch
        if batch.placed:
            return Placed(batch)
        return InlineRows(self._rows) if region is None else Pooled(self._rows, region, pool)

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
        part, joined = self._part, self.joined
        into = None if joined is None else joined[part.start : part.stop]
        self._answered = reply, payload.answer(reply, into)

    def failed(self, error: MoeError) -> None:
        """Notes that the attempt failed: the next one goes elsewhere, where there is another lane."""
        self._attempt += 1
        if self._asked:
            self._call.lanes.failed(self._asked, error)
        if isinstance(error, Unavailable):
            self._call.lanes.doubt(self._topology)
        elif error.reason == "no_lane":  # which may be there by now
            self._call.lanes.be_unsure()

    @property
    def answer(self) -> tuple[moe_pb2.ForwardReply, NDArray[Any]]:
        """The reply and its rows. RuntimeError before it is `answered`."""
        if self._answered is None:
            raise RuntimeError(f"part {self._part.index} of a call was read before it was answered")
        return self._answered
