"""`Call`: what is fixed about one call while its parts are tried, on one lane or another."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from moeserve.proto import moe_pb2
from moeserve.proto.client.batch import Batch, Part
from moeserve.proto.client.lanes import message_limit
from moeserve.proto.client.patience import Clock
from moeserve.proto.client.payload import Inline, Payload, Placed, Pooled, shares
from moeserve.proto.host import host_id
from moeserve.proto.transports.shared_memory import RegionPool, RemoteRegion


@dataclass(frozen=True, eq=False)
class Call:
    """One call.

    model: as the client names it; bound: the only lane it may go to; turn: where spreading starts.
    """

    batch: Batch
    model: str
    bound: int | None
    clock: Clock
    turn: int
    job_id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def parts(self, topology: moe_pb2.GetTopologyReply) -> tuple[Part, ...]:
        """The rows, spread over the lanes of `topology`."""
        lanes = len(topology.lanes) if self.bound is None else 1
        return self.batch.parts(lanes, message_limit(topology))

    def is_whole(self, part: Part) -> bool:
        """Whether `part` is all of the call."""
        return part.stop - part.start == len(self.batch.hidden.storage)

    def region_size(self, part: Part, lane: moe_pb2.Lane, transport: str) -> int:
        """Bytes of the pooled region that takes `part` to `lane`; 0 when it needs none."""
        nbytes = self.batch.hidden.rows(part.start, part.stop).spec.nbytes
        if self.batch.placed or not shares(transport, nbytes, lane, host_id()):
            return 0
        return Pooled.size(nbytes)

    def payload(self, part: Part, region: RemoteRegion | None, pool: RegionPool) -> Payload:
        """Where the rows of `part` go: in `region`, where the caller placed them, or inline."""
        if self.batch.placed:
            return Placed(self.batch)
        rows = self.batch.hidden.rows(part.start, part.stop)
        return Inline(rows) if region is None else Pooled(rows, region, pool)

    def request(self, part: Part, attempt: int) -> moe_pb2.ForwardRequest:
        """The request of one attempt, complete but for hidden states.

        A part keeps its job id over all attempts.
        """
        request = self.batch.request(part)
        request.model = self.model
        request.job_id = f"{self.job_id}.{part.index}"
        request.attempt = attempt
        return request


def rows_of(joined: NDArray[Any] | None, part: Part) -> NDArray[Any] | None:
    """Where the answer of `part` goes in the whole; None when the part is the whole."""
    return None if joined is None else joined[part.start : part.stop]
