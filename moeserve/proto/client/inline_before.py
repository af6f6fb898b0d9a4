"""`InlineBefore`: inline calls that were answered before; the next of such arrays is a copy of its request.

What calls of the same shapes have alike was checked and put together once. To do it anew takes a client of
one row as long as a third of the way to the lane and back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moeserve.proto import moe_pb2
from moeserve.proto.client.again import new_job_id
from moeserve.proto.client.batch import CallOptions, Choice, Logits, Reply
from moeserve.proto.client.call import ClientCall
from moeserve.proto.client.core import Core
from moeserve.proto.client.patience import Clock
from moeserve.proto.client.payload import InlineRows, shares
from moeserve.proto.client.sync_link import Link
from moeserve.proto.errors import MoeError
from moeserve.proto.host import host_id
from moeserve.proto.tensors import Array, Plain, plain, restore
from moeserve.proto.transports.shared_memory import SharedTensor

MOST_KNOWN = 256
"""Calls that are remembered; then they are learned anew. One is a request of some 100 bytes."""

Key = tuple[object, ...]

Batch = tuple[int, "Array | SharedTensor", Choice | Logits]
"""A call's layer, hidden states and route."""


@dataclass(frozen=True, eq=False)
class Known:
    """A call that was answered."""

    topology: moe_pb2.GetTopologyReply
    bound: int | None
    request: moe_pb2.ForwardRequest  # without arrays and id


class InlineAgain:
    """A call that is about to be made as one before it, over a data connection of a lane."""

    def __init__(self, link: Link, known: moe_pb2.ForwardRequest, batch: Batch, options: CallOptions) -> None:
        """known: the request, without arrays and id."""
        self.job_id = new_job_id()
        self.failed: MoeError | None = None  # how the attempt ended
        self._link, self._known, self._batch, self._options = link, known, batch, options

    def asked(self, clock: Clock) -> Reply | None:
        """The answer; None where the attempt `failed`, and where the lane has no data connection.

        Raises TensorError for arrays that the contract does not take, and for an answer that is not like the
        question.
        """
        if (connection := self._link.connection(clock)) is None:
            return None
        like = self._batch[1]
        try:
            request, payload = self._request()
            message = payload.sent(request)
        except BaseException:
            self._link.give(connection)
            raise
        try:
            reply = self._link.past_grpc(connection, message, payload, clock).wait()
        except MoeError as failed:
            self.failed = failed
            return None
        made = Plain(payload.dtype, payload.answer(reply, None))
        return Reply(restore(made, like), reply.epoch, reply.weights_version)  # type: ignore[arg-type]

    def _request(self) -> tuple[moe_pb2.ForwardRequest, InlineRows]:
        _, hidden, route = self._batch
        dtype = self._options.get("dtype", "")
        payload = InlineRows(plain(hidden, "hidden", dtype=dtype))  # type: ignore[arg-type]
        payload.carry(self._link.carries_from)
        request = moe_pb2.ForwardRequest()
        request.CopyFrom(self._known)
        request.job_id = f"{self.job_id}.0"
        payload.fill(request)
        if isinstance(route, Logits):
            request.logits.data = plain(route.logits, "logits", dtype=dtype).storage.tobytes()
        else:
            request.choice.ids.data = plain(route.experts, "choice.ids").storage.tobytes()
            weights = plain(route.weights, "choice.weights", dtype=dtype)
            request.choice.weights.data = weights.storage.tobytes()
        return request, payload


class InlineBefore:
    """The inline calls of one client that were answered before. Safe from any thread."""

    def __init__(self, core: Core[Link]) -> None:
        self._core = core
        self._known: dict[Key, Known] = {}

    def find(
        self, topology: moe_pb2.GetTopologyReply | None, batch: Batch, options: CallOptions
    ) -> Known | None:
        """A call like this one that was answered before, under the same `topology`; None: it is made in
        full.
        """
        if topology is None or not self._known:
            return None
        if isinstance(batch[1], SharedTensor) or (key := _key(batch, options)) is None:
            return None
        known = self._known.get(key)
        return known if known is not None and known.topology is topology else None

    def again(self, known: Known, start: int, batch: Batch, options: CallOptions) -> InlineAgain | None:
        """A call like a known one, to the lane of this number, or that which it is bound to; None: it is made
        in full.
        """
        lanes, topology = self._core.lanes, known.topology
        try:
            lane = lanes.pick(topology, known.bound, start)
            return InlineAgain(lanes.link(topology, lane), known.request, batch, options)
        except MoeError:  # it is said by the call itself
            return None

    def learn(
        self,
        topology: moe_pb2.GetTopologyReply | None,
        batch: Batch,
        options: CallOptions,
        call: ClientCall[Link],
    ) -> None:
        """Takes note of a call that was answered, where the next one may be a copy of it."""
        if topology is None or call.batch.placed or (key := _key(batch, options)) is None:
            return
        if call.transport == "shared_memory":
            return
        nbytes, host = call.batch.hidden.spec.nbytes, host_id()
        if any(shares(call.transport, nbytes, one, host) for one in topology.lanes):
            return
        if len(parts := call.parts(topology)) > 1:
            return
        rows = InlineRows(call.batch.hidden)
        rows.carry(0)
        bare = parts[0].request(rows)
        bare.job_id, bare.attempt = "", 0
        bare.ClearField("hidden")
        tensors = (bare.logits,) if isinstance(batch[2], Logits) else (bare.choice.ids, bare.choice.weights)
        for tensor in tensors:
            tensor.ClearField("data")
        if len(self._known) >= MOST_KNOWN:
            self._known = {}
        self._known[key] = Known(topology, call.bound, bare)


def _key(batch: Batch, options: CallOptions) -> Key | None:
    """What calls that are copies of one another have alike; None where an array does not say so."""
    layer, hidden, route = batch
    arrays: tuple[Any, ...] = (hidden,)
    arrays += (route.logits,) if isinstance(route, Logits) else (route.experts, route.weights)
    try:
        said = [(type(array), array.dtype, tuple(array.shape)) for array in arrays]
        more = options.get("lane"), options.get("dtype"), options.get("weights_version")
        key = layer, type(layer), options.get("output") is None, *said, *more
        hash(key)
    except (AttributeError, TypeError):  # a list, say; or another type of layer, which the call refuses
        return None
    return key
