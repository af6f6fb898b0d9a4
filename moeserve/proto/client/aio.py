"""`AsyncMoeClient`: MoeClient for programs on asyncio, with the same arguments, answers and errors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, TypeVar, Unpack

import grpc

from moeserve.proto import health, moe_pb2
from moeserve.proto.channel import MAX_MESSAGE_BYTES
from moeserve.proto.client.aio_link import AsyncLink
from moeserve.proto.client.batch import CallOptions, Choice, Logits, Reply, check_lane_named, check_options
from moeserve.proto.client.call import ClientCall, PartCall
from moeserve.proto.client.core import Core, Settings
from moeserve.proto.client.lanes import ASK_SECONDS, asking_for, check_serving
from moeserve.proto.client.patience import OPERATION_SECONDS, Clock, Patience, Retries, is_whole
from moeserve.proto.client.payload import InlineRows
from moeserve.proto.credentials import Credentials
from moeserve.proto.errors import MoeError, WeightsChanged, client_closed, from_rpc
from moeserve.proto.tensors import Array, spec_named
from moeserve.proto.transports.shared_memory import RemoteRegion, SharedTensor

T = TypeVar("T")

log = logging.getLogger(__name__)


class AsyncMoeClient:
    """Calls the experts behind `address` from one event loop, that of its first call; MoeClient says what
    arguments mean.

    A call that is cancelled is given up on its lane too; one whose answer goes to memory of `allocate` may
    still write there, as `MoeClient.allocate` has it of calls that failed.
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
        self._connect = partial(AsyncLink, credentials=credentials)
        self._core = Core(self._connect, Settings(model, Patience.of(timeout), lane, transport))
        self._of_loop: tuple[asyncio.AbstractEventLoop, AsyncLink] | None = None
        if credentials is not None:
            credentials.check_address(address)
        self._finding = asyncio.Lock()
        self._anew: asyncio.Task[None] | None = None  # asks for the lanes beside calls

    @property
    def _door(self) -> AsyncLink:
        """The way to the front door, made by the first call: gRPC binds it to the event loop that runs then.
        Raises RuntimeError in another one.
        """
        loop = asyncio.get_running_loop()
        if self._of_loop is None:
            self._of_loop = loop, self._connect(self.address, MAX_MESSAGE_BYTES)
        of, door = self._of_loop
        if of is not loop:
            raise RuntimeError("this client belongs to another event loop; make another one in this loop")
        return door

    # Options are checked when these are called, before anybody awaits them; so they are no `async def`.

    def forward(
        self,
        layer: int,
        hidden: Array | SharedTensor,
        experts: Array,
        weights: Array,
        **options: Unpack[CallOptions],
    ) -> Coroutine[Any, Any, Array]:
        """One layer's experts, mixed: as MoeClient.forward."""
        check_options(options)
        return self._hidden(layer, hidden, Choice(experts, weights), options)

    def forward_logits(
        self, layer: int, hidden: Array | SharedTensor, logits: Array, **options: Unpack[CallOptions]
    ) -> Coroutine[Any, Any, Array]:
        """Does as `forward`, routed by the service from the router linear's output `logits` [T, E]."""
        check_options(options)
        return self._hidden(layer, hidden, Logits(logits), options)

    def call(
        self, layer: int, hidden: Array | SharedTensor, route: Choice | Logits, **options: Unpack[CallOptions]
    ) -> Coroutine[Any, Any, Reply]:
        """The answer with the epoch and the version of the weights that made it."""
        check_options(options)
        return self._reply(layer, hidden, route, options)

    async def allocate(self, lane: int, shape: Sequence[int], dtype: str = "bf16") -> SharedTensor:
        """A tensor in shared memory of a lane: as MoeClient.allocate."""
        check_lane_named(lane)
        clock, spec = self._core.clock(None), spec_named(dtype, shape)

        async def make() -> RemoteRegion:
            topology = await self._topology(clock)
            with self._core.lanes.relied_on(topology):
                link, size = self._core.place(topology, lane, spec)
                return await link.region(size, clock.remaining)

        return SharedTensor(await self._patiently(clock, make), 0, spec, lane)

    async def topology(self) -> moe_pb2.GetTopologyReply:
        """Asks the front door for the lanes that are up now."""
        request = moe_pb2.GetTopologyRequest()
        reply: moe_pb2.GetTopologyReply = await self._ask(self._door.front.GetTopology, request)
        reply.ClearField("begin_at")  # it is for who calls lanes
        return reply

    async def model(self, *, placement: bool = False) -> moe_pb2.GetModelReply:
        """Asks what is served; with `placement`, also which expert lies in which slot."""
        request = moe_pb2.GetModelRequest(placement=placement)
        reply: moe_pb2.GetModelReply = await self._ask(self._door.front.GetModel, request)
        return reply

    async def status(self, *, experts: bool = False) -> moe_pb2.GetStatusReply:
        """Asks how the service is doing; with `experts`, also how many tokens each expert got."""
        request = moe_pb2.GetStatusRequest(experts=experts)
        reply: moe_pb2.GetStatusReply = await self._ask(self._door.front.GetStatus, request)
        return reply

    async def rebalance(
        self,
        *,
        policy: str = "",
        max_moves: int = 0,
        dry_run: bool = False,
        timeout: float = OPERATION_SECONDS,
    ) -> moe_pb2.RebalanceReply:
        """Moves experts while the service runs: as MoeClient.rebalance."""
        request = moe_pb2.RebalanceRequest(policy=policy, max_moves=max_moves, dry_run=dry_run)
        reply: moe_pb2.RebalanceReply = await self._ask(self._door.admin.Rebalance, request, timeout)
        return reply

    async def reload(self, checkpoint: str, *, timeout: float = OPERATION_SECONDS) -> moe_pb2.ReloadReply:
        """Brings every layer to the weights in `checkpoint`: as MoeClient.reload."""
        request = moe_pb2.ReloadRequest(checkpoint=checkpoint)
        reply: moe_pb2.ReloadReply = await self._ask(self._door.admin.Reload, request, timeout)
        return reply

    async def scale(self, ranks: int, *, timeout: float = OPERATION_SECONDS) -> moe_pb2.ScaleReply:
        """Has the service run with so many ranks, while it serves, and waits for it.

        New ranks load their experts first, and join between two steps. Ranks that leave take no further call,
        and their experts move before they go. The reply says how it ended. Raises MoeError (`cannot_scale`)
        for more ranks than the service has room for, fewer than hold all experts, or where ranks cannot come
        or go at all; Unavailable where the service does not serve; nothing is tried again.
        """
        if not is_whole(ranks) or not 0 < ranks < 1 << 32:
            raise ValueError(f"ranks={ranks!r} must be a whole number of 1 to {(1 << 32) - 1}")
        request = moe_pb2.ScaleRequest(ranks=ranks)
        reply: moe_pb2.ScaleReply = await self._ask(self._door.admin.Scale, request, timeout)
        return reply

    async def set_log_level(self, level: str = "", logger: str = "") -> moe_pb2.SetLogLevelReply:
        """Sets how much the head and all ranks log: debug, info, warning or error; empty: changes nothing.

        logger: whose lines, such as moeserve.runtime.head or grpc; empty: all of moeserve's. The reply has
        the levels that were set. Raises InvalidArgument for an unknown logger or level.
        """
        request = moe_pb2.SetLogLevelRequest(level=level, logger=logger)
        reply: moe_pb2.SetLogLevelReply = await self._ask(self._door.admin.SetLogLevel, request)
        return reply

    async def health(self, service: str = health.SERVICE) -> str:
        """`SERVING`, `NOT_SERVING` or `UNKNOWN`, by grpc.health.v1; NotFound for an unknown service."""
        self._check_open()
        check = self._door.channel.unary_unary(health.METHOD, None, None)
        try:
            reply = await check(health.encode_check(service), timeout=self._core.seconds)
        except grpc.RpcError as failed:
            raise from_rpc(failed, self.address, self._core.seconds) from failed
        return health.decode_check(reply)

    async def close(self) -> None:
        """Closes all connections and gives all regions back; calls under way, and later ones, raise MoeError
        (`client_closed`).
        """
        if self._of_loop is not None and self._of_loop[0].is_closed():
            for link in (self._of_loop[1], *self._core.lanes.clear()):
                link.forget()
            return
        if self._anew is not None:
            self._anew.cancel()
        await self._door.close()  # first: what fails from now on is not tried again
        for link in self._core.lanes.clear():
            await link.close()

    async def __aenter__(self) -> AsyncMoeClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _ask(self, method: Callable[..., Any], request: Any, timeout: float | None = None) -> Any:
        seconds = self._core.seconds if timeout is None else Patience.of(timeout).seconds
        self._check_open()
        try:
            return await self._door.unary(method, request, seconds)
        except MoeError as failed:
            if self._door.closed:  # meanwhile
                raise client_closed(self.address) from failed
            raise

    def _check_open(self) -> None:
        if self._door.closed:
            raise client_closed(self.address)

    async def _hidden(
        self, layer: int, hidden: Array | SharedTensor, route: Choice | Logits, options: CallOptions
    ) -> Array:
        return (await self._reply(layer, hidden, route, options)).hidden

    async def _reply(
        self, layer: int, hidden: Array | SharedTensor, route: Choice | Logits, options: CallOptions
    ) -> Reply:
        self._check_open()
        checked, lanes = self._core.call(layer, hidden, route, options), self._core.lanes
        if lanes.due():
            self._anew = asyncio.create_task(self._find_anew())
        clock = self._core.clock(options.get("timeout"))
        topology = await self._patiently(clock, lambda: self._topology(clock))
        with lanes.begun(topology, checked.bound) as start:
            call = replace(checked, start=start)
            # asked for whole again where its parts saw different weights
            return await self._patiently(clock, lambda: self._once(call, clock), retried=WeightsChanged)

    async def _once(self, call: ClientCall[AsyncLink], clock: Clock) -> Reply:
        """Asks for all parts and joins them. Raises WeightsChanged where they saw different weights."""
        parts = call.parts(await self._patiently(clock, lambda: self._topology(clock)))
        tasks = [asyncio.create_task(self._part(part, clock)) for part in parts]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return call.reply(parts)

    async def _part(self, part: PartCall[AsyncLink], clock: Clock) -> None:
        """Asks for one part, over as many attempts as it takes."""

        async def attempt() -> None:
            try:
                await self._attempt(part, clock)
            except MoeError as failed:
                part.failed(failed)
                raise

        await self._patiently(clock, attempt)

    async def _attempt(self, part: PartCall[AsyncLink], clock: Clock) -> None:
        link, size = part.aim(await self._topology(clock))
        region = await self._region(part, link, size, clock) if size else None
        payload = part.payload(region, link.regions)
        try:
            if isinstance(payload, InlineRows):
                payload.carry(link.carries_from)
            request = part.request(payload)
            if isinstance(payload, InlineRows):
                reply = payload.received(await link.past_grpc(payload.sent(request), clock))
            else:
                reply = await link.ask(request, clock.remaining)
            part.answered(reply, payload)
        except BaseException:
            payload.abandon()
            raise
        payload.done()

    async def _region(
        self, part: PartCall[AsyncLink], link: AsyncLink, size: int, clock: Clock
    ) -> RemoteRegion | None:
        """A region for the part's rows; None where they ride inline, since the lane has none."""
        try:
            return await link.region(size, clock.remaining)
        except MoeError as failed:
            part.without_region(failed)
            return None

    async def _patiently(
        self, clock: Clock, act: Callable[[], Awaitable[T]], *, retried: type[MoeError] = MoeError
    ) -> T:
        """What `act` returns, tried again after each `retried` for as long as the clock allows."""
        retries = Retries(clock)
        while True:
            try:
                return await act()
            except retried as failed:
                if self._door.closed:
                    raise client_closed(self.address) from failed
                wait = retries.wait_after(failed)
            await asyncio.sleep(wait)

    async def _find_anew(self) -> None:
        """Asks for the lanes beside calls, for which what was found serves as long."""
        try:
            found = check_serving(
                await self._door.unary(
                    self._door.front.GetTopology, moe_pb2.GetTopologyRequest(), ASK_SECONDS
                )
            )
        except MoeError as failed:  # calls say what is wrong
            log.debug("%s was asked for its lanes, and has not said them: %s", self.address, failed)
            return
        if not self._door.closed:
            for gone in self._core.lanes.found(found):
                await gone.close()

    async def _topology(self, clock: Clock) -> moe_pb2.GetTopologyReply:
        """The lanes as last found, or found now."""
        lanes = self._core.lanes
        current = lanes.known()
        if current is not None:
            return current
        before = lanes.current
        try:
            async with asyncio.timeout(clock.remaining):  # Python 3.11's wait_for may lose a cancellation
                await self._finding.acquire()
        except TimeoutError:
            raise clock.expired() from None
        try:
            current = lanes.current
            if current is None or current is before:
                request, seconds = moe_pb2.GetTopologyRequest(), asking_for(clock.remaining, before)
                try:
                    current = check_serving(
                        await self._door.unary(self._door.front.GetTopology, request, seconds)
                    )
                except MoeError as failed:
                    return lanes.goes_on(failed)
                for gone in lanes.found(current):
                    await gone.close()
            return current
        finally:
            self._finding.release()
