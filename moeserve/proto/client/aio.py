"""`AsyncMoeClient`: MoeClient for programs on asyncio, with the same arguments, answers and errors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, TypeVar, Unpack

import grpc
from numpy.typing import NDArray

from moeserve.proto import health, moe_pb2
from moeserve.proto.channel import MAX_MESSAGE_BYTES
from moeserve.proto.client.aio_link import AsyncLink
from moeserve.proto.client.batch import Batch, CallOptions, Choice, Logits, Part, Reply, whole
from moeserve.proto.client.call import Call, rows_of
from moeserve.proto.client.lanes import Lanes, check_serving, check_transport
from moeserve.proto.client.patience import OPERATION_SECONDS, Clock, Patience
from moeserve.proto.client.payload import Inline, shares
from moeserve.proto.errors import MoeError, Unavailable, WeightsChanged, from_rpc
from moeserve.proto.host import host_id
from moeserve.proto.tensors import Array, Spec, known
from moeserve.proto.transports.shared_memory import RemoteRegion, SharedTensor, region_size

T = TypeVar("T")


class AsyncMoeClient:
    """Calls the experts behind `address` from one event loop; MoeClient says what arguments mean.

    A call that is cancelled is given up on its lane too.
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
        self._door = AsyncLink(address, MAX_MESSAGE_BYTES)
        self._lanes: Lanes[AsyncLink] = Lanes(AsyncLink)
        self._finding = asyncio.Lock()

    async def forward(
        self,
        layer: int,
        hidden: Array | SharedTensor,
        experts: Array,
        weights: Array,
        **options: Unpack[CallOptions],
    ) -> Array:
        """One layer's experts, mixed: as MoeClient.forward."""
        return (await self.call(layer, hidden, Choice(experts, weights), **options)).hidden

    async def forward_logits(
        self, layer: int, hidden: Array | SharedTensor, logits: Array, **options: Unpack[CallOptions]
    ) -> Array:
        """The same, routed by the service from the router linear's output `logits` [T, E]."""
        return (await self.call(layer, hidden, Logits(logits), **options)).hidden

    async def call(
        self, layer: int, hidden: Array | SharedTensor, route: Choice | Logits, **options: Unpack[CallOptions]
    ) -> Reply:
        """The answer with the epoch and the version of the weights that made it."""
        batch = Batch.of(layer, hidden, route, options)
        clock = self._clock(options.get("timeout"))
        asked = options.get("lane")
        bound = batch.lane(self._lane if asked is None else asked)
        return await self._run(Call(batch, self._served, bound, clock, self._lanes.turn()))

    async def allocate(self, lane: int, shape: Sequence[int], dtype: str = "bf16") -> SharedTensor:
        """A tensor in shared memory of a lane: as MoeClient.allocate."""
        clock = self._clock(None)
        spec = Spec(known("dtype", dtype), tuple(int(size) for size in shape))

        async def make() -> RemoteRegion:
            topology = await self._topology(clock)
            found = self._lanes.pick(topology, lane, 0)
            shares("shared_memory", spec.nbytes, found, host_id())
            return await self._lanes.link(topology, found).region(region_size(spec.nbytes), clock.remaining)

        return SharedTensor(await self._patiently(clock, make), 0, spec, lane)

    async def topology(self) -> moe_pb2.GetTopologyReply:
        """The lanes, asked for anew."""
        reply: moe_pb2.GetTopologyReply = await self._ask("GetTopology", moe_pb2.GetTopologyRequest())
        return reply

    async def model(self, *, placement: bool = False) -> moe_pb2.GetModelReply:
        """What is served; with `placement`, also which expert lies in which slot."""
        reply: moe_pb2.GetModelReply = await self._ask(
            "GetModel", moe_pb2.GetModelRequest(placement=placement)
        )
        return reply

    async def status(self, *, experts: bool = False) -> moe_pb2.GetStatusReply:
        """How the service is doing; with `experts`, also how many tokens each expert got."""
        reply: moe_pb2.GetStatusReply = await self._ask(
            "GetStatus", moe_pb2.GetStatusRequest(experts=experts)
        )
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
        reply: moe_pb2.RebalanceReply = await self._door.unary("Rebalance", request, timeout)
        return reply

    async def reload(self, checkpoint: str, *, timeout: float = OPERATION_SECONDS) -> moe_pb2.ReloadReply:
        """Brings every layer to the weights in `checkpoint`: as MoeClient.reload."""
        request = moe_pb2.ReloadRequest(checkpoint=checkpoint)
        reply: moe_pb2.ReloadReply = await self._door.unary("Reload", request, timeout)
        return reply

    async def health(self, service: str = health.SERVICE) -> str:
        """`SERVING`, `NOT_SERVING` or `UNKNOWN`, by grpc.health.v1; NotFound for an unknown service."""
        check = self._door.channel.unary_unary(health.METHOD, None, None)
        try:
            reply = await check(health.encode_check(service), timeout=self._patience.timeout)
        except grpc.RpcError as failed:
            raise from_rpc(failed) from failed
        return health.decode_check(reply)

    async def close(self) -> None:
        """Closes all connections and gives all regions back."""
        for link in [*self._lanes.clear(), self._door]:
            await link.close()

    async def __aenter__(self) -> AsyncMoeClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _clock(self, timeout: float | Patience | None) -> Clock:
        return Clock(self._patience if timeout is None else Patience.of(timeout))

    async def _ask(self, name: str, request: Any) -> Any:
        return await self._door.unary(name, request, self._patience.timeout)

    async def _run(self, call: Call) -> Reply:
        """The answer; asked for whole again where its parts saw different weights."""
        number = 0
        while True:
            try:
                return await self._once(call)
            except WeightsChanged as changed:
                wait = call.clock.wait_after(changed, number)
            await asyncio.sleep(wait)
            number += 1

    async def _once(self, call: Call) -> Reply:
        topology = await self._patiently(call.clock, lambda: self._topology(call.clock))
        parts = call.parts(topology)
        joined = whole(call.batch, parts)
        tasks = [asyncio.create_task(self._part(call, part, rows_of(joined, part))) for part in parts]
        try:
            done = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        answer = done[0][1] if joined is None else joined
        return call.batch.reply(answer, [reply for reply, _ in done])

    async def _part(
        self, call: Call, part: Part, into: NDArray[Any] | None
    ) -> tuple[moe_pb2.ForwardReply, NDArray[Any]]:
        """The answer of one part, over as many attempts as it takes."""
        number = 0
        while True:
            topology = self._lanes.current
            try:
                topology = await self._topology(call.clock)
                lane = self._lanes.pick(topology, call.bound, call.turn + part.index + number)
                return await self._attempt(call, part, (topology, lane, number), into)
            except MoeError as failed:
                if isinstance(failed, Unavailable):
                    self._lanes.doubt(topology)
                wait = call.clock.wait_after(failed, number)
            await asyncio.sleep(wait)
            number += 1

    async def _attempt(
        self,
        call: Call,
        part: Part,
        to: tuple[moe_pb2.GetTopologyReply, moe_pb2.Lane, int],
        into: NDArray[Any] | None,
    ) -> tuple[moe_pb2.ForwardReply, NDArray[Any]]:
        topology, lane, number = to
        link = self._lanes.link(topology, lane)
        size = call.region_size(part, lane, self._transport)
        region = await link.region(size, call.clock.remaining) if size else None
        payload = call.payload(part, region, link.regions)
        try:
            request = call.request(part, number)
            payload.fill(request)
            if isinstance(payload, Inline):
                reply = await link.unary("Forward", request, call.clock.remaining)
            else:
                reply = await link.ask(request, call.clock.remaining)
            answer = payload.answer(reply, into)
        except BaseException:
            payload.abandon()
            raise
        payload.done()
        return reply, answer

    async def _patiently(self, clock: Clock, act: Callable[[], Awaitable[T]]) -> T:
        """What `act` returns, over as many attempts as it takes."""
        number = 0
        while True:
            try:
                return await act()
            except MoeError as failed:
                wait = clock.wait_after(failed, number)
            await asyncio.sleep(wait)
            number += 1

    async def _topology(self, clock: Clock) -> moe_pb2.GetTopologyReply:
        """The lanes as last found, or found now."""
        current = self._lanes.current
        if current is not None:
            return current
        try:
            await asyncio.wait_for(self._finding.acquire(), clock.remaining)
        except TimeoutError:
            raise clock.expired() from None
        try:
            current = self._lanes.current
            if current is None:
                request = moe_pb2.GetTopologyRequest()
                current = check_serving(await self._door.unary("GetTopology", request, clock.remaining))
                for gone in self._lanes.found(current):
                    await gone.close()
            return current
        finally:
            self._finding.release()
