"""`FrontDoor`: the service's own address. It knows topology, model and status, and answers Forward for
simple clients.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np

from moeserve import __version__
from moeserve.dispatch.members import Member
from moeserve.experts.load import PHASES
from moeserve.proto import moe_pb2, moe_pb2_grpc
from moeserve.proto.credentials import Credentials
from moeserve.runtime.doors.deadlines import Observe, seconds_left
from moeserve.runtime.doors.failures import GrpcStatus, status_of
from moeserve.runtime.doors.forwarding import Caller, Forwarding, leave_out
from moeserve.runtime.epoch import Epoch
from moeserve.runtime.errors import GroupUnavailable
from moeserve.runtime.head.coordinator import Coordinator
from moeserve.runtime.head.generations.generations import ENDED
from moeserve.runtime.head.generations.ready import Cover
from moeserve.runtime.head.reception import Seat
from moeserve.runtime.served import Served

log = logging.getLogger(__name__)

GOLDEN, WORD = 0x9E3779B9, 0xFFFFFFFF
"""2^32 by the golden ratio: multiples of it modulo 2^32 lie evenly, and so do those of every second one, or
third, as of a caller who asks that often.
"""

NOT_A_LANE = GrpcStatus(
    "FAILED_PRECONDITION",
    "not_a_lane",
    "shared memory and LaneService belong to a lane; GetTopology names the lanes and their addresses",
)
"""How the front door refuses the calls of a lane."""

STREAM_CALLS = 16
"""Calls of one stream that run, or whose replies gRPC has not taken; with so many no request is read."""

_DTYPES = {"fp32": moe_pb2.DTYPE_FP32, "bf16": moe_pb2.DTYPE_BF16, "fp16": moe_pb2.DTYPE_FP16}


class FrontDoor(moe_pb2_grpc.FrontServiceServicer):
    """Answers FrontService: what lanes do not know, and calls, which it hands on to them. What a lane refuses
    is refused in its words.
    """

    def __init__(
        self, name: str, served: Served, coordinator: Coordinator, max_message_bytes: int, observe: Observe
    ) -> None:
        self._name = name
        self._served = served
        self._coordinator = coordinator
        self._max_message_bytes = max_message_bytes
        self._observe = observe
        self._forwarding = self._forwarding_with(None)
        self._stopping = ""  # why no further call is taken from streams
        self._begins = itertools.count()
        self.in_flight = 0  # calls that have arrived and are not answered
        self._counting = threading.Lock()

    def show_lanes(self, credentials: Credentials | None) -> None:
        """Has calls handed on with `credentials`; called before the first."""
        self._forwarding = self._forwarding_with(credentials)

    def _forwarding_with(self, credentials: Credentials | None) -> Forwarding:
        made = Forwarding(self._with_lanes, credentials)
        made.leaving = self._leaving
        return made

    def _leaving(self) -> frozenset[int]:
        """Ranks whose lanes take no further call."""
        return self._coordinator.generations.turnover.leaving

    def close(self) -> None:
        """Closes the connections to the lanes."""
        self._forwarding.close()

    def drain(self, reason: str) -> None:
        """Refuses calls that come on streams from now on; those taken go on. Unary calls are for the endpoint
        to refuse, which knows when they began.
        """
        self._stopping = reason

    def Forward(self, request: moe_pb2.ForwardRequest, context: grpc.ServicerContext) -> moe_pb2.ForwardReply:
        """Spreads a large batch's rows over the lanes; a small one goes to one lane, in turn."""
        started, code = time.perf_counter(), "OK"
        self._count(1)
        try:
            return self._forwarding.forward(request, seconds_left(context), Caller(context))
        except Exception as error:
            status = status_of(error)
            code = status.code
            status.abort(context)
        finally:
            self._count(-1)
            self.observe("Forward", "inline", code, time.perf_counter() - started)

    def ForwardStream(
        self, request_iterator: Iterator[moe_pb2.ForwardRequest], context: grpc.ServicerContext
    ) -> Iterator[moe_pb2.ForwardStreamReply]:
        """Forward for many calls on one stream; replies come as they are ready, under their job ids."""
        caller = Caller(context)
        stream = _FrontStream(lambda request: self._stream_reply(request, caller))
        if not context.add_callback(stream.leave):
            return  # the RPC is over already
        threading.Thread(
            target=stream.consume, args=(request_iterator,), name="front-stream", daemon=True
        ).start()
        yield from stream.replies()

    def _stream_reply(self, request: moe_pb2.ForwardRequest, caller: Caller) -> moe_pb2.ForwardStreamReply:
        timeout = request.timeout_ms / 1000 if request.timeout_ms else None
        started, code = time.perf_counter(), "OK"
        self._count(1)
        try:
            if self._stopping:
                raise GroupUnavailable(self._stopping)
            reply = self._forwarding.forward(request, timeout, caller)
            return moe_pb2.ForwardStreamReply(job_id=request.job_id, reply=reply)
        except Exception as error:
            status = status_of(error)
            code = status.code
            return moe_pb2.ForwardStreamReply(job_id=request.job_id, error=status.as_message())
        finally:
            self._count(-1)
            self.observe("ForwardStream", "inline", code, time.perf_counter() - started)

    def _count(self, more: int) -> None:
        with self._counting:
            self.in_flight += more

    def observe(self, method: str, transport: str, code: str, seconds: float) -> None:
        """Counts a call that ended, under the name that metrics have for it here: lanes count theirs."""
        self._observe(f"Front{method}", transport, code, seconds)

    def GetTopology(
        self, request: moe_pb2.GetTopologyRequest, context: grpc.ServicerContext
    ) -> moe_pb2.GetTopologyReply:
        """The lanes that take calls now, the group's members, and at which lane this caller begins."""
        found = self._topology()
        found.begin_at = next(self._begins) * GOLDEN & WORD
        return found

    def _topology(self) -> moe_pb2.GetTopologyReply:
        """What callers find: no lane that is to leave, and none at all once the service is to stop."""
        found, stopping = self._with_lanes(), self._coordinator.stopping.reason
        leave_out(found, self._leaving())
        if stopping and not self._coordinator.stopping.reopened:
            del found.lanes[:]
            found.serving, found.reason = False, stopping
        return found

    def _with_lanes(self) -> moe_pb2.GetTopologyReply:
        """The lanes as calls that have begun find them; while calls are taken, only those that have joined a
        generation.
        """
        progress, seats = self._coordinator.progress(), self._coordinator.seats()
        epoch = self._coordinator.epoch
        taken = progress.state == "serving" or progress.holds
        lanes = [
            moe_pb2.Lane(
                rank=member.seat,
                address=seat.address,
                host_id=seat.host_id,
                capacity=self._served.lane_rows,
                lane=member.lane,
            )
            for member in epoch.members.present
            if member.lane is not None
            and (seat := seats.get(member.seat)) is not None
            and (seat.generation or not taken)
        ]
        there = {lane.rank for lane in lanes}
        wanted = (*epoch.members.present, *self._coordinator.away)
        away = {member.seat for member in wanted if member.lane is not None} - there
        return moe_pb2.GetTopologyReply(
            lanes=lanes,
            away=sorted(away),
            generation=progress.generation,
            epoch=epoch.number,
            serving=taken,
            reason=progress.reason,
            max_message_bytes=self._max_message_bytes,
            members=_members(epoch, seats),
            max_lanes=epoch.members.max_lanes,
            max_owners=epoch.members.max_owners,
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
        covers = self._coordinator.view.covers()
        ranks = [
            _rank_status(member, seats.get(member.seat), covers.get(member.seat))
            for member in _members(epoch, seats)
        ]
        ranks += [
            _rank_status(_absent(member), seats.get(member.seat), None)
            for member in self._coordinator.view.away()
        ]
        by_phase = self._coordinator.view.load_by_phase()
        tokens, prefill = by_phase.sum(axis=0), by_phase[PHASES.index("prefill")]
        balanced = 1 / epoch.placement.imbalance(tokens)
        stopping = self._coordinator.stopping.reason
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
            state="stopping" if stopping and progress.state not in ENDED else progress.state,
            reason=stopping or progress.reason,
            generation=progress.generation,
            epoch=epoch.number,
            steps=progress.steps,
            jobs=progress.jobs,
            queued=progress.queued,
            in_flight=progress.in_flight,
            ranks=ranks,
            layers=layers,
            version=__version__,
            max_lanes=epoch.members.max_lanes,
            max_owners=epoch.members.max_owners,
        )


class _FrontStream:
    """The requests of one ForwardStream, each answered by a thread, and their replies as they are ready."""

    def __init__(self, answer: Callable[[moe_pb2.ForwardRequest], moe_pb2.ForwardStreamReply]) -> None:
        self._answer = answer
        self._ready: queue.SimpleQueue[moe_pb2.ForwardStreamReply | None] = queue.SimpleQueue()
        self._room = threading.Semaphore(STREAM_CALLS)  # for calls and replies that gRPC has not taken
        self._left = False

    def leave(self) -> None:
        """Reads no further request: the stream is over, answered or not."""
        self._left = True
        self._room.release()

    def replies(self) -> Iterator[moe_pb2.ForwardStreamReply]:
        """Every reply, until the last request is answered."""
        while (reply := self._ready.get()) is not None:
            yield reply
            self._room.release()  # gRPC asks for the next: a caller that reads nothing is read no further

    def consume(self, requests: Iterator[moe_pb2.ForwardRequest]) -> None:
        """Reads requests until the caller sends no more, and returns when all are answered."""
        try:
            with ThreadPoolExecutor(STREAM_CALLS, thread_name_prefix="front-stream") as pool:
                for request in requests:
                    self._room.acquire()
                    if self._left:
                        break
                    pool.submit(self._run, request)
        except Exception as error:  # gRPC ends the iterator of a broken stream with one of several types
            log.debug("a stream broke: %s", error)
        finally:
            self._ready.put(None)

    def _run(self, request: moe_pb2.ForwardRequest) -> None:
        self._ready.put(self._answer(request))


def _members(epoch: Epoch, seats: Mapping[int, Seat]) -> list[moe_pb2.Member]:
    """Every member of the epoch, by seat; those that are not connected have joined no generation."""
    return [
        moe_pb2.Member(
            seat=member.seat,
            lane=member.lane,
            owner=member.owner,
            position=epoch.members.position(member.seat),
            slots=epoch.slots_of(member),
            generation=seats[member.seat].generation if member.seat in seats else 0,
        )
        for member in epoch.members.present
    ]


def _absent(member: Member) -> moe_pb2.Member:
    """A member that is away: lost, or loading before it joins."""
    return moe_pb2.Member(seat=member.seat, lane=member.lane, owner=member.owner)


def _rank_status(member: moe_pb2.Member, seat: Seat | None, cover: Cover | None) -> moe_pb2.RankStatus:
    covered = None if cover is None else _cover(cover)
    if seat is None:
        return moe_pb2.RankStatus(rank=member.seat, up=False, member=member, cover=covered)
    return moe_pb2.RankStatus(
        rank=member.seat,
        up=True,
        address=seat.address,
        steps=seat.steps,
        tokens=seat.expert_rows,
        weight_bytes=seat.weight_bytes,
        bytes_read=seat.bytes_read,
        pid=seat.pid,
        member=member,
        cover=covered,
        shadow_bytes=seat.shadowed.nbytes,
    )


def _cover(cover: Cover) -> moe_pb2.Cover:
    return moe_pb2.Cover(
        replicas=cover.replicas,
        shadows=cover.shadows,
        disk=cover.disk,
        waits=cover.waits,
        bytes=cover.nbytes,
        why_waits=cover.why_waits,
    )
