"""Processes that ask from the host: `by_client` as programs do, `in_turns` two services, `bare` by gRPC that
tries nothing again.
"""

from __future__ import annotations

import contextlib
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import grpc
import torch

from bench.service.serving_on.gpu.asking import Answer, Order, compared, failure, orders
from bench.service.serving_on.gpu.service import Call
from bench.service.serving_on.raw import DEADLINE_SECONDS, LOOK_SECONDS, OPTIONS, UNARY
from moeserve.proto import moe_pb2
from moeserve.proto.client import MoeClient
from moeserve.proto.errors import MoeError
from moeserve.proto.heap import keep_freed_memory
from moeserve.proto.tensors import encode, plain

BARE_PAUSE = 0.05  # seconds between a lane's bare calls
TURN_CALLS = 16  # to one service, before the other has its turn
FIRST_CALLS = 2  # of a turn, which are not told of: the GPUs turn to another process


def by_client(pipe: Connection, answers: Any, address: str, calls: list[Call]) -> None:
    """One call at a time by a client with default patience, the layers in turn."""
    keep_freed_memory()
    torch.set_num_threads(1)
    with MoeClient(address) as client:
        for call in calls:
            client.forward(call.layer, *call.batch)
        for turn, order in enumerate(orders(pipe)):
            answers.put(_asked(client, calls[turn % len(calls)], order.lane))


def in_turns(pipe: Connection, answers: Any, services: list[tuple[str, list[Call]]]) -> None:
    """One call at a time, some to one service and then as many to the other, so that both have the same
    neighbours. An answer's lane is the place of its service.
    """
    keep_freed_memory()
    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(MoeClient(address)) for address, _ in services]
        for client, (_, calls) in zip(clients, services, strict=True):
            for call in calls:
                client.forward(call.layer, *call.batch)
        for turn, _ in enumerate(orders(pipe)):
            for at in (0, 1) if turn % 2 else (1, 0):
                calls = services[at][1]
                for number in range(TURN_CALLS):
                    call = calls[(turn * TURN_CALLS + number) % len(calls)]
                    answer = _asked(clients[at], call, None)
                    if number >= FIRST_CALLS or answer.fault:
                        answers.put(answer._replace(lane=at))


def _asked(client: MoeClient, call: Call, lane: int | None) -> Answer:
    began = time.time()
    try:
        found = client.forward(call.layer, *call.batch, lane=lane)
    except MoeError as error:
        return Answer(call.layer, began, time.time(), failure(error))
    return compared(call.layer, began, [(_tensor(found), call.right)])


def _tensor(found: object) -> torch.Tensor:
    assert isinstance(found, torch.Tensor)
    return found


def bare(pipe: Connection, answers: Any, address: str, calls: list[Call]) -> None:
    """One call at a time to each lane, with pauses between them."""
    torch.set_num_threads(1)
    lanes, threads = _Lanes(address, calls, answers), dict[int, threading.Thread]()
    looks = threading.Thread(target=lanes.obey, args=(pipe,), daemon=True)
    looks.start()
    with MoeClient(address, timeout=5.0) as client:
        while looks.is_alive():
            with contextlib.suppress(MoeError):  # no head: lanes are where they were
                lanes.at = {lane.rank: lane.address for lane in client.topology().lanes}
            for lane in lanes.at.keys() - threads.keys():
                threads[lane] = threading.Thread(target=lanes.ask, args=(lane,), daemon=True)
                threads[lane].start()
            looks.join(LOOK_SECONDS)
    until = time.monotonic() + DEADLINE_SECONDS
    for thread in threads.values():  # one inside torch would abort the end
        thread.join(max(0.0, until - time.monotonic()))


class _Lanes:
    """Where each lane is, and whether it is asked now."""

    def __init__(self, address: str, calls: list[Call], answers: Any) -> None:
        self.at: dict[int, str] = {}
        self._calls, self._answers = [(call, _request(call)) for call in calls], answers
        self._asks, self._over = threading.Event(), threading.Event()

    def obey(self, pipe: Connection) -> None:
        """Asks or pauses as it is told, until there is nobody who tells."""
        pipe.send(None)
        with contextlib.suppress(EOFError):
            while True:
                order: Order = pipe.recv()
                (self._asks.set if order.asks else self._asks.clear)()
        self._over.set()
        self._asks.set()

    def ask(self, lane: int) -> None:
        """The thread of one lane."""
        turn = lane
        while not self._over.is_set():
            if (address := self.at.get(lane)) is None:
                self._over.wait(BARE_PAUSE)
                continue
            with grpc.insecure_channel(address, options=OPTIONS) as channel:
                unary = channel.unary_unary(UNARY)
                while self.at.get(lane) == address and not self._over.is_set():
                    self._asks.wait()
                    if self._over.is_set():
                        return
                    self._answers.put(self._asked(unary, lane, turn))
                    turn += 1
                    self._over.wait(BARE_PAUSE)

    def _asked(self, unary: Any, lane: int, turn: int) -> Answer:
        call, request = self._calls[turn % len(self._calls)]
        began = time.time()
        try:
            reply = moe_pb2.ForwardReply.FromString(unary(request, timeout=DEADLINE_SECONDS))
        except grpc.RpcError as failed:
            fault = f"{failed.code().name}: {failed.details()}"[:300]
            return Answer(call.layer, began, time.time(), fault, lane=lane)
        found = torch.frombuffer(bytearray(reply.hidden.data), dtype=call.right.dtype)
        if found.numel() != call.right.numel():
            fault = f"{found.numel()} numbers in place of {call.right.numel()}"
            return Answer(call.layer, began, time.time(), fault, wrong=True, lane=lane)
        return compared(call.layer, began, [(found.view_as(call.right), call.right)])._replace(lane=lane)


def _request(call: Call) -> bytes:
    hidden, experts, weights = call.batch
    request = moe_pb2.ForwardRequest(layer=call.layer, hidden=encode(plain(hidden, "hidden")))
    request.choice.ids.CopyFrom(encode(plain(experts, "ids")))
    request.choice.weights.CopyFrom(encode(plain(weights, "weights")))
    return request.SerializeToString()
