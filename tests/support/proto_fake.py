"""A service of fake lanes in this process, whose experts are `2 * hidden`.

`scripts` is what a lane does to its next calls, one entry a call: a `(StatusCode, trailing metadata)` to
fail with, a number of seconds to wait before answering, or an event to wait for. Every Forward request is
kept in `asked`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent import futures

import grpc
import torch

from moeserve.proto import moe_pb2, moe_pb2_grpc
from moeserve.proto.channel import server_options
from moeserve.proto.errors import CODE_OF_NAME, PUSHBACK_KEY, REASON_KEY
from moeserve.proto.host import host_id
from moeserve.proto.tensors import TensorError
from moeserve.runtime.doors.failures import guarded
from moeserve.runtime.doors.payloads import Payloads, Regions
from moeserve.runtime.doors.payloads.errors import RegionError

FAR = "another-host"
"""A host id that this process has not."""

HELD_SECONDS = 60.0
"""For which a lane waits at most for the event of a script: longer than any test asks."""

Failure = tuple[grpc.StatusCode, dict[str, str]]

GIVEN_UP: Failure = (grpc.StatusCode.CANCELLED, {})
"""A script: the call is cancelled without a word, as a server that stops does with what has come."""


class FakeLane(moe_pb2_grpc.LaneServiceServicer):
    def __init__(self, rank: int, port: int = 0) -> None:
        self.rank = rank
        self.versions: list[int] = []  # of the weights, of the next answers; 1 when there is none left
        self.asked: list[moe_pb2.ForwardRequest] = []
        self.methods: list[str] = []
        self.streams = 0
        self.scripts: list[Failure | float | threading.Event] = []
        self.regions = Regions()
        self.payloads = Payloads(self.regions)
        self.server = grpc.server(futures.ThreadPoolExecutor(16), options=server_options())
        moe_pb2_grpc.add_LaneServiceServicer_to_server(self, self.server)
        self.address = f"127.0.0.1:{self.server.add_insecure_port(f'127.0.0.1:{port}')}"
        self.server.start()

    def lane(self, host: str) -> moe_pb2.Lane:
        return moe_pb2.Lane(rank=self.rank, address=self.address, host_id=host, capacity=1024)

    def stop(self) -> None:
        self.server.stop(0).wait()
        self.regions.close()

    def answer(self, request: moe_pb2.ForwardRequest) -> moe_pb2.ForwardReply | Failure:
        self.asked.append(request)
        script = self.scripts.pop(0) if self.scripts else 0.0
        if isinstance(script, tuple):
            return script
        if isinstance(script, threading.Event):
            script.wait(HELD_SECONDS)
        else:
            time.sleep(script)
        try:
            opened = self.payloads.open(request)
        except (RegionError, TensorError) as wrong:
            return grpc.StatusCode.INVALID_ARGUMENT, {REASON_KEY: type(wrong).__name__}
        with opened:
            version = self.versions.pop(0) if self.versions else 1
            return opened.reply(opened.hidden * 2, epoch=7 + self.rank, weights_version=version)

    def Forward(self, request, context):
        self.methods.append("Forward")
        made = self.answer(request)
        if made is GIVEN_UP:
            context.cancel()
            return moe_pb2.ForwardReply()
        if isinstance(made, tuple):
            context.set_trailing_metadata(tuple(made[1].items()))
            context.abort(made[0], f"lane {self.rank} says no")
        return made

    def ForwardStream(self, request_iterator, context) -> Iterator[moe_pb2.ForwardStreamReply]:
        self.streams += 1
        for request in request_iterator:
            self.methods.append("ForwardStream")
            made = self.answer(request)
            if made is GIVEN_UP:
                context.cancel()
                return
            if isinstance(made, tuple):
                error = moe_pb2.Error(code=CODE_OF_NAME[made[0].name], reason=made[1].get(REASON_KEY, ""))
                error.message = f"lane {self.rank} says no"
                if PUSHBACK_KEY in made[1]:
                    error.pushback_ms = int(made[1][PUSHBACK_KEY])
                yield moe_pb2.ForwardStreamReply(job_id=request.job_id, error=error)
            else:
                yield moe_pb2.ForwardStreamReply(job_id=request.job_id, reply=made)

    def CreateRegion(self, request, context):
        name, size = guarded(context, lambda: self.regions.create(request.size))
        return moe_pb2.CreateRegionReply(name=name, size=size, socket=self.regions.socket)


class FakeService(moe_pb2_grpc.FrontServiceServicer, moe_pb2_grpc.AdminServiceServicer):
    """The coordinator's address of `lanes`; health answers SERVING for everything."""

    def __init__(self, lanes: int = 2, host: str | None = None) -> None:
        self.host = host_id() if host is None else host
        self.lanes = [FakeLane(rank) for rank in range(lanes)]
        self.reason = ""
        self.generation = 1
        self.max_message_bytes = 0
        self.topologies = 0
        self.away: list[int] = []  # ranks that are waited for
        self.server = grpc.server(futures.ThreadPoolExecutor(8), options=server_options())
        moe_pb2_grpc.add_FrontServiceServicer_to_server(self, self.server)
        moe_pb2_grpc.add_AdminServiceServicer_to_server(self, self.server)
        handler = grpc.unary_unary_rpc_method_handler(self._health)
        self.server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": handler}),)
        )
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.server.start()

    def _health(self, request: bytes, context) -> bytes:
        self.health_request = request
        return b"\x08\x01"

    def GetTopology(self, request, context):
        self.topologies += 1
        return moe_pb2.GetTopologyReply(
            lanes=[lane.lane(self.host) for lane in self.lanes],
            generation=self.generation,
            serving=not self.reason,
            reason=self.reason,
            max_message_bytes=self.max_message_bytes,
            away=self.away,
        )

    def GetModel(self, request, context):
        return moe_pb2.GetModelReply(
            model="fake", layers=[moe_pb2.LayerInfo(layer=3)] if request.placement else []
        )

    def GetStatus(self, request, context):
        return moe_pb2.GetStatusReply(state="serving", steps=5)

    def Rebalance(self, request, context):
        moves = [moe_pb2.MoveInfo(layer=3, expert=expert) for expert in range(request.max_moves)]
        outcome = "planned" if request.dry_run else "moved"
        return moe_pb2.RebalanceReply(outcome=outcome, reason=request.policy, moves=moves)

    def Reload(self, request, context):
        return moe_pb2.ReloadReply(outcome="reloaded", reason=request.checkpoint, weights_version=2)

    @property
    def asked(self) -> list[moe_pb2.ForwardRequest]:
        return [request for lane in self.lanes for request in lane.asked]

    @property
    def methods(self) -> list[str]:
        return [method for lane in self.lanes for method in lane.methods]

    def stop(self) -> None:
        self.server.stop(0).wait()
        for lane in self.lanes:
            lane.stop()


def rows(count: int, width: int = 4, dtype: torch.dtype = torch.float32):
    """(hidden [count, width], experts [count, 2], weights [count, 2])"""
    hidden = torch.arange(count * width, dtype=torch.float32).reshape(count, width).to(dtype)
    return hidden, torch.zeros(count, 2, dtype=torch.int32), torch.ones(count, 2)
