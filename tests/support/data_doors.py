"""A door without a rank, to which data connections lead; and what both ends have of TLS."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from made_certificates import Authority

from moeserve.proto import moe_pb2
from moeserve.proto.credentials import Credentials
from moeserve.proto.transports.carried import Carried
from moeserve.runtime.doors.payloads import RegionLimits, Regions
from moeserve.runtime.keys.keys import Keys
from moeserve.runtime.sections import KeysConfig

Ended = Callable[[moe_pb2.ForwardStreamReply], None]
MOST = 1 << 20
SECONDS = 0.6  # for a message to come, and for a reply to be taken


class Call:
    """What a door gives for a call under way."""

    ended = False


class Door:
    """Keeps what came, and answers when the test says so."""

    def __init__(self) -> None:
        self.asked: list[tuple[moe_pb2.ForwardRequest, Ended, str]] = []
        self.regions = Regions(RegionLimits(max_bytes=8 * MOST))
        self.calls: list[Call] = []
        self.left: list[Call] = []
        self.refused: list[tuple[str, str, str]] = []  # calls that did not come here, as they are counted
        self.came = threading.Semaphore(0)
        self.fails: Exception | None = None
        self.at_once: moe_pb2.ForwardStreamReply | None = None

    def begin(self, request: moe_pb2.ForwardRequest, ended: Ended, peer: str, method: str) -> Call | None:
        assert method == "DataConnection"
        if self.fails is not None:
            raise self.fails
        if self.at_once is not None:
            ended(self.at_once)
            return None
        self.asked.append((request, ended, peer))
        self.calls.append(Call())
        self.came.release()
        return self.calls[-1]

    def leave(self, call: Any) -> None:
        self.left.append(call)

    def rows(self) -> bytes:
        """Of the request that came last."""
        hidden = self.asked[-1][0].hidden
        if hidden.WhichOneof("payload") == "data":
            return hidden.data
        with self.regions.hold(hidden.region.name, hidden.region.offset, hidden.region.size) as memory:
            return bytes(memory)

    def reply(self, data: bytes = b"", **fields: Any) -> None:
        """Answers the next call that came. data: of the answer, which is as large as the rows."""
        assert self.came.acquire(timeout=5)
        request, ended, _ = self.asked[-1]
        reply = moe_pb2.ForwardStreamReply(job_id=request.job_id, **fields)
        if data and request.HasField("output"):
            place = request.output
            with self.regions.hold(place.name, place.offset, place.size) as memory:
                memory[:] = data
            reply.reply.hidden.region.CopyFrom(place)
        elif data:
            reply.reply.hidden.data = data
        ended(reply)


@dataclass
class Encryption:
    """What both ends have of TLS."""

    keys: Keys
    trusts: Credentials | None

    @classmethod
    def none(cls) -> Encryption:
        return cls(Keys(KeysConfig(), ""), None)

    @classmethod
    def tls(cls, folder: Path) -> Encryption:
        authority = Authority(folder, "service")
        certificate, key = authority.sign("moeserve", "127.0.0.1")
        keys = KeysConfig(
            certificate=certificate, private_key=key, ca=authority.path, handshake_seconds=SECONDS
        )
        return cls(Keys(keys, "token"), Credentials(ca=authority.path))

    def wrapped(self, made: socket.socket) -> socket.socket:
        """A connection of a client that is none of ours."""
        if self.trusts is None:
            return made
        context = ssl.create_default_context(cafile=self.trusts.ca)
        return context.wrap_socket(made, server_hostname="127.0.0.1")


def until(true: Callable[[], bool], seconds: float = 5.0) -> bool:
    limit = time.monotonic() + seconds
    while not true() and time.monotonic() < limit:
        time.sleep(0.005)
    return true()


def job(name: str = "a", **fields: Any) -> moe_pb2.ForwardRequest:
    return moe_pb2.ForwardRequest(job_id=name, **fields)


def rows(count: int) -> Carried[moe_pb2.ForwardRequest]:
    data = np.arange(count, dtype=np.uint8).data
    return Carried(job(hidden=moe_pb2.Tensor(dtype=moe_pb2.DTYPE_FP32, shape=[1, count // 4])), data)
