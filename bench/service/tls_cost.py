"""What keys cost a call: the same call of a plain door, with a token, over TLS, and over mutual TLS.

    python -m bench.service.tls_cost [--turns 200] [--service-cores 6] [--patience 120] [--record]

A process has four doors, as a lane has one, that answer with the rows they are sent. Experts are left out:
they take the same with keys, and two services differ from each other by more than keys cost. A control stream
is behind each door, as a rank of another host than the head's has one: a step takes one round trip there. On
the head's host rings of memory take its place, which no key touches; so its time stands beside the cost.

Blocks of calls of all kinds take turns, in another order in every turn. The number is processor time: what
both processes, user and system, take for a call of the block. The cost is the median of the differences to
the plain block of the same turn, in microseconds, with the interval that holds it in 95 of 100 cases; that of
the time on the wall, which others on the machine disturb more, stands beside it. What is
left without the bytes is the aim's. The bytes are what OpenSSL takes in this process to encrypt and decrypt
as many as the call's messages have, in records of TLS. Beside it stands what TLS costs a bare echo of the
same bytes in that same process: more than that is ours. Rows in shared memory go over a Unix socket, which
keys do not touch.

Where the machine has six cores or more, the doors have cores of their own. With --patience a turn counts only
where the cores in use are idle before and after it; with 0 every one counts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import socket
import ssl
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import torch

from bench.lib.cores import Cores, on, usual
from bench.lib.quiet import rounds
from bench.lib.record import ROOT, Result, write
from bench.service.hop import Child, timed
from bench.service.hops.echo_server import METHOD, OPTIONS, Echo
from moeserve.proto import moe_pb2
from moeserve.proto.credentials import KeyedChannel
from moeserve.proto.heap import keep_freed_memory
from moeserve.proto.tensors import encode, plain
from moeserve.runtime.config import Config
from moeserve.runtime.control.stream import Stream, StreamClosed, connect
from moeserve.runtime.doors.calls.admission import DoorLimits
from moeserve.runtime.doors.endpoint import Endpoint
from moeserve.runtime.doors.lane_door import NOT_THE_FRONT_DOOR
from moeserve.runtime.keys.access import Role
from moeserve.runtime.keys.keys import NO_KEYS, Keys
from moeserve.runtime.launch.environment import tune_process

sys.path.insert(0, str(ROOT / "tests" / "support"))

from keyed import Keyring

HIDDEN, TOP_K = 2048, 2
BLOCKS = {1: 40, 512: 8}  # calls of one kind in a row, by rows
TRIPS = 200  # round trips on a stream in a row
REST_SECONDS = 0.002  # before and after a block
MOST_CORES = 6  # of the doors
AIM = 30.0  # microseconds a call, beside the bytes
KEYS = {"no keys": "", "token": "plain", "TLS and token": "tls", "mutual TLS": "mutual"}
"""What is compared: the mode of a `Keyring`, empty for none."""

PLAIN_ECHO, TLS_ECHO = "echo", "echo over TLS"
FORWARD = "/moeserve.v1.LaneService/Forward"
STEP = {"kind": "step", "generation": 1, "step": 1 << 20, "epoch": 1, "layer": 0, "lanes": [[[1, 1]]]}
"""About what goes to and from the head for a call; it is as large both ways."""

Call = Callable[[], object]
Settings = dict[str, Any]  # of a `Keyring`; empty for no keys


@dataclass(frozen=True)
class Cost:
    """Microseconds that one kind of call takes longer than another in the same turn: a median."""

    median: float
    low: float  # the median is between these in 95 of 100 cases
    high: float

    def __str__(self) -> str:
        return f"{self.median:+.1f} us ({self.low:+.1f} to {self.high:+.1f})"

    @classmethod
    def of(cls, differences: list[float]) -> Cost:
        """The median of `differences`, and its interval by their order alone."""
        found, count = sorted(differences), len(differences)
        off = 0.98 * math.sqrt(count)
        low, high = max(0, math.floor(count / 2 - off)), min(count - 1, math.ceil(count / 2 + off))
        return cls(statistics.median(found), found[low], found[high])


class Took(NamedTuple):
    """Microseconds of a call of a block."""

    processor: float  # of both processes, the mean
    wall: float  # the median


Turn = dict[str, Took]  # by kind


@dataclass(frozen=True)
class Case:
    """One number of rows: every turn's calls and round trips; microseconds of the bytes."""

    rows: int
    calls: list[Turn]
    streams: list[Turn]
    bytes_us: float

    def median(self, kind: str, of: str = "processor") -> float:
        """Of a call."""
        return statistics.median(getattr(turn[kind], of) for turn in self.calls)

    def door(self, kind: str, of: str = "processor", beside: str = "no keys") -> Cost:
        """What a call takes longer than one of the kind `beside`, in the same turn."""
        return Cost.of([getattr(turn[kind], of) - getattr(turn[beside], of) for turn in self.calls])

    def stream(self, kind: str) -> Cost:
        """What a round trip takes longer than a plain one, on the wall."""
        return Cost.of([turn[kind].wall - turn["no keys"].wall for turn in self.streams])


# -- the process with the doors


class Door:
    """Answers LaneService's Forward with the rows of the request; the rest of it is not called."""

    carries = False  # large data stays in the message

    def Forward(self, request: moe_pb2.ForwardRequest, context: object) -> moe_pb2.ForwardReply:
        """The rows."""
        return moe_pb2.ForwardReply(hidden=request.hidden)

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *given: None


def keys_of(settings: Settings) -> Keys:
    """The keys of a process of a service with these settings; none without."""
    if not settings:
        return NO_KEYS
    values = {key.replace("__", "."): value for key, value in settings.items()}
    return Keys(Config().with_values(values).keys, "f" * 32)


def answering(keys: Keys) -> str:
    """The address of a control stream whose other end sends back what comes."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        stream = Stream(keys.accept(listener.accept()[0]))
        with contextlib.suppress(StreamClosed):
            while True:
                stream.send(stream.receive())

    threading.Thread(target=answer, daemon=True).start()
    return f"127.0.0.1:{listener.getsockname()[1]}"


def serve(settings: dict[str, Settings], pair: tuple[str, str]) -> None:
    """Prints where doors, streams and echoes are as JSON, and serves until stdin ends."""
    keep_freed_memory()
    tune_process()  # as ranks do
    found: dict[str, dict[str, str]] = {"doors": {}, "streams": {}, "echoes": {}}
    kept: list[object] = []
    for kind, its in settings.items():
        keys = keys_of(its)
        endpoint = Endpoint({"LaneService": Door()}, NOT_THE_FRONT_DOOR, DoorLimits(), 1 << 30, keys)
        found["doors"][kind] = endpoint.start("127.0.0.1", 0)
        found["streams"][kind] = answering(keys)
        kept.append(endpoint)
    certificate, key = (Path(name).read_bytes() for name in pair)
    for kind in (PLAIN_ECHO, TLS_ECHO):
        server = grpc.server(ThreadPoolExecutor(4), handlers=(Echo(),), options=OPTIONS)
        if kind == TLS_ECHO:
            port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, certificate)]))
        else:
            port = server.add_insecure_port("127.0.0.1:0")
        found["echoes"][kind] = f"localhost:{port}"
        server.start()
        kept.append(server)
    print(json.dumps(found), flush=True)
    sys.stdin.read()
    os._exit(0)


# -- what calls them


class Turns:
    """Blocks of calls of every kind, which take turns; `pid` is the process that answers them."""

    def __init__(self, calls: dict[str, Call], block: int, pid: int) -> None:
        self._calls, self._block = calls, block
        self._clocks = (time.CLOCK_PROCESS_CPUTIME_ID, processor_clock(pid))
        self._random = random.Random(0)
        for _ in range(5):
            self.turn()

    def _processor(self) -> float:
        """Seconds that both processes have had of processors."""
        return sum(map(time.clock_gettime, self._clocks))

    def turn(self) -> Turn:
        """A block of each kind, in an order of its own: what was called before tells."""
        kinds = list(self._calls)
        self._random.shuffle(kinds)
        return {kind: self._timed(self._calls[kind]) for kind in kinds}

    def _timed(self, call: Call) -> Took:
        call()  # what the kind before has left behind
        time.sleep(REST_SECONDS)
        before = self._processor()
        seconds = timed(call, self._block)
        time.sleep(REST_SECONDS)  # a server ends a call after its caller has the answer
        processor = (self._processor() - before) / self._block
        return Took(processor * 1e6, statistics.median(seconds) * 1e6)

    def measured(self, cores: Cores, args: argparse.Namespace) -> list[Turn]:
        """So many turns as are asked for."""
        if not args.patience:
            return [self.turn() for _ in range(args.turns)]
        return list(rounds(self.turn, args.turns, args.patience, cores.service | cores.load))


def processor_clock(pid: int) -> int:
    """The id of the clock of another process's time on processors, as clock_getcpuclockid(3) makes it."""
    return (~pid << 3) | 2


def request_of(rows: int) -> moe_pb2.ForwardRequest:
    """A request with its rows inline."""
    hidden = torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(0)).bfloat16()
    asked = moe_pb2.ForwardRequest(hidden=encode(plain(hidden, "hidden")))
    asked.choice.ids.CopyFrom(encode(plain(torch.zeros(rows, TOP_K, dtype=torch.int32), "ids")))
    asked.choice.weights.CopyFrom(encode(plain(torch.full((rows, TOP_K), 1 / TOP_K), "weights")))
    return asked


def door_calls(found: dict[str, dict[str, str]], rings: dict[str, Keyring]) -> dict[str, Any]:
    """Methods of doors and echoes by kind, over a connection of their own each."""
    methods: dict[str, Any] = {}
    for kind, address in found["doors"].items():
        make = partial(channel_to, address)
        if kind in rings:
            shown = rings[kind].credentials(rings[kind].shown("right", frozenset({Role.CALL})))
            methods[kind] = KeyedChannel(shown, make).unary_unary(FORWARD)
        else:
            methods[kind] = make(None).unary_unary(FORWARD)
    tls = grpc.ssl_channel_credentials(Path(rings["TLS and token"].service.path).read_bytes())
    methods[PLAIN_ECHO] = channel_to(found["echoes"][PLAIN_ECHO], None).unary_unary(METHOD)
    methods[TLS_ECHO] = channel_to(found["echoes"][TLS_ECHO], tls).unary_unary(METHOD)
    return methods


def channel_to(address: str, tls: grpc.ChannelCredentials | None) -> grpc.Channel:
    """A channel, over TLS where there are credentials."""
    if tls is None:
        return grpc.insecure_channel(address, options=OPTIONS)
    return grpc.secure_channel(address, tls, options=OPTIONS)


def round_trips(streams: dict[str, str], settings: dict[str, Settings]) -> dict[str, Call]:
    """A message there and back on each control stream."""

    def calling(stream: Stream) -> Call:
        def call() -> None:
            stream.send(STEP)
            stream.receive()

        return call

    return {kind: calling(connect(streams[kind], 10.0, keys_of(its))) for kind, its in settings.items()}


def encrypted_us(sizes: tuple[int, int], ring: Keyring) -> float:
    """Microseconds in which a request and a reply of so many bytes are encrypted and decrypted."""
    server, client = (
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER),
        ssl.create_default_context(cafile=ring.service.path),
    )
    server.load_cert_chain(*ring.pair)
    ways = [ssl.MemoryBIO() for _ in range(2)]
    ends = [
        client.wrap_bio(ways[0], ways[1], server_hostname="localhost"),
        server.wrap_bio(ways[1], ways[0], server_side=True),
    ]
    for end in (*ends, *ends):
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue

    def carry() -> None:
        for (sender, receiver), size in zip((ends, ends[::-1]), sizes, strict=True):
            sender.write(bytes(size))
            while size:
                size -= len(receiver.read(size))

    timed(carry, 20)
    return statistics.median(timed(carry, 200)) * 1e6


def shown(case: Case) -> str:
    """One case for people."""
    busy, wall = case.median("no keys"), case.median("no keys", "wall")
    lines = [f"{case.rows} rows x {HIDDEN} bf16: a call without keys {busy:.0f} us, {wall:.0f} on the wall"]
    lines += [f"  encrypting and decrypting its bytes {case.bytes_us:.0f} us"]
    lines += [f"  {'TLS for an echo':<15} {case.door(TLS_ECHO, beside=PLAIN_ECHO)}"]
    for kind in KEYS:
        if kind != "no keys":
            lines += [f"  {kind:<15} {case.door(kind)}"]
            lines += [f"{'on the wall':>16} {case.door(kind, 'wall')}, a round trip {case.stream(kind)}"]
    return "\n".join(lines)


def results(case: Case) -> list[Result]:
    """One case for the record."""
    found, echo = [], case.door(TLS_ECHO, beside=PLAIN_ECHO).median
    for kind, mode in KEYS.items():
        if not mode:
            continue
        over_tls, cost, wall = mode in ("tls", "mutual"), case.door(kind), case.door(kind, "wall")
        facts = {"with its bytes": cost.median, "at least": cost.low, "at most": cost.high}
        facts |= {"on the wall": wall.median, "a call without keys": case.median("no keys")}
        facts |= {"a round trip to a head elsewhere": case.stream(kind).median}
        if over_tls:
            facts |= {"its bytes": case.bytes_us, "TLS for an echo": echo}
        rounded = {name: round(value, 1) for name, value in facts.items()}
        ours = round(cost.median - over_tls * case.bytes_us, 1)
        case_name = f"{kind}, {case.rows} rows: processor time beside the bytes"
        found.append(Result("tls_cost", case_name, ours, "us", "lower", AIM, rounded))
    return found


def main() -> None:
    """Measures both sizes, prints them and writes the record where asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=200, help="of each size; 200 by default")
    parser.add_argument("--patience", type=float, default=120, help="seconds to wait for quiet cores")
    parser.add_argument(
        "--service-cores", type=int, default=usual(MOST_CORES), help="of the doors alone; 0: all, for both"
    )
    parser.add_argument("--record", action="store_true", help="write bench/results/tls_cost.jsonl")
    parser.add_argument("--serve", type=Path, help="be the doors, with the settings of this file")
    args = parser.parse_args()
    if args.serve:
        serve(**json.loads(args.serve.read_text()))
    keep_freed_memory()
    cores = Cores.shared_out(args.service_cores)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        rings = {kind: Keyring(folder / mode, mode) for kind, mode in KEYS.items() if mode}
        settings = {kind: rings[kind].settings() if kind in rings else {} for kind in KEYS}
        ring, told = rings["TLS and token"], folder / "settings"
        told.write_text(json.dumps({"settings": settings, "pair": ring.pair}))
        with on(cores.service):
            command = [sys.executable, "-m", "bench.service.tls_cost", "--serve", str(told)]
            child = stack.enter_context(Child(command, r"(\{.*\})"))
        found = json.loads(child.said[0])
        stack.enter_context(on(cores.load))
        methods = door_calls(found, rings)
        streams = Turns(round_trips(found["streams"], settings), TRIPS, child.pid)
        cases = []
        for rows, block in BLOCKS.items():
            body = request_of(rows).SerializeToString()
            called = {kind: partial(method, body, timeout=30) for kind, method in methods.items()}
            made = Turns(called, block, child.pid).measured(cores, args), streams.measured(cores, args)
            cases.append(Case(rows, *made, encrypted_us((len(body), rows * HIDDEN * 2), ring)))
            print(shown(cases[-1]), flush=True)
    if args.record:
        write([result for case in cases for result in results(case)])


if __name__ == "__main__":
    main()
