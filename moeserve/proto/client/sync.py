"""`MoeClient`: a model server's way to its experts. Needs numpy and grpcio, and takes torch tensors too.

with MoeClient("127.0.0.1:7171") as client:
    mixed = client.forward(3, hidden, experts, weights)  # [T, H], like hidden
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, TypeVar, Unpack

import grpc
from numpy.typing import NDArray

from moeserve.proto import health, moe_pb2
from moeserve.proto.channel import MAX_MESSAGE_BYTES
from moeserve.proto.client.batch import Batch, CallOptions, Choice, Logits, Part, Reply, whole
from moeserve.proto.client.call import Call, rows_of
from moeserve.proto.client.lanes import Lanes, check_serving, check_transport
from moeserve.proto.client.link import Attempt, Link, Sent
from moeserve.proto.client.patience import OPERATION_SECONDS, Clock, Patience
from moeserve.proto.client.payload import Payload, shares
from moeserve.proto.client.stream import ForwardStream
from moeserve.proto.errors import MoeError, Unavailable, WeightsChanged, from_rpc
from moeserve.proto.host import host_id
from moeserve.proto.tensors import Array, Spec, known
from moeserve.proto.transports.shared_memory import RemoteRegion, SharedTensor, region_size

T = TypeVar("T")


class MoeClient:
    """Calls the experts behind `address`, the coordinator's; finds the lanes by itself. Safe to use from any
    thread.

    model: which model, empty = the only one served. timeout: seconds a call may take in all, or a Patience.
    lane: the rank whose lane takes every call, None = rows are spread evenly over the lanes (none gets
    fewer than 32 of them, so small batches go whole to one lane, in turn). transport: `inline`,
    `shared_memory` (an error where a lane runs on another host), or `auto`: shared memory for hidden states
    of 32 KiB and more where the lane is near.

    Calls raise MoeError (proto/errors.py), and TensorError for arrays that the contract does not take.
    UNAVAILABLE is tried again until the timeout, on lanes found anew; RESOURCE_EXHAUSTED when the server
    says after which time; nothing else.
    """

    def __init__(
        self,
        address: str,
        *,
        model: str = "",
        timeout: float | Patience = 60.0,
        lane: int | None = None,
        transport: str = "auto",
    ) -> None:
        self.address = address
        self._served = model
        self._patience = Patience.of(timeout)
        self._lane = lane
        self._transport = check_transport(transport)
        self._door = Link(address, MAX_MESSAGE_BYTES)
        self._lanes: Lanes[Link] = Lanes(Link)
        self._finding = threading.Lock()

    def forward(
        self,
        layer: int,
        hidden: Array | SharedTensor,
        experts: Array,
        weights: Array,
        **options: Unpack[CallOptions],
    ) -> Array:
        """One layer's experts, mixed: [T, H] like `hidden` (a torch tensor on the CPU, or a numpy array).

        hidden: [T, H] fp32, bf16 or fp16; experts: [T, K] int32 or int64, -1 = none; weights: [T, K], final.
        """
        return self.call(layer, hidden, Choice(experts, weights), **options).hidden

    def forward_logits(
        self, layer: int, hidden: Array | SharedTensor, logits: Array, **options: Unpack[CallOptions]
    ) -> Array:
        """The same, routed by the service from the router linear's output `logits` [T, E]."""
        return self.call(layer, hidden, Logits(logits), **options).hidden

    def call(
        self, layer: int, hidden: Array | SharedTensor, route: Choice | Logits, **options: Unpack[CallOptions]
    ) -> Reply:
        """The answer with the epoch and the version of the weights that made it."""
        batch = Batch.of(layer, hidden, route, options)
        clock = self._clock(options.get("timeout"))
        asked = options.get("lane")
        bound = batch.lane(self._lane if asked is None else asked)
        return self._run(Call(batch, self._served, bound, clock, self._lanes.turn()))

    def allocate(self, lane: int, shape: Sequence[int], dtype: str = "bf16") -> SharedTensor:
        """A tensor in shared memory of a lane, to fill and pass as `hidden`, or to pass as `output`.

        Raises MoeError where the lane cannot share memory with this process.
        """
        clock = self._clock(None)
        spec = Spec(known("dtype", dtype), tuple(int(size) for size in shape))

        def make() -> RemoteRegion:
            topology = self._topology(clock)
            found = self._lanes.pick(topology, lane, 0)
            shares("shared_memory", spec.nbytes, found, host_id())
            return self._lanes.link(topology, found).region(region_size(spec.nbytes), clock.remaining)

        return SharedTensor(self._patiently(clock, make), 0, spec, lane)

    def stream(self, lane: int) -> ForwardStream:
        """A stream of one's own to a lane, for requests made by hand; the caller closes it."""
        clock = self._clock(None)
        topology = self._patiently(clock, lambda: self._topology(clock))
        return self._lanes.link(topology, self._lanes.pick(topology, lane, 0)).streams.take()

    def topology(self) -> moe_pb2.GetTopologyReply:
        """The lanes, asked for anew."""
        reply: moe_pb2.GetTopologyReply = self._ask("GetTopology", moe_pb2.GetTopologyRequest())
        return reply

    def model(self, *, placement: bool = False) -> moe_pb2.GetModelReply:
        """What is served; with `placement`, also which expert lies in which slot."""
        reply: moe_pb2.GetModelReply = self._ask("GetModel", moe_pb2.GetModelRequest(placement=placement))
        return reply

    def status(self, *, experts: bool = False) -> moe_pb2.GetStatusReply:
        """How the service is doing; with `experts`, also how many tokens each expert got."""
        reply: moe_pb2.GetStatusReply = self._ask("GetStatus", moe_pb2.GetStatusRequest(experts=experts))
        return reply

    def rebalance(
        self,
        *,
        policy: str = "",
        max_moves: int = 0,
        dry_run: bool = False,
        timeout: float = OPERATION_SECONDS,
    ) -> moe_pb2.RebalanceReply:
        """Moves experts while the service runs, and waits for it; with `dry_run`, only what that would do.

        policy: a balancing policy's name, empty = the configured one; max_moves: over all layers, 0 = as many
        as pay. The reply says how it ended, with the reason where that is `abandoned` or `failed`. Raises
        InvalidArgument for an unknown policy, MoeError where ranks hold slices of every expert, Unavailable
        where the service does not serve; nothing is tried again.
        """
        request = moe_pb2.RebalanceRequest(policy=policy, max_moves=max_moves, dry_run=dry_run)
        reply: moe_pb2.RebalanceReply = self._door.unary("Rebalance", request, timeout)
        return reply

    def reload(self, checkpoint: str, *, timeout: float = OPERATION_SECONDS) -> moe_pb2.ReloadReply:
        """Brings every layer to the weights in `checkpoint` while the service runs, and waits for it.

        checkpoint: a folder by its absolute path on the service's hosts, with experts of the same shapes. The
        reply says how it ended, and has the version to demand in calls from then on. Raises InvalidArgument
        for a checkpoint that does not fit, Unavailable where the service does not serve; nothing is tried
        again.
        """
        request = moe_pb2.ReloadRequest(checkpoint=checkpoint)
        reply: moe_pb2.ReloadReply = self._door.unary("Reload", request, timeout)
        return reply

    def health(self, service: str = health.SERVICE) -> str:
        """`SERVING`, `NOT_SERVING` or `UNKNOWN`, by grpc.health.v1; NotFound for an unknown service."""
        check = self._door.channel.unary_unary(health.METHOD)
        try:
            return health.decode_check(check(health.encode_check(service), timeout=self._patience.timeout))
        except grpc.RpcError as failed:
            raise from_rpc(failed) from failed

    def close(self) -> None:
        """Closes all connections and gives all regions back."""
        for link in self._lanes.clear():
            link.close()
        self._door.close()

    def __enter__(self) -> MoeClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _clock(self, timeout: float | Patience | None) -> Clock:
        return Clock(self._patience if timeout is None else Patience.of(timeout))

    def _ask(self, name: str, request: Any) -> Any:
        return self._door.unary(name, request, self._patience.timeout)

    def _run(self, call: Call) -> Reply:
        """The answer; asked for whole again where its parts saw different weights."""
        number = 0
        while True:
            try:
                return self._once(call)
            except WeightsChanged as changed:
                wait = call.clock.wait_after(changed, number)
            time.sleep(wait)
            number += 1

    def _once(self, call: Call) -> Reply:
        topology = self._patiently(call.clock, lambda: self._topology(call.clock))
        parts = call.parts(topology)
        joined = whole(call.batch, parts)
        attempts = [self._start(call, part, 0) for part in parts]
        replies: list[moe_pb2.ForwardReply] = []
        try:
            for part, attempt in zip(parts, attempts, strict=True):
                reply, answer = self._finish(call, part, attempt, into=rows_of(joined, part))
                replies.append(reply)
        finally:
            for attempt in attempts:
                attempt.abandon()
        return call.batch.reply(answer if joined is None else joined, replies)

    def _start(self, call: Call, part: Part, number: int) -> Attempt:
        """Sends an attempt at one part; a failure to send is told by its `finish`, like any other."""
        topology: moe_pb2.GetTopologyReply | None = None
        payload: Payload | None = None
        try:
            topology = self._topology(call.clock)
            lane = self._lanes.pick(topology, call.bound, call.turn + part.index + number)
            link = self._lanes.link(topology, lane)
            size = call.region_size(part, lane, self._transport)
            region = link.region(size, call.clock.remaining) if size else None
            payload = call.payload(part, region, link.regions)
            request = call.request(part, number)
            sent = link.send(request, payload, call.clock.remaining, alone=call.is_whole(part))
            return Attempt(sent, payload, topology)
        except MoeError as failed:
            return Attempt(Sent.failed(failed), payload, topology)

    def _finish(
        self, call: Call, part: Part, attempt: Attempt, *, into: NDArray[Any] | None
    ) -> tuple[moe_pb2.ForwardReply, NDArray[Any]]:
        """Waits for one part, over as many attempts as it takes."""
        number = 0
        while True:
            try:
                return attempt.finish(into)
            except MoeError as failed:
                if isinstance(failed, Unavailable):
                    self._lanes.doubt(attempt.topology)
                wait = call.clock.wait_after(failed, number)
            finally:
                attempt.abandon()
            time.sleep(wait)
            number += 1
            attempt = self._start(call, part, number)

    def _patiently(self, clock: Clock, act: Callable[[], T]) -> T:
        """What `act` returns, over as many attempts as it takes."""
        number = 0
        while True:
            try:
                return act()
            except MoeError as failed:
                time.sleep(clock.wait_after(failed, number))
                number += 1

    def _topology(self, clock: Clock) -> moe_pb2.GetTopologyReply:
        """The lanes as last found, or found now."""
        current = self._lanes.current
        if current is not None:
            return current
        if not self._finding.acquire(timeout=clock.remaining):
            raise clock.expired()
        try:
            current = self._lanes.current
            if current is None:
                request = moe_pb2.GetTopologyRequest()
                current = check_serving(self._door.unary("GetTopology", request, clock.remaining))
                for gone in self._lanes.found(current):
                    gone.close()
            return current
        finally:
            self._finding.release()
