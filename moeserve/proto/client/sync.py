"""`MoeClient`: a model server's way to its experts. Needs numpy and grpcio, and takes torch tensors too.

with MoeClient("127.0.0.1:50051") as client:
    mixed = client.forward(3, hidden, experts, weights)  # [T, H], like hidden
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, TypeVar, Unpack

import grpc

from moeserve.proto import health, moe_pb2
from moeserve.proto.channel import MAX_MESSAGE_BYTES
from moeserve.proto.client.again import Again, AskedBefore
from moeserve.proto.client.batch import CallOptions, Choice, Logits, Reply, check_lane_named, check_options
from moeserve.proto.client.call import ClientCall, PartCall
from moeserve.proto.client.core import Core, Settings
from moeserve.proto.client.inline_before import Batch, InlineAgain, InlineBefore, Known
from moeserve.proto.client.lanes import ASK_SECONDS, asking_for, check_serving
from moeserve.proto.client.patience import OPERATION_SECONDS, Clock, Patience, Retries, is_whole
from moeserve.proto.client.payload import InlineRows, Payload
from moeserve.proto.client.stream import ForwardStream
from moeserve.proto.client.sync_link import Attempt, Link, Sent
from moeserve.proto.credentials import Credentials
from moeserve.proto.errors import MoeError, WeightsChanged, client_closed, from_rpc
from moeserve.proto.tensors import Array, spec_named
from moeserve.proto.transports.shared_memory import RemoteRegion, SharedTensor

T = TypeVar("T")

log = logging.getLogger(__name__)


class MoeClient:
    """Calls the experts behind `address`, the coordinator's; finds the lanes by itself. Safe to use from any
    thread.

    model: which model, empty = the only one served. timeout: seconds a call may take in all, or a Patience.
    lane: the rank whose lane takes every call, None = each goes to a lane of which this client has the fewest
    calls under way, so that a caller alone stays at one, and only large ones to several: rows in shared
    memory where one lane does not hold them all, inline ones from 1024 rows on, none of which gets fewer than
    512. transport: `inline` (over data connections past gRPC where lanes have them),
    `shared_memory` (an error where a lane runs on another host), or `auto`: shared memory for hidden states
    of 2 KiB and more where the lane is near. credentials: what to trust and show (proto/credentials.py),
    None = a plain connection and no token.

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
        credentials: Credentials | None = None,
    ) -> None:
        self.address = address
        connect = partial(Link, credentials=credentials)
        self._core = Core(connect, Settings(model, Patience.of(timeout), lane, transport))
        self._door = connect(address, MAX_MESSAGE_BYTES)
        self._finding = threading.Lock()
        self._before, self._inline = AskedBefore(), InlineBefore(self._core)

    def forward(
        self,
        layer: int,
        hidden: Array | SharedTensor,
        experts: Array,
        weights: Array,
        **options: Unpack[CallOptions],
    ) -> Array:
        """One layer's experts, mixed: [T, H] like `hidden` (a torch tensor on the CPU, or a numpy array).
        With `output`, or a SharedTensor as `hidden`, it is a numpy array (bfloat16 by ml_dtypes where that is
        installed, else as uint16 bits).

        hidden: [T, H] fp32, bf16 or fp16; experts: [T, K] int32 or int64, -1 = none; weights: [T, K], final.
        K is the model's: who has fewer fills up with -1. Raises MoeError; and TensorError, ValueError and
        TypeError for arguments that no service would take.
        """
        return self.call(layer, hidden, Choice(experts, weights), **options).hidden

    def forward_logits(
        self, layer: int, hidden: Array | SharedTensor, logits: Array, **options: Unpack[CallOptions]
    ) -> Array:
        """Does as `forward`, routed by the service from the router linear's output `logits` [T, E]."""
        return self.call(layer, hidden, Logits(logits), **options).hidden

    def call(
        self, layer: int, hidden: Array | SharedTensor, route: Choice | Logits, **options: Unpack[CallOptions]
    ) -> Reply:
        """The answer with the epoch and the version of the weights that made it."""
        check_options(options)
        clock, lanes = self._core.clock(options.get("timeout")), self._core.lanes
        if lanes.due():
            self._find_anew()
        batch, topology = (layer, hidden, route), lanes.current
        again = self._before.find(topology, batch, options)
        if again is not None and (reply := again.asked(clock)) is not None:
            return reply
        known = self._inline.find(topology, batch, options) if again is None else None
        if known is not None:
            return self._alike(known, batch, options, clock)
        call = self._core.call(layer, hidden, route, options)
        found = self._patiently(clock, lambda: self._topology(clock))
        with lanes.begun(found, call.bound) as start:
            reply = self._in_full(replace(call, start=start), clock, again)
        if again is None and topology is lanes.current:
            self._before.learn(topology, batch, options, call.placed_request)
            self._inline.learn(topology, batch, options, call)
        return reply

    def _alike(self, known: Known, batch: Batch, options: CallOptions, clock: Clock) -> Reply:
        """The answer to an inline call like one that was answered before; it is made in full where that is
        in vain.
        """
        with self._core.lanes.begun(known.topology, known.bound) as start:
            again = self._inline.again(known, start, batch, options)
            if again is not None and (reply := again.asked(clock)) is not None:
                return reply
            layer, hidden, route = batch
            call = replace(self._core.call(layer, hidden, route, options), start=start)
            return self._in_full(call, clock, again)

    def _in_full(self, call: ClientCall[Link], clock: Clock, again: Again | InlineAgain | None) -> Reply:
        """The answer to a call that is asked for whole again where its parts saw different weights. again:
        the first attempt at its only part, which gave none.
        """
        failed = None if again is None else again.failed
        if again is not None and failed is not None:
            call = replace(call, job_id=again.job_id)
        return self._patiently(clock, lambda: self._once(call, clock, failed), retried=WeightsChanged)

    def allocate(self, lane: int, shape: Sequence[int], dtype: str = "bf16") -> SharedTensor:
        """A tensor in shared memory of a lane, to fill and pass as `hidden`, or to pass as `output`.

        The lane's rank writes the answer there itself. After a call that failed, by its deadline for example,
        its step may still be under way and write there, until the next call with this output is answered.

        Raises MoeError where the lane cannot share memory with this process, and TensorError for a dtype or
        shape that is none.
        """
        check_lane_named(lane)
        clock, spec = self._core.clock(None), spec_named(dtype, shape)

        def make() -> RemoteRegion:
            topology = self._topology(clock)
            with self._core.lanes.relied_on(topology):
                link, size = self._core.place(topology, lane, spec)
                return link.region(size, clock.remaining)

        return SharedTensor(self._patiently(clock, make), 0, spec, lane)

    def stream(self, lane: int) -> ForwardStream:
        """A stream of one's own to a lane, for requests made by hand; the caller closes it."""
        clock, lanes = self._core.clock(None), self._core.lanes
        lanes.be_unsure()  # requests made by hand tell nobody that another process has the lane
        topology = self._patiently(clock, lambda: self._topology(clock))
        return lanes.link(topology, lanes.pick(topology, lane, 0)).streams.take()

    def topology(self) -> moe_pb2.GetTopologyReply:
        """Asks the front door for the lanes that are up now."""
        request = moe_pb2.GetTopologyRequest()
        reply: moe_pb2.GetTopologyReply = self._ask(self._door.front.GetTopology, request)
        reply.ClearField("begin_at")  # it is for who calls lanes
        return reply

    def model(self, *, placement: bool = False) -> moe_pb2.GetModelReply:
        """Asks what is served; with `placement`, also which expert lies in which slot."""
        request = moe_pb2.GetModelRequest(placement=placement)
        reply: moe_pb2.GetModelReply = self._ask(self._door.front.GetModel, request)
        return reply

    def status(self, *, experts: bool = False) -> moe_pb2.GetStatusReply:
        """Asks how the service is doing; with `experts`, also how many tokens each expert got."""
        request = moe_pb2.GetStatusRequest(experts=experts)
        reply: moe_pb2.GetStatusReply = self._ask(self._door.front.GetStatus, request)
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
        reply: moe_pb2.RebalanceReply = self._ask(self._door.admin.Rebalance, request, timeout)
        return reply

    def reload(self, checkpoint: str, *, timeout: float = OPERATION_SECONDS) -> moe_pb2.ReloadReply:
        """Brings every layer to the weights in `checkpoint` while the service runs, and waits for it.

        checkpoint: a folder by its absolute path on the service's hosts, with experts of the same shapes. The
        reply says how it ended, and has the version to demand in calls from then on. Raises InvalidArgument
        for a checkpoint that does not fit, Unavailable where the service does not serve; nothing is tried
        again.
        """
        request = moe_pb2.ReloadRequest(checkpoint=checkpoint)
        reply: moe_pb2.ReloadReply = self._ask(self._door.admin.Reload, request, timeout)
        return reply

    def scale(self, ranks: int, *, timeout: float = OPERATION_SECONDS) -> moe_pb2.ScaleReply:
        """Has the service run with so many ranks, while it serves, and waits for it.

        New ranks load their experts first, and join between two steps. Ranks that leave take no further call,
        and their experts move before they go. The reply says how it ended. Raises MoeError (`cannot_scale`)
        for more ranks than the service has room for, fewer than hold all experts, or where ranks cannot come
        or go at all; Unavailable where the service does not serve; nothing is tried again.
        """
        if not is_whole(ranks) or not 0 < ranks < 1 << 32:
            raise ValueError(f"ranks={ranks!r} must be a whole number of 1 to {(1 << 32) - 1}")
        request = moe_pb2.ScaleRequest(ranks=ranks)
        reply: moe_pb2.ScaleReply = self._ask(self._door.admin.Scale, request, timeout)
        return reply

    def set_log_level(self, level: str = "", logger: str = "") -> moe_pb2.SetLogLevelReply:
        """Sets how much the head and all ranks log: debug, info, warning or error; empty: changes nothing.

        logger: whose lines, such as moeserve.runtime.head or grpc; empty: all of moeserve's. The reply has
        the levels that were set. Raises InvalidArgument for an unknown logger or level.
        """
        request = moe_pb2.SetLogLevelRequest(level=level, logger=logger)
        reply: moe_pb2.SetLogLevelReply = self._ask(self._door.admin.SetLogLevel, request)
        return reply

    def health(self, service: str = health.SERVICE) -> str:
        """`SERVING`, `NOT_SERVING` or `UNKNOWN`, by grpc.health.v1; NotFound for an unknown service."""
        self._check_open()
        check = self._door.channel.unary_unary(health.METHOD)
        try:
            return health.decode_check(check(health.encode_check(service), timeout=self._core.seconds))
        except grpc.RpcError as failed:
            raise from_rpc(failed, self.address, self._core.seconds) from failed

    def close(self) -> None:
        """Closes all connections and gives all regions back; calls under way, and later ones, raise MoeError
        (`client_closed`).
        """
        self._door.close(ending=True)  # first: what fails from now on is not tried again
        for link in self._core.lanes.clear():
            link.close(ending=True)

    def __enter__(self) -> MoeClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, method: Callable[..., Any], request: Any, timeout: float | None = None) -> Any:
        seconds = self._core.seconds if timeout is None else Patience.of(timeout).seconds
        self._check_open()
        try:
            return self._door.unary(method, request, seconds)
        except MoeError as failed:
            if self._door.closed:  # meanwhile
                raise client_closed(self.address) from failed
            raise

    def _check_open(self) -> None:
        if self._door.closed:
            raise client_closed(self.address)

    def _once(self, call: ClientCall[Link], clock: Clock, failed: MoeError | None = None) -> Reply:
        """Asks for all parts and joins them. Raises WeightsChanged where they saw different weights.

        failed: how the first attempt at its only part has ended.
        """
        parts = call.parts(self._patiently(clock, lambda: self._topology(clock)))
        attempts = [self._start(part, clock, failed) for part in parts]
        try:
            for part, attempt in zip(parts, attempts, strict=True):
                self._finish(part, attempt, clock)
        finally:
            for attempt in attempts:
                attempt.abandon()
        return call.reply(parts)

    def _start(self, part: PartCall[Link], clock: Clock, earlier: MoeError | None = None) -> Attempt:
        """Sends an attempt at one part; a failure to send is told by its `finish`, like any other.

        earlier: how it has ended already, before its part was made.
        """
        payload: Payload | None = None
        try:
            link, size = part.aim(self._topology(clock))
            if earlier is not None:
                raise earlier
            region = self._region(part, link, size, clock) if size else None
            payload = part.payload(region, link.regions)
            if isinstance(payload, InlineRows):
                payload.carry(link.carries_from)
            sent = link.send(part.request(payload), payload, clock, alone=part.alone)
        except MoeError as failed:
            sent = Sent.failed(failed)
        return Attempt(part, sent, payload)

    def _region(self, part: PartCall[Link], link: Link, size: int, clock: Clock) -> RemoteRegion | None:
        """A region for the part's rows; None where they ride inline, since the lane has none."""
        try:
            return link.region(size, clock.remaining)
        except MoeError as failed:
            part.without_region(failed)
            return None

    def _finish(self, part: PartCall[Link], first: Attempt, clock: Clock) -> None:
        """Waits for one part, over as many attempts as it takes."""
        started = [first]

        def finish() -> None:
            attempt = started.pop() if started else self._start(part, clock)
            try:
                attempt.finish()
            finally:
                attempt.abandon()

        self._patiently(clock, finish)

    def _patiently(self, clock: Clock, act: Callable[[], T], *, retried: type[MoeError] = MoeError) -> T:
        """What `act` returns, tried again after each `retried` for as long as the clock allows."""
        retries = Retries(clock)
        while True:
            try:
                return act()
            except retried as failed:
                if self._door.closed:
                    raise client_closed(self.address) from failed
                wait = retries.wait_after(failed)
            time.sleep(wait)

    def _find_anew(self) -> None:
        """Asks for the lanes, and waits for no answer: what was found serves as long."""
        try:
            asked = self._door.front.GetTopology.future(moe_pb2.GetTopologyRequest(), timeout=ASK_SECONDS)
        except ValueError:  # this client is closed, which its call says
            return
        asked.add_done_callback(self._found_anew)

    def _found_anew(self, asked: Any) -> None:
        try:
            topology = check_serving(asked.result())
        except (grpc.RpcError, grpc.FutureCancelledError, MoeError) as failed:  # calls say what is wrong
            log.debug("%s was asked for its lanes, and has not said them: %s", self.address, failed)
            return
        if not self._door.closed:
            for gone in self._core.lanes.found(topology):
                gone.close()

    def _topology(self, clock: Clock) -> moe_pb2.GetTopologyReply:
        """The lanes as last found, or found now."""
        lanes = self._core.lanes
        current = lanes.known()
        if current is not None:
            return current
        before = lanes.current
        if not self._finding.acquire(timeout=clock.remaining):
            raise clock.expired()
        try:
            current = lanes.current
            if current is None or current is before:
                request, seconds = moe_pb2.GetTopologyRequest(), asking_for(clock.remaining, before)
                try:
                    current = check_serving(self._door.unary(self._door.front.GetTopology, request, seconds))
                except MoeError as failed:
                    return lanes.goes_on(failed)
                for gone in lanes.found(current):
                    gone.close()
            return current
        finally:
            self._finding.release()
