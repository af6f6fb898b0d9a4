"""Every kind of call that has begun when a service is told to stop is answered; later ones are refused."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from houses import EP4, Alone, house_config, request_of

from moeserve.proto import moe_pb2, moe_pb2_grpc
from moeserve.proto.client import MoeClient
from moeserve.proto.client.patience import Patience
from moeserve.proto.errors import MoeError
from moeserve.proto.tensors import as_torch, spec_of
from moeserve.runtime.launch.local_cluster import LocalCluster

SECONDS = 30.0
BEFORE = 0.5  # seconds that a call takes at most to reach its door
FORWARD = "/moeserve.v1.{}/Forward"
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@dataclass
class Seen:
    """When calls began, and how they ended: empty where the answer was right."""

    ends: list[tuple[float, str]] = field(default_factory=list)

    def call(self, ask: Callable[[], torch.Tensor], right: torch.Tensor) -> str:
        began = time.monotonic()
        try:
            torch.testing.assert_close(ask(), right, **CLOSE)
            ended = ""
        except MoeError as failed:
            ended = f"{failed.code} {failed.message}"
        except grpc.RpcError as failed:
            ended = f"{failed.code().name} {failed.details()}"
        self.ends.append((began, ended))
        return ended


def hidden(reply: moe_pb2.ForwardReply) -> torch.Tensor:
    return as_torch(reply.hidden.data, spec_of(reply.hidden, "x", rank=2, dtypes=("fp32",)))


def streamed(reply: moe_pb2.ForwardStreamReply) -> torch.Tensor:
    if reply.HasField("error"):
        raise MoeError(str(reply.error.code), reply.error.reason, reply.error.message)
    return hidden(reply.reply)


@dataclass
class Kinds:
    """Ways to ask, by their name."""

    house: LocalCluster
    batch: Any
    rows: Any

    def __post_init__(self) -> None:
        patience = Patience(SECONDS, attempts=1)
        self.client = MoeClient(self.house.address, timeout=patience, transport="inline")
        self.near = MoeClient(self.house.address, timeout=patience, transport="shared_memory")
        self.lane = grpc.insecure_channel(self.client.topology().lanes[0].address)
        self.front = grpc.insecure_channel(self.house.address)
        self.request = request_of(1, self.batch)
        self.streams = {}
        for name, stub in (
            ("lane", moe_pb2_grpc.LaneServiceStub(self.lane)),
            ("front", moe_pb2_grpc.FrontServiceStub(self.front)),
        ):
            self.streams[name] = self.stream_of(stub)

    def stream_of(self, stub: Any) -> Callable[[], torch.Tensor]:
        """Calls on one stream, one after the other."""
        said, over = [], threading.Condition()

        def requests() -> Iterator[moe_pb2.ForwardRequest]:
            while True:
                with over:
                    over.wait_for(lambda: bool(said))
                    yield said.pop()

        replies = stub.ForwardStream(requests(), timeout=2 * SECONDS)

        def ask() -> torch.Tensor:
            with over:
                said.append(self.request)
                over.notify()
            return streamed(next(replies))

        return ask

    def late(self, channel: grpc.Channel, service: str) -> torch.Tensor:
        """A call whose message comes some time after it began."""

        def message() -> Iterator[moe_pb2.ForwardRequest]:
            time.sleep(2 * BEFORE)
            yield self.request

        call = channel.stream_unary(
            FORWARD.format(service),
            moe_pb2.ForwardRequest.SerializeToString,
            moe_pb2.ForwardReply.FromString,
        )
        return hidden(call(message(), timeout=SECONDS))

    def all(self) -> dict[str, tuple[Callable[[], torch.Tensor], Any]]:
        lane, front = moe_pb2_grpc.LaneServiceStub(self.lane), moe_pb2_grpc.FrontServiceStub(self.front)
        return {
            "unary at a lane": (lambda: hidden(lane.Forward(self.request, timeout=SECONDS)), self.batch),
            "unary at the front": (lambda: hidden(front.Forward(self.request, timeout=SECONDS)), self.batch),
            "stream at a lane": (self.streams["lane"], self.batch),
            "stream at the front": (self.streams["front"], self.batch),
            "parts": (lambda: self.client.forward(1, *self.rows), self.rows),
            "shared memory": (lambda: self.near.forward(1, *self.rows), self.rows),
            "late message at a lane": (lambda: self.late(self.lane, "LaneService"), self.batch),
            "late message at the front": (lambda: self.late(self.front, "FrontService"), self.batch),
        }

    def close(self) -> None:
        for each in (self.client, self.near, self.lane, self.front):
            each.close()


@pytest.mark.timeout(180)
def test_calls_of_every_kind_that_have_begun_are_answered(checkpoint_path: Path, alone: Alone) -> None:
    config = house_config(
        checkpoint_path, server__drain_seconds=SECONDS, server__leaving_seconds=2 * BEFORE, **EP4
    )
    batch, rows = alone.batch(8, seed=3), alone.batch(400, seed=4)
    house = LocalCluster(config).start()
    try:
        kinds = Kinds(house, batch, rows)
        seen = {kind: Seen() for kind in kinds.all()}
        right = {id(each): alone.forward(1, *each) for each in (batch, rows)}

        def ask(kind: str) -> None:
            call, given = kinds.all()[kind]
            while not seen[kind].call(call, right[id(given)]):
                pass

        asking = [threading.Thread(target=ask, args=(kind,), daemon=True) for kind in seen]
        for each in asking:
            each.start()
        time.sleep(4 * BEFORE)
        told = time.monotonic()
        house.stop()
        took = time.monotonic() - told
        for each in asking:
            each.join(SECONDS)
            assert not each.is_alive()
        kinds.close()
    finally:
        with suppress(Exception):
            house.stop()
    for kind, found in seen.items():
        lost = [ended for began, ended in found.ends if ended and began < told]
        print(kind, len(found.ends), lost)
        assert len(found.ends) > 1, kind
        assert not lost, f"{kind}: begun before the stop and not answered"
        assert found.ends[-1][1].startswith(("UNAVAILABLE", "14")), found.ends[-1]
    assert took < SECONDS / 2, "it waits for calls, and not for callers"
