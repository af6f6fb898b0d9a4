"""`FrontDoor`: the coordinator's own address. It knows topology, model and status, and answers Forward for
simple clients.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn, TypeVar

import grpc
import numpy as np

from moeserve import __version__
from moeserve.experts.load import PHASES
from moeserve.proto import moe_pb2, moe_pb2_grpc
from moeserve.proto.channel import connect
from moeserve.proto.client.batch import SPLIT_ROWS
from moeserve.proto.errors import InvalidArgument, from_rpc
from moeserve.proto.tensors import FLOATS, INTEGERS, TensorError, spec_of
from moeserve.runtime.doors.failures import Status, status_of
from moeserve.runtime.doors.lane_door import Observe, seconds_left
from moeserve.runtime.doors.operations import Operations
from moeserve.runtime.errors import CallerLeft, DeadlinePassed, GroupUnavailable, one_version
from moeserve.runtime.head.rebalancer import Rebalancer
from moeserve.runtime.head.reception import Seat
from moeserve.runtime.served import Served

log = logging.getLogger(__name__)

T = TypeVar("T")

STREAM_CALLS = 16
"""Calls of one stream that lanes run at once; its next request is read when one of them has ended."""

_DTYPES = {"fp32": moe_pb2.DTYPE_FP32, "bf16": moe_pb2.DTYPE_BF16, "fp16": moe_pb2.DTYPE_FP16}


class FrontDoor(moe_pb2_grpc.MoeServiceServicer):
    """Answers what lanes do not know, and hands calls on to them; what a lane refuses is refused in its
    words.
    """

    def __init__(
        self, name: str, served: Served, rebalancer: Rebalancer, max_message_bytes: int, observe: Observe
    ) -> None:
        self._name = name
        self._served = served
        self._coordinator = rebalancer.coordinator
        self._operations = Operations(served, rebalancer)
        self._max_message_bytes = max_message_bytes
        self._observe = observe
        self._channels: dict[str, grpc.Channel] = {}
        self._turns = itertools.count()
        self._lock = threading.Lock()

    # -- calls
    # ------------------------------------------------------------------------------------------------------

    def Forward(self, request: moe_pb2.ForwardRequest, context: grpc.ServicerContext) -> moe_pb2.ForwardReply:
        """Spreads a large batch's rows over the lanes; a small one goes to one lane, in turn."""
        started, code = time.perf_counter(), "OK"
        try:
            return self._forward(request, seconds_left(context), _Caller(context))
        except Exception as error:
            status = _status(error)
            code = status.code
            status.abort(context)
        finally:
            self._observe("FrontForward", "inline", code, time.perf_counter() - started)

    def ForwardStream(
        self, request_iterator: Iterator[moe_pb2.ForwardRequest], context: grpc.ServicerContext
    ) -> Iterator[moe_pb2.ForwardStreamReply]:
        """Forward for many calls on one stream; replies come as they are ready, under their job ids."""
        caller = _Caller(context)
        stream = _Stream(lambda request: self._stream_reply(request, caller))
        threading.Thread(
            target=stream.consume, args=(request_iterator,), name="front-stream", daemon=True
        ).start()
        yield from stream.replies()

    def _stream_reply(self, request: moe_pb2.ForwardRequest, caller: _Caller) -> moe_pb2.ForwardStreamReply:
        timeout = request.timeout_ms / 1000 if request.timeout_ms else None
        try:
            reply = self._forward(request, timeout, caller)
            return moe_pb2.ForwardStreamReply(job_id=request.job_id, reply=reply)
        except Exception as error:
            return moe_pb2.ForwardStreamReply(job_id=request.job_id, error=_status(error).as_message())

    def _forward(
        self, request: moe_pb2.ForwardRequest, timeout: float | None, caller: _Caller
    ) -> moe_pb2.ForwardReply:
        """The answer within `timeout` seconds, or whenever it comes. Raises what the lanes said."""
        lanes = self._lanes()
        parts = _split(request, len(lanes))
        try:
            return self._ask(parts, lanes, timeout, caller)
        except InvalidArgument:
            if len(parts) == 1:
                raise
            # A lane that saw a part named the part's shape; one that sees the whole names the caller's.
            return self._ask([request], lanes, timeout, caller)

    def _ask(
        self, parts: list[moe_pb2.ForwardRequest], lanes: list[Seat], timeout: float | None, caller: _Caller
    ) -> moe_pb2.ForwardReply:
        """The joined answers of `parts`, one lane each, the next lane in turn first."""
        first, layer = next(self._turns), parts[0].layer
        calls: list[grpc.Future] = []
        try:
            for at, part in enumerate(parts):
                stub = self._stub(lanes[(first + at) % len(lanes)].address)
                calls.append(stub.Forward.future(part, timeout=timeout))
                caller.waits_for(calls[-1])
            return _join([call.result() for call in calls])
        except grpc.FutureCancelledError as cancelled:
            raise caller.gone(layer) from cancelled
        except grpc.RpcError as failed:
            said = from_rpc(failed)
            if said.code == "DEADLINE_EXCEEDED" and not said.reason:  # said by gRPC, before the lane could
                raise _too_late(layer) from failed
            raise said from failed
        finally:
            for call in calls:
                caller.waits_no_more(call)
                call.cancel()  # nothing happens to one that has ended

    def _lanes(self) -> list[Seat]:
        progress = self._coordinator.progress()
        seats = self._coordinator.seats()
        if progress.state != "serving":
            raise GroupUnavailable(progress.reason or f"the group is {progress.state}")
        return [seats[rank] for rank in sorted(seats)]

    def _stub(self, address: str) -> moe_pb2_grpc.MoeServiceStub:
        with self._lock:
            if address not in self._channels:
                self._channels[address] = connect(address, self._max_message_bytes)
            return moe_pb2_grpc.MoeServiceStub(self._channels[address])  # type: ignore[no-untyped-call]

    # -- what is there
    # ----------------------------------------------------------------------------------------------

    def GetTopology(
        self, request: moe_pb2.GetTopologyRequest, context: grpc.ServicerContext
    ) -> moe_pb2.GetTopologyReply:
        """The lanes that are up now."""
        progress = self._coordinator.progress()
        lanes = [
            moe_pb2.Lane(
                rank=rank, address=seat.address, host_id=seat.host_id, capacity=self._served.lane_rows
            )
            for rank, seat in sorted(self._coordinator.seats().items())
        ]
        return moe_pb2.GetTopologyReply(
            lanes=lanes,
            generation=progress.generation,
            epoch=self._coordinator.epoch.number,
            serving=progress.state == "serving",
            reason=progress.reason,
            max_message_bytes=self._max_message_bytes,
        )

    def GetModel(
        self, request: moe_pb2.GetModelRequest, context: grpc.ServicerContext
    ) -> moe_pb2.GetModelReply:
        """Layers, shapes, schemes, routing, and on request the placement."""
        served, mesh, epoch = self._served, self._served.mesh, self._coordinator.epoch
        seats = self._coordinator.seats()
        plans = next((seat.plans for _, seat in sorted(seats.items())), {})
        layers = [
            self._layer(at, layer, plans.get(layer, ("", "", "")), placed=request.placement)
            for at, layer in enumerate(served.layers)
        ]
        return moe_pb2.GetModelReply(
            model=self._name,
            architecture=served.checkpoint.architecture,
            dtype=_DTYPES[served.model_format.name],
            layers=layers,
            epoch=epoch.number,
            weights_version=epoch.weights_version,
            data_parallel_size=mesh.dp,
            tensor_parallel_size=mesh.tp,
            expert_parallel_size=mesh.ep,
        )

    def _layer(self, at: int, layer: int, plan: tuple[str, str, str], *, placed: bool) -> moe_pb2.LayerInfo:
        checkpoint, epoch = self._served.checkpoint, self._coordinator.epoch
        shape = checkpoint.shape(layer)
        return moe_pb2.LayerInfo(
            layer=layer,
            experts=checkpoint.num_experts,
            top_k=checkpoint.top_k,
            hidden=shape.hidden,
            inner=shape.inner,
            activation=shape.activation.name,
            routing=checkpoint.gate(layer).method,
            scheme=self._served.scheme(layer).name,
            kernel=plan[0],
            all2all_backend=plan[1],
            wire=plan[2],
            slots=epoch.placement.slots[at].tolist() if placed else [],
            weights_version=epoch.version(at),
        )

    def GetStatus(
        self, request: moe_pb2.GetStatusRequest, context: grpc.ServicerContext
    ) -> moe_pb2.GetStatusReply:
        """How the service is doing, with the load of every layer, and of every expert on request."""
        progress, seats = self._coordinator.progress(), self._coordinator.seats()
        epoch = self._coordinator.epoch
        ranks = [_rank_status(rank, seats.get(rank)) for rank in range(epoch.mesh.ranks)]
        by_phase = self._coordinator.load_by_phase()
        tokens, prefill = by_phase.sum(axis=0), by_phase[PHASES.index("prefill")]
        balanced = 1 / epoch.placement.imbalance(tokens)
        layers = [
            moe_pb2.LayerLoad(
                layer=layer,
                balancedness=float(balanced[at]),
                tokens=tokens[at].astype(np.uint64).tolist() if request.experts else [],
                prefill_tokens=prefill[at].astype(np.uint64).tolist() if request.experts else [],
            )
            for at, layer in enumerate(self._served.layers)
        ]
        return moe_pb2.GetStatusReply(
            state=progress.state,
            reason=progress.reason,
            generation=progress.generation,
            epoch=epoch.number,
            steps=progress.steps,
            jobs=progress.jobs,
            queued=progress.queued,
            in_flight=progress.in_flight,
            ranks=ranks,
            layers=layers,
            version=__version__,
        )

    # -- what an operator does

    def Rebalance(
        self, request: moe_pb2.RebalanceRequest, context: grpc.ServicerContext
    ) -> moe_pb2.RebalanceReply:
        """Moves experts, or says what that would do."""
        return _guarded(context, lambda: self._operations.rebalance(request))

    def Reload(self, request: moe_pb2.ReloadRequest, context: grpc.ServicerContext) -> moe_pb2.ReloadReply:
        """Serves the weights of another checkpoint."""
        return _guarded(context, lambda: self._operations.reload(request))

    # -- what lanes do

    def CreateRegion(
        self, request: moe_pb2.CreateRegionRequest, context: grpc.ServicerContext
    ) -> moe_pb2.CreateRegionReply:
        """Regions belong to lanes."""
        _not_a_lane(context)

    def RegisterRegion(
        self, request: moe_pb2.RegisterRegionRequest, context: grpc.ServicerContext
    ) -> moe_pb2.RegisterRegionReply:
        """Regions belong to lanes."""
        _not_a_lane(context)

    def ReleaseRegion(
        self, request: moe_pb2.ReleaseRegionRequest, context: grpc.ServicerContext
    ) -> moe_pb2.ReleaseRegionReply:
        """Regions belong to lanes."""
        _not_a_lane(context)

    def ListRegions(
        self, request: moe_pb2.ListRegionsRequest, context: grpc.ServicerContext
    ) -> moe_pb2.ListRegionsReply:
        """Regions belong to lanes."""
        _not_a_lane(context)


class _Caller:
    """One RPC's caller, and the calls that lanes run for it: they end with the RPC."""

    def __init__(self, context: grpc.ServicerContext) -> None:
        self._context = context
        self._calls: list[grpc.Future] = []
        self._left = False
        self._lock = threading.Lock()
        if not context.add_callback(self._leave):  # the RPC is over already
            self._leave()

    def waits_for(self, call: grpc.Future) -> None:
        """Cancels `call` when the caller leaves, or now if it has left."""
        with self._lock:
            left = self._left
            self._calls.append(call)
        if left:
            call.cancel()

    def waits_no_more(self, call: grpc.Future) -> None:
        """`call` has ended."""
        with self._lock:
            self._calls.remove(call)

    def gone(self, layer: int) -> Exception:
        """Why a call of `layer` ended without an answer: the caller's deadline, or the caller itself."""
        if self._context.time_remaining() == 0:
            return _too_late(layer)
        return CallerLeft("the caller left before its answer was there")

    def _leave(self) -> None:
        with self._lock:
            self._left, calls = True, list(self._calls)
        for call in calls:
            call.cancel()


class _Stream:
    """The requests of one ForwardStream, each answered by a thread, and their replies as they are ready."""

    def __init__(self, answer: Callable[[moe_pb2.ForwardRequest], moe_pb2.ForwardStreamReply]) -> None:
        self._answer = answer
        self._ready: queue.SimpleQueue[moe_pb2.ForwardStreamReply | None] = queue.SimpleQueue()
        self._room = threading.Semaphore(STREAM_CALLS)

    def replies(self) -> Iterator[moe_pb2.ForwardStreamReply]:
        """Every reply, until the last request is answered."""
        while (reply := self._ready.get()) is not None:
            yield reply

    def consume(self, requests: Iterator[moe_pb2.ForwardRequest]) -> None:
        """Reads requests until the caller sends no more, and returns when all are answered."""
        try:
            with ThreadPoolExecutor(STREAM_CALLS, thread_name_prefix="front-stream") as pool:
                for request in requests:
                    self._room.acquire()
                    pool.submit(self._run, request)
        except Exception as error:  # gRPC ends the iterator of a broken stream with one of several types
            log.debug("a stream broke: %s", error)
        finally:
            self._ready.put(None)

    def _run(self, request: moe_pb2.ForwardRequest) -> None:
        try:
            self._ready.put(self._answer(request))
        finally:
            self._room.release()


def _too_late(layer: int) -> DeadlinePassed:
    return DeadlinePassed(f"layer {layer}: no answer within the deadline")


def _rank_status(rank: int, seat: Seat | None) -> moe_pb2.RankStatus:
    if seat is None:
        return moe_pb2.RankStatus(rank=rank, up=False)
    return moe_pb2.RankStatus(
        rank=rank,
        up=True,
        address=seat.address,
        steps=seat.steps,
        tokens=seat.expert_rows,
        weight_bytes=seat.weight_bytes,
        bytes_read=seat.bytes_read,
        pid=seat.pid,
    )


def _split(request: moe_pb2.ForwardRequest, lanes: int) -> list[moe_pb2.ForwardRequest]:
    """A large inline batch in even runs of rows; anything else whole (a lane refuses what is malformed)."""
    rows = request.hidden.shape[0] if len(request.hidden.shape) == 2 else 0
    count = min(lanes, rows // SPLIT_ROWS)
    if (
        count < 2
        or any(t.WhichOneof("payload") != "data" for t in _tensors(request))
        or request.HasField("output")
    ):
        return [request]
    for tensor in _tensors(request):
        try:
            spec = spec_of(tensor, "", rank=2, dtypes=(*FLOATS, *INTEGERS))
        except TensorError:
            return [request]
        if spec.shape[0] != rows or len(tensor.data) != spec.nbytes:
            return [request]
    bounds = [rows * at // count for at in range(count + 1)]
    parts = []
    for start, stop in itertools.pairwise(bounds):
        part = moe_pb2.ForwardRequest()
        part.CopyFrom(request)
        part.job_id = f"{request.job_id}.{start}" if request.job_id else ""
        for tensor in _tensors(part):
            width = len(tensor.data) // rows
            tensor.data = tensor.data[start * width : stop * width]
            tensor.shape[0] = stop - start
        parts.append(part)
    return parts


def _tensors(request: moe_pb2.ForwardRequest) -> list[moe_pb2.Tensor]:
    route = (
        [request.logits]
        if request.WhichOneof("route") == "logits"
        else [request.choice.ids, request.choice.weights]
    )
    return [request.hidden, *route]


def _join(replies: list[moe_pb2.ForwardReply]) -> moe_pb2.ForwardReply:
    """One answer of the parts', in their order; of their epochs the oldest. GroupUnavailable where they saw
    different weights.
    """
    if len(replies) == 1:
        return replies[0]
    hidden = moe_pb2.Tensor(
        dtype=replies[0].hidden.dtype,
        shape=[sum(reply.hidden.shape[0] for reply in replies), replies[0].hidden.shape[1]],
        data=b"".join(reply.hidden.data for reply in replies),
    )
    version = one_version(reply.weights_version for reply in replies)
    epoch = min(reply.epoch for reply in replies)
    return moe_pb2.ForwardReply(hidden=hidden, epoch=epoch, weights_version=version)


def _status(error: Exception) -> Status:
    return status_of(from_rpc(error) if isinstance(error, grpc.RpcError) else error)


def _guarded(context: grpc.ServicerContext, work: Callable[[], T]) -> T:
    try:
        return work()
    except Exception as error:
        _status(error).abort(context)


def _not_a_lane(context: grpc.ServicerContext) -> NoReturn:
    text = "shared memory belongs to a lane; GetTopology names the lanes and their addresses"
    Status("FAILED_PRECONDITION", "not_a_lane", text).abort(context)
