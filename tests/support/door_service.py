"""A door's endpoint over a lane that is none; when its calls end is the test's to say."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from moeserve.proto import health, moe_pb2
from moeserve.runtime.doors.calls.admission import DoorLimits
from moeserve.runtime.doors.endpoint import Endpoint
from moeserve.runtime.doors.lane_door import NOT_THE_FRONT_DOOR

SECONDS = 10.0


def request(nbytes: int) -> moe_pb2.ForwardRequest:
    tensor = moe_pb2.Tensor(dtype=moe_pb2.DTYPE_FP32, shape=[1, nbytes // 4], data=bytes(nbytes))
    made = moe_pb2.ForwardRequest(model="m", layer=3, job_id="j", hidden=tensor, timeout_ms=5)
    made.choice.ids.CopyFrom(tensor)
    made.choice.weights.CopyFrom(tensor)
    made.output.CopyFrom(moe_pb2.Region(name="r", offset=1 << 40, size=1 << 40))
    return made


class Service:
    """A lane's endpoint. Its calls wait for `go`; its streams answer each request at once."""

    def __init__(self, **limits: Any) -> None:
        self.go = threading.Event()
        self.read = 0
        self.reply_bytes = 0  # of the data in a stream's reply, where the hidden states lie in a region
        self.answer = moe_pb2.ForwardReply(epoch=5)
        self.observed: list[tuple[str, str, str]] = []  # calls that were refused before they came here
        self.endpoint = Endpoint(
            {"LaneService": self},
            NOT_THE_FRONT_DOOR,
            DoorLimits(**limits),
            1 << 26,
            observe=lambda *told: self.observed.append(told[:3]),
        )
        self.address = self.endpoint.start("127.0.0.1", 0)
        self.endpoint.set_serving(serving=True)
        options = [("grpc.use_local_subchannel_pool", 1)]
        self.channel = grpc.insecure_channel(self.address, options=options)

    def Forward(self, request: Any, context: grpc.ServicerContext) -> moe_pb2.ForwardReply:
        assert self.go.wait(SECONDS)
        return self.answer

    def ForwardStream(self, requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        replies: queue.SimpleQueue[moe_pb2.ForwardStreamReply | None] = queue.SimpleQueue()

        def consume() -> None:
            with contextlib.suppress(grpc.RpcError):
                for request in requests:
                    self.read += 1
                    reply = moe_pb2.ForwardReply(hidden=request.hidden)
                    if self.reply_bytes:
                        reply.hidden.data = bytes(self.reply_bytes)
                    replies.put(moe_pb2.ForwardStreamReply(job_id=request.job_id, reply=reply))
            replies.put(None)

        threading.Thread(target=consume, daemon=True).start()
        yield from iter(replies.get, None)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda request, context: moe_pb2.ListRegionsReply()

    def healthy(self) -> str:
        return health.decode_check(self.channel.unary_unary(health.METHOD)(b"", timeout=SECONDS))

    def forward(self, nbytes: int = 0, channel: grpc.Channel | None = None) -> Any:
        data = request(nbytes).SerializeToString() if nbytes else b""
        call = (channel or self.channel).unary_unary("/moeserve.v1.LaneService/Forward")
        return call.future(data, timeout=SECONDS)

    def list(self) -> bytes:
        return self.channel.unary_unary("/moeserve.v1.LaneService/ListRegions")(b"", timeout=SECONDS)

    def stream(self, requests: Iterator[bytes]) -> Any:
        return self.channel.stream_stream("/moeserve.v1.LaneService/ForwardStream")(requests)

    def close(self) -> None:
        self.go.set()
        self.channel.close()
        self.endpoint.stop(0)


def until(true: Callable[[], bool]) -> bool:
    limit = time.monotonic() + SECONDS
    while not true() and time.monotonic() < limit:
        time.sleep(0.01)
    return true()


def silent(ends: threading.Event) -> Iterator[bytes]:
    """Sends nothing until the test ends."""
    ends.wait(SECONDS)
    yield from ()


def held(service: Service) -> tuple[int, int, int]:
    return service.endpoint._calling._admission.held
