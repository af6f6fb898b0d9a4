"""`RawCalls`: a process with bare gRPC to every lane, which tries nothing again and compares every answer."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import grpc
import torch

from bench.service.faults.callers import BOUND, Call
from moeserve.proto import moe_pb2
from moeserve.proto.client import MoeClient
from moeserve.proto.errors import MoeError
from moeserve.proto.tensors import encode, plain

UNARY, STREAM = "/moeserve.v1.LaneService/Forward", "/moeserve.v1.LaneService/ForwardStream"
OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
DEADLINE_SECONDS = 60.0
START_SECONDS = 120.0  # for every lane to have answered both kinds of calls
LOOK_SECONDS = 0.1  # between looks at the topology
AHEAD = 2  # requests under way on a stream


class RawAnswer(NamedTuple):
    """One request that has ended, on the clock of `time.time`."""

    seat: int
    kind: str  # unary, stream
    began: float
    ended: float
    fault: str  # why it was not answered rightly; empty where it was
    twice: bool = False  # it had been answered before


def failed_on_living(answers: list[RawAnswer], dead: dict[int, tuple[float, float]]) -> list[str]:
    """What failed on lanes that lived: `dead` says from when to when a seat's process was away."""
    found = []
    for one in answers:
        since, until = dead.get(one.seat, (float("inf"), 0.0))
        if one.fault and not one.twice and not (since <= one.ended and one.began <= until):
            found.append(f"{one.kind} at lane {one.seat}, {one.ended - one.began:.3f} s: {one.fault}")
    return found


class RawCalls:
    """A context: the process asks each lane all the time, by one unary call and by one stream."""

    def __init__(self, address: str, calls: list[Call], pause: float, lanes: int) -> None:
        self._lanes = lanes  # that are to be there at the start
        context = multiprocessing.get_context("spawn")
        self._answers: Any = context.Queue()
        self._stop = context.Event()
        self._process = context.Process(
            target=_ask, args=(address, calls, pause, self._stop, self._answers), daemon=True
        )
        self.count = 0

    def __enter__(self) -> RawCalls:
        self._process.start()
        until, asked = time.monotonic() + START_SECONDS, set[tuple[int, str]]()
        while len(asked) < 2 * self._lanes:
            asked |= {(one.seat, one.kind) for one in self.answers(0.1) if not one.fault}
            if time.monotonic() > until:
                self.__exit__()
                raise RuntimeError(f"bare calls had answers of {sorted(asked)} only in {START_SECONDS:g} s")
        return self

    def __exit__(self, *ended: object) -> None:
        self._stop.set()
        until = time.monotonic() + DEADLINE_SECONDS
        while self._process.is_alive() and time.monotonic() < until:
            self.answers(0.1)  # a process ends once its queue is taken from
        if self._process.is_alive():
            self._process.kill()
        self._process.join()

    def answers(self, seconds: float) -> list[RawAnswer]:
        """Those that ended since the last look, or end within so many seconds."""
        found, until = list[RawAnswer](), time.monotonic() + seconds
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._answers.get(timeout=max(0.001, until - time.monotonic())))
        self.count += len(found)
        return found


class _Asked(NamedTuple):
    request: moe_pb2.ForwardRequest
    right: torch.Tensor

    def fault(self, reply: moe_pb2.ForwardReply) -> str:
        """What is wrong with an answer; empty where it is right."""
        found = torch.frombuffer(bytearray(reply.hidden.data), dtype=torch.float32)
        if found.numel() != self.right.numel():
            return f"wrong: {found.numel()} numbers in place of {self.right.numel()}"
        error = float((found.view_as(self.right) - self.right).norm() / self.right.norm())
        return "" if error <= BOUND else f"wrong: relative error {error:.2e}"


class _Lanes:
    """Where each seat's lane is now, and what is asked there."""

    def __init__(self, address: str, calls: list[Call], pause: float, stop: Any, answers: Any) -> None:
        self.address, self.pause, self.stop, self.answers = address, pause, stop, answers
        self.at: dict[int, str] = {}
        self.asked = [_request(*call) for call in calls]

    def run(self) -> None:
        """Looks for lanes, and has two threads ask each; told to stop, it waits for their calls."""
        threads: dict[int, list[threading.Thread]] = {}
        with MoeClient(self.address, timeout=5.0) as client:
            while not self.stop.is_set():
                with contextlib.suppress(MoeError):  # no head: lanes are where they were
                    self.at = {lane.rank: lane.address for lane in client.topology().lanes}
                for seat in self.at.keys() - threads.keys():
                    kinds = (functools.partial(self._unary, seat), functools.partial(self._stream, seat))
                    threads[seat] = [threading.Thread(target=kind, daemon=True) for kind in kinds]
                    for thread in threads[seat]:
                        thread.start()
                self.stop.wait(LOOK_SECONDS)
        until = time.monotonic() + DEADLINE_SECONDS
        for thread in (
            one for both in threads.values() for one in both
        ):  # one inside torch would abort the end
            thread.join(max(0.0, until - time.monotonic()))

    def is_at(self, seat: int, address: str) -> bool:
        """Whether the seat's lane is there, and is to be asked."""
        return not self.stop.is_set() and self.at.get(seat) == address

    def _channels(self, seat: int) -> Iterator[grpc.Channel]:
        """A channel to the seat's lane again and again: another one where it has moved."""
        while not self.stop.is_set():
            if (address := self.at.get(seat)) is None:
                time.sleep(self.pause)
                continue
            with grpc.insecure_channel(address, options=OPTIONS) as channel:
                while self.is_at(seat, address):
                    yield channel
                    time.sleep(self.pause)

    def _unary(self, seat: int) -> None:
        for turn, channel in enumerate(self._channels(seat), start=seat):
            asked, began, fault = self.asked[turn % len(self.asked)], time.time(), ""
            try:
                call = channel.unary_unary(UNARY)
                reply = call(asked.request.SerializeToString(), timeout=DEADLINE_SECONDS)
                fault = asked.fault(moe_pb2.ForwardReply.FromString(reply))
            except grpc.RpcError as failed:
                fault = f"{failed.code().name}: {failed.details()}"
            self.answers.put(RawAnswer(seat, "unary", began, time.time(), fault))

    def _stream(self, seat: int) -> None:
        for channel in self._channels(seat):
            stream = _Stream(self, seat)
            try:
                stream.run(channel)
            except grpc.RpcError as failed:
                stream.broke(f"{failed.code().name}: {failed.details()}")


class _Stream:
    """One stream to a lane, with a few requests under way."""

    def __init__(self, lanes: _Lanes, seat: int) -> None:
        self._lanes, self._seat = lanes, seat
        self._to_send: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._began: dict[str, float] = {}  # when each request was sent
        self._under_way = set[str]()

    def run(self, channel: grpc.Channel) -> None:
        """Asks until it is time to stop, the stream ends, or the lane takes no further calls; then it waits
        for those under way.
        """
        address = self._lanes.at.get(self._seat, "")
        replies = channel.stream_stream(STREAM)(iter(self._to_send.get, None))
        for _ in range(AHEAD):
            self._send()
        try:
            for reply in replies:
                self._answered(moe_pb2.ForwardStreamReply.FromString(reply))
                self._lanes.stop.wait(self._lanes.pause)
                if self._lanes.is_at(self._seat, address):
                    self._send()
                elif not self._under_way:
                    return
        finally:
            self._to_send.put(None)
            replies.cancel()
        self.broke("the lane has ended the stream")

    def broke(self, why: str) -> None:
        """Notes that the requests under way have no answer."""
        for job in self._under_way:
            self._note(job, why)

    def _send(self) -> None:
        number = len(self._began)
        job = str(number)
        asked = self._lanes.asked[number % len(self._lanes.asked)].request
        asked = moe_pb2.ForwardRequest.FromString(asked.SerializeToString())
        asked.job_id, asked.timeout_ms = job, int(DEADLINE_SECONDS * 1e3)
        self._began[job] = time.time()
        self._under_way.add(job)
        self._to_send.put(asked.SerializeToString())

    def _answered(self, reply: moe_pb2.ForwardStreamReply) -> None:
        job = reply.job_id
        twice = job in self._began and job not in self._under_way
        self._under_way.discard(job)
        if reply.WhichOneof("outcome") == "error":
            code = grpc_name(reply.error.code)
            self._note(job, f"{code} ({reply.error.reason}): {reply.error.message}", twice=twice)
        elif job not in self._began:
            self._note(job, f"wrong: an answer to job {job!r}, which nobody asked")
        else:
            asked = self._lanes.asked[int(job) % len(self._lanes.asked)]
            self._note(job, asked.fault(reply.reply), twice=twice)

    def _note(self, job: str, fault: str, *, twice: bool = False) -> None:
        began, now = self._began.get(job, 0.0), time.time()
        self._lanes.answers.put(RawAnswer(self._seat, "stream", began, now, fault, twice))


def grpc_name(code: int) -> str:
    """The name of a status code."""
    return next((one.name for one in grpc.StatusCode if one.value[0] == code), str(code))


def _request(layer: int, batch: tuple[torch.Tensor, ...], right: torch.Tensor) -> _Asked:
    hidden, experts, weights = batch
    request = moe_pb2.ForwardRequest(layer=layer, hidden=encode(plain(hidden, "hidden")))
    request.choice.ids.CopyFrom(encode(plain(experts, "ids")))
    request.choice.weights.CopyFrom(encode(plain(weights, "weights")))
    return _Asked(request, right)


def _ask(address: str, calls: list[Call], pause: float, stop: Any, answers: Any) -> None:
    """The process."""
    torch.set_num_threads(1)
    _Lanes(address, calls, pause, stop, answers).run()
