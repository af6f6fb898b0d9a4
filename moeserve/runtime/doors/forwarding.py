"""How the front door hands calls on to the lanes: a large batch in parts, each to a lane in turn, whose
answers it puts together. What is cut, where it goes and how it is joined is the clients' (client/call.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from functools import partial
from types import TracebackType

import grpc
import numpy as np

from moeserve.proto import moe_pb2
from moeserve.proto.client.batch import SPLIT_ROWS, ClientBatch
from moeserve.proto.client.call import ClientCall, PartCall
from moeserve.proto.client.lanes import Lanes, check_serving
from moeserve.proto.client.payload import Payload
from moeserve.proto.client.sync_link import Link, Sent
from moeserve.proto.credentials import Credentials
from moeserve.proto.errors import InvalidArgument, MoeError, Unavailable
from moeserve.proto.tensors import Plain, encode_into
from moeserve.runtime.doors.deadlines import waited_out
from moeserve.runtime.errors import CallerLeft, DeadlinePassed


class Caller:
    """The caller of one RPC at the front door. The calls that lanes run for it end with the RPC."""

    def __init__(self, context: grpc.ServicerContext) -> None:
        self._context, self._whole = context, context.time_remaining()  # seconds that it has
        self._calls: list[Sent] = []
        self._left = False
        self._lock = threading.Lock()
        if not context.add_callback(self._leave):  # the RPC is over already
            self._leave()

    def check_there(self) -> None:
        """Raises MoeError where the caller has left: a lane that answers at once is not to be asked."""
        if self._left:
            raise MoeError("CANCELLED", "", "the caller left before its call was sent")

    def waits_for(self, call: Sent) -> None:
        """Cancels `call` when the caller leaves, or now if it has left."""
        with self._lock:
            left = self._left
            self._calls.append(call)
        if left:
            call.cancel()

    def waits_no_more(self, call: Sent) -> None:
        """Forgets `call`, and cancels it where it has not ended."""
        with self._lock:
            self._calls.remove(call)
        call.cancel()

    def why_no_answer(self, failed: MoeError, layer: int) -> Exception:
        """What the caller is told: what the lane said, unless its deadline or the caller ended the call."""
        late = failed.code == "DEADLINE_EXCEEDED" and not failed.reason  # said by gRPC, before the lane could
        left = self._context.time_remaining()
        if late or (failed.code == "CANCELLED" and waited_out(left, self._whole)):
            return DeadlinePassed(f"layer {layer}: no answer within the deadline")
        if failed.code == "CANCELLED":
            return CallerLeft("the caller left before its answer was there")
        if failed.code == "UNAVAILABLE" and not failed.reason:  # said by gRPC: the lane's process is gone
            return Unavailable(
                "UNAVAILABLE", "not_serving", f"layer {layer}: a lane is gone: {failed.message}"
            )
        return failed

    def _leave(self) -> None:
        with self._lock:
            self._left, calls = True, list(self._calls)
        for call in calls:
            call.cancel()


def leave_out(topology: moe_pb2.GetTopologyReply, ranks: Collection[int]) -> None:
    """Takes the lanes of these ranks out of `topology`."""
    if ranks:
        stay = [lane for lane in topology.lanes if lane.rank not in ranks]
        del topology.lanes[:]
        topology.lanes.extend(stay)


class Forwarding:
    """Runs calls on the lanes for the callers of the front door. Safe from any thread.

    topology: says what the lanes are now. Connections to lanes that it no longer names are closed by the
    next call. credentials: what the lanes are shown.
    """

    def __init__(
        self, topology: Callable[[], moe_pb2.GetTopologyReply], credentials: Credentials | None = None
    ) -> None:
        self._topology = topology
        self.leaving: Callable[[], Collection[int]] = tuple  # ranks whose lanes take no further call
        self._lanes: Lanes[Link] = Lanes(partial(Link, credentials=credentials), first=0)

    def forward(
        self, request: moe_pb2.ForwardRequest, timeout: float | None, caller: Caller
    ) -> moe_pb2.ForwardReply:
        """The answer within `timeout` seconds, None = whenever it comes.

        Raises Unavailable where the group does not serve, WeightsChanged where the parts of the call saw
        different weights, and else what a lane said. Nothing is tried again: the caller may do that.
        """
        topology = check_serving(self._topology())
        for gone in self._lanes.found(topology):
            gone.close()
        leave_out(topology, self.leaving())
        with _LaneCalls(caller, timeout) as calls:
            try:
                return self._answer(request, topology, calls)
            except MoeError as failed:
                raise caller.why_no_answer(failed, request.layer) from failed

    def close(self) -> None:
        """Closes the connections to all lanes."""
        for link in self._lanes.clear():
            link.close()

    def _answer(
        self, request: moe_pb2.ForwardRequest, topology: moe_pb2.GetTopologyReply, calls: _LaneCalls
    ) -> moe_pb2.ForwardReply:
        with self._lanes.begun(topology) as start:
            return self._asked(request, topology, calls, start)

    def _asked(
        self,
        request: moe_pb2.ForwardRequest,
        topology: moe_pb2.GetTopologyReply,
        calls: _LaneCalls,
        start: int,
    ) -> moe_pb2.ForwardReply:
        batch = ClientBatch.of_request(request)
        if batch is not None and len(batch.hidden.storage) >= 2 * SPLIT_ROWS and len(topology.lanes) > 1:
            call = ClientCall(batch, self._lanes, request.model, None, "inline", start, request.job_id)
            try:
                return _in_parts(call, topology, calls)
            except InvalidArgument:
                # A lane that saw a part named the part's shape; one that sees the whole names the caller's.
                calls.end()
        lane = self._lanes.pick(topology, None, start)
        try:
            return calls.send(self._lanes.link(topology, lane), request).wait()
        except MoeError as failed:
            self._lanes.failed(lane.address, failed)
            raise


class _LaneCalls:
    """The calls to lanes for one request, each with its deadline: ended when this is left."""

    def __init__(self, caller: Caller, timeout: float | None) -> None:
        self._caller = caller
        self._timeout = timeout
        self._sent: list[Sent] = []

    def send(self, link: Link, request: moe_pb2.ForwardRequest) -> Sent:
        """Sends `request` to the lane behind `link`, without waiting. Raises MoeError if the caller left."""
        self._caller.check_there()
        sent = link.forward(request, self._timeout)
        self._sent.append(sent)
        self._caller.waits_for(sent)
        return sent

    def end(self) -> None:
        """Cancels the calls that have not ended."""
        while self._sent:
            self._caller.waits_no_more(self._sent.pop())

    def __enter__(self) -> _LaneCalls:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


def _in_parts(
    call: ClientCall[Link], topology: moe_pb2.GetTopologyReply, calls: _LaneCalls
) -> moe_pb2.ForwardReply:
    """The answer of a call whose parts all lanes run at once."""
    parts = call.parts(topology)
    asked: list[tuple[PartCall[Link], Payload, Sent]] = []
    for part in parts:
        link, _ = part.aim(topology)
        payload = part.payload(None, link.regions)
        asked.append((part, payload, calls.send(link, part.request(payload))))
    for part, payload, sent in asked:
        try:
            part.answered(sent.wait(), payload)
        except MoeError as failed:
            part.failed(failed)
            raise
    made = call.reply(parts)
    reply = moe_pb2.ForwardReply(epoch=made.epoch, weights_version=made.weights_version)
    encode_into(reply.hidden, Plain(call.batch.hidden.dtype, np.asarray(made.hidden)))
    return reply
