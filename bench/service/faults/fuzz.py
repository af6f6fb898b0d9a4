"""Malformed messages and bytes on every port of a service, between good calls whose answers are compared.

    python -m bench.service.faults.fuzz [--messages 100000] [--seed 16] [--record]

A local service of two ranks serves one layer of four tiny experts. Every port that its processes listen on is
found in /proc: front door, lanes, exporters, the control streams, the movers, the sockets that hand regions
over, and what torch listens on for the process group. Threads send each of them mutated calls, streams,
frames, packets and plain bytes, while good calls go on; each good answer is compared with what one process
computes of it.

Exit status 1, and no record, where a process ends, the group forms anew, a good call fails or is wrong, a
refusal says INTERNAL or more than a kibibyte, the log grows beyond `log.bytes_per_minute`, or memory,
descriptors or threads stay above what they were after a first round of the same. Resources are
looked at while nothing is sent, SETTLE_SECONDS after the last message (LATEST_SECONDS at most). The first
round comes from more threads, so that every pool of threads has as many as it will have.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import torch
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2

from bench.lib.children import end
from bench.lib.held import Held
from bench.lib.mutations import Mutations
from bench.lib.record import Result, write
from bench.service.hop import Setting, make_checkpoint
from moeserve.checkpoints.checkpoint import Checkpoint
from moeserve.proto import moe_pb2
from moeserve.proto.client import MoeClient
from moeserve.proto.tensors import encode, plain
from moeserve.proto.transports.shared_memory import socket_address
from moeserve.runtime.control.frames import encoded

HIDDEN, LAYER, ROWS = 64, 0, 8
SERVED = Setting(ROWS, HIDDEN)
THREADS = 4
WARM_UP = 0.1  # of the messages, before resources are looked at for the first time
SETTLE_SECONDS = 15.0  # regions that nobody fetched are given back after 10
LATEST_SECONDS = 45.0  # strangers have 10 s to show a token, and this machine may do much else
SECONDS = 10.0  # that anything may take
LONGEST_TEXT = 1024
SERVE = "-m moeserve serve --launcher local --device cpu --port 0 --metrics-port 0 --data-parallel-size 2"
TOLERANCE = 0.02  # of the largest number of an answer in bfloat16
MEMORY = 1.10  # of what it was
SPARE = 4  # descriptors and threads that come and go by themselves

Send = Callable[[Mutations], None]


# -- the service


class Service:
    """`moeserve serve`, its processes, and what they hold."""

    def __init__(self, checkpoint: Path, log: Path) -> None:
        self._log = log.open("wb")
        self.log = log
        command = [
            sys.executable,
            *SERVE.split(),
            "--enable-expert-parallel",
            "--checkpoint",
            str(checkpoint),
        ]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._log, text=True)
        self.exporters: list[str] = []
        self.address = ""
        for line in self.process.stdout or ():
            if line.startswith("metrics on "):
                self.exporters = line.split()[2:]
            if line.startswith("serving on "):
                self.address = line.split()[-1]
                break
        if not self.address:
            raise RuntimeError(f"the service did not start: {log.read_text()[-2000:]}")

    @property
    def pids(self) -> list[int]:
        """The head's process and all that it has started."""
        found = [self.process.pid]
        for pid in found:
            for task in Path(f"/proc/{pid}/task").glob("*/children"):
                found += [int(child) for child in task.read_text().split()]
        return found

    @property
    def served(self) -> list[int]:
        """The head's process and the ranks': the others are Python's own, which start ranks."""
        with MoeClient(self.address) as client:
            return [self.process.pid, *(rank.pid for rank in client.status().ranks)]

    def held(self) -> dict[int, Held]:
        """What each process holds now."""
        return {pid: Held.of(pid) for pid in self.pids}

    def close(self) -> None:
        """Ends it as an operator does."""
        end(self.process, 60)
        self._log.close()


@dataclass(frozen=True)
class Port:
    """Something that a process listens on."""

    pid: int
    address: str  # 127.0.0.1:port, or the path or @name of a Unix socket


def ports_of(pids: list[int]) -> list[Port]:
    """Every TCP port and Unix socket that those processes listen on."""
    listening: dict[str, str] = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A":
                listening[words[9]] = f"127.0.0.1:{int(words[1].rpartition(':')[2], 16)}"
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        words = line.split()
        if len(words) == 8 and int(words[3], 16) & 0x10000:
            listening[words[6]] = words[7]
    found: dict[str, Port] = {}
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inode = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(descriptor))
                if inode and inode[1] in listening:
                    found[listening[inode[1]]] = Port(pid, listening[inode[1]])
    return sorted(found.values(), key=lambda port: port.address)


# -- what is sent


@dataclass
class Tally:
    """What became of the messages. Safe from any thread: each has its own, and they are added up."""

    sent: Counter[str] = field(default_factory=Counter)  # by kind of port
    ended: Counter[str] = field(default_factory=Counter)  # by how a call ended
    wrong: list[str] = field(default_factory=list)


class Doors:
    """Mutated calls of one gRPC address: every method of the contract, health, and methods that are not."""

    def __init__(self, address: str, kind: str, tally: Tally) -> None:
        self._address, self._kind, self._tally = address, kind, tally
        self._channel = grpc.insecure_channel(address, [("grpc.max_receive_message_length", -1)])
        self._methods = [
            (
                f"/{service.full_name}/{method.name}",
                GetMessageClass(method.input_type),
                method.client_streaming,
            )
            for service in moe_pb2.DESCRIPTOR.services_by_name.values()
            for method in service.methods
        ]
        health = "/grpc.health.v1.Health/Check"
        self._methods += [(health, health_pb2.HealthCheckRequest, False), ("/a.b/C", moe_pb2.Region, False)]
        self._seeds = forward_requests()

    def send(self, mutations: Mutations) -> None:
        """One call, stream or handful of bytes."""
        draw = mutations.random.random()
        if draw < 0.15:
            send_bytes(self._address, mutations.of_bytes(mutations.random.choice(HTTP2)), mutations)
            self._tally.sent[f"{self._kind}, bytes"] += 1
            return
        path, kind, streams = mutations.random.choice(self._methods)
        bodies = [
            self._body(mutations, kind) for _ in range(mutations.random.randint(1, 4) if streams else 1)
        ]
        self._tally.sent[f"{self._kind}, {'streams' if streams else 'calls'}"] += 1
        try:
            if streams:
                for _ in self._channel.stream_stream(path)(iter(bodies), timeout=SECONDS):
                    continue
            else:
                self._channel.unary_unary(path)(bodies[0], timeout=SECONDS)
            self._tally.ended["OK"] += 1
        except grpc.RpcError as error:
            self._ended(path, error)

    def _body(self, mutations: Mutations, kind: type[Any]) -> bytes:
        if kind is moe_pb2.ForwardRequest:
            return mutations.of_message(kind(), mutations.random.choice(self._seeds))
        body = mutations.of_message(kind(), b"")
        if kind is moe_pb2.SetLogLevelRequest and b"debug" in body:
            return b""
        return body

    def _ended(self, path: str, error: Any) -> None:
        """Looks at a refusal: it has a code that says whose fault it is, and a short text."""
        name, text = error.code().name, error.details() or ""
        self._tally.ended[name] += 1
        if name in ("INTERNAL", "UNKNOWN") or len(text.encode()) > LONGEST_TEXT:
            self._tally.wrong.append(f"{self._kind} {path}: {name} of {len(text)} characters: {text[:200]}")

    def close(self) -> None:
        """Closes the channel."""
        self._channel.close()


def forward_requests() -> list[bytes]:
    """Requests that are right: a choice, logits, regions that are not there."""
    hidden, ids, weights = batch(ROWS, 1)
    choice = moe_pb2.Choice(ids=encode(plain(ids, "ids")), weights=encode(plain(weights, "weights")))
    rows = encode(plain(hidden, "hidden"))
    logits = encode(plain(torch.randn(ROWS, SERVED.experts), "logits"))
    region = moe_pb2.Region(name=f"region-1-{'0' * 32}", size=hidden.nbytes)
    placed = moe_pb2.Tensor(dtype=rows.dtype, shape=rows.shape, region=region)
    made = (
        moe_pb2.ForwardRequest(hidden=rows, choice=choice, job_id="a", timeout_ms=2000),
        moe_pb2.ForwardRequest(hidden=rows, logits=logits, job_id="b", timeout_ms=2000),
        moe_pb2.ForwardRequest(hidden=placed, choice=choice, output=region, job_id="c"),
    )
    return [each.SerializeToString() for each in made]


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\x00\x00\x06\x04\x00\x00\x00\x00\x00\x00\x04\x00\x00\xff\xff"
HTTP2 = (
    PREFACE + SETTINGS,
    PREFACE + SETTINGS + b"\x00\x00\x08\x06\x00\x00\x00\x00\x00abcdefgh",
    PREFACE + SETTINGS + b"\x00\x00\x05\x01\x05\x00\x00\x00\x01\x82\x84\x87\x41\x8a",
    PREFACE + SETTINGS + b"\x00\x00\x04\x08\x00\x00\x00\x00\x00\x7f\xff\xff\xff" * 3,
    b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 64,
)
SCRAPES = (
    b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET /readyz HTTP/1.0\r\n\r\n",
    b"POST /livez HTTP/1.1\r\nContent-Length: 10\r\n\r\nab",
    b"GET /metrics?name[]=a HTTP/1.1\r\nAccept-Encoding: gzip\r\nAccept: text/plain\r\n\r\n",
)


def frame(value: dict[str, Any]) -> bytes:
    """A frame of a control stream."""
    return encoded(value)


FRAMES = (
    frame({"kind": "hello", "rank": 1, "token": "guess", "pid": 1, "host_id": "a", "address": "a:1"}),
    frame({"kind": "weights", "token": "guess"})
    + frame({"kind": "slots", "layer": 0, "slots": [0], "how": "stream"}),
    frame({"kind": "done", "generation": 1, "step": 1}),
    struct.pack("<I", 1 << 31) + b"x" * 100,
    frame({"kind": "a" * 100_000}),
)
"""The token is not known to who sends them; what follows a right one is fuzzed in tests/fuzz."""


SHUT: set[str] = set()
"""Ports that drop who comes, as gloo's do once a group is formed: nobody waits for them again."""

SHUT_SECONDS = 0.005


def send_bytes(address: str, data: bytes, mutations: Mutations) -> None:
    """Connects, sends bytes, and leaves: at once, or once the other end has closed or been silent."""
    host, port = address.rsplit(":", 1)
    within = SHUT_SECONDS if address in SHUT else SECONDS / 10
    try:
        client = socket.create_connection((host, int(port)), within)
    except TimeoutError:
        SHUT.add(address)
        return
    except OSError:
        return
    with contextlib.suppress(OSError), client:
        client.settimeout(0.05)
        client.sendall(data)
        if mutations.random.random() < 0.3:
            client.shutdown(socket.SHUT_WR)
            while client.recv(1 << 16):
                continue


def send_packets(path: str, mutations: Mutations) -> None:
    """Packets, or a stream's bytes, to a Unix socket."""
    for kind in (socket.SOCK_SEQPACKET, socket.SOCK_STREAM):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, kind) as client:
            client.settimeout(0.05)
            client.connect(socket_address(path))
            for _ in range(mutations.random.randint(1, 3)):
                seed = mutations.random.choice(
                    (b"region-1-" + b"0" * 32, b"region-7", b"\x00" * 200, *FRAMES[:3])
                )
                client.send(mutations.of_bytes(seed)[:60_000] or b"\x00")
            if mutations.random.random() < 0.3:
                client.recv(4096)
            return


def senders(service: Service, client: MoeClient, tally: Tally) -> tuple[list[Send], list[Doors]]:
    """What sends a message to each port, and the channels to close afterwards."""
    lanes = {lane.address: f"lane {lane.rank}" for lane in client.topology().lanes}
    doors = {service.address: "front door"} | lanes
    found: list[Send] = []
    channels: list[Doors] = []

    def sender(kind: str, send: Callable[[Mutations], None]) -> Send:
        def counted(mutations: Mutations) -> None:
            send(mutations)
            tally.sent[kind] += 1

        return counted

    def bytes_to(address: str, seeds: tuple[bytes, ...]) -> Callable[[Mutations], None]:
        return lambda mutations: send_bytes(
            address, mutations.of_bytes(mutations.random.choice(seeds), seeds), mutations
        )

    for port in ports_of(service.served):
        owner = "head" if port.pid == service.process.pid else "rank"
        if port.address in doors:
            channels.append(Doors(port.address, doors[port.address], tally))
            found += [channels[-1].send] * 4
        elif port.address in service.exporters:
            found.append(sender("exporters", bytes_to(port.address, SCRAPES)))
        elif port.address[0] in "@/":
            found.append(sender("Unix sockets", partial(send_packets, port.address)))
        else:
            found.append(sender(f"other ports of {owner}", bytes_to(port.address, FRAMES)))
    return found, channels


# -- good calls


def batch(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, chosen experts and weights."""
    generator = torch.Generator().manual_seed(seed)
    weights, ids = torch.rand(rows, SERVED.experts, generator=generator).topk(SERVED.top_k)
    return torch.randn(rows, HIDDEN, generator=generator).bfloat16(), ids.int(), weights


class Good:
    """Good calls, and what one process computes of them."""

    def __init__(self, checkpoint: Path, client: MoeClient) -> None:
        held = Checkpoint(checkpoint).experts(LAYER, range(SERVED.experts))
        self._gate_up, self._down = held.gate_up.dequantize().float(), held.down.dequantize().float()
        self._client = client
        self.calls = 0
        self.slowest = 0.0
        self.wrong: list[str] = []

    def call(self) -> None:
        """One call of one to eight rows, through lanes or the front door."""
        self.calls += 1
        hidden, ids, weights = batch(1 + self.calls % ROWS, self.calls)
        started = time.monotonic()
        try:
            answer = self._client.forward(LAYER, hidden, ids, weights, timeout=SECONDS)
        except Exception as error:
            self.wrong.append(f"good call {self.calls}: {type(error).__name__}: {error}")
            return
        self.slowest = max(self.slowest, time.monotonic() - started)
        expected = self._expected(hidden.float(), ids, weights)
        error = float((torch.as_tensor(answer).float() - expected).abs().max() / expected.abs().max())
        if not error <= TOLERANCE:
            self.wrong.append(f"good call {self.calls} is wrong by {error:.3g} of its largest number")

    def _expected(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        mixed = torch.zeros_like(hidden)
        for row in range(len(hidden)):
            for expert, share in zip(ids[row].tolist(), weights[row].tolist(), strict=True):
                gate, up = (self._gate_up[expert] @ hidden[row]).chunk(2)
                mixed[row] += share * (self._down[expert] @ (torch.nn.functional.silu(gate) * up))
        return mixed


# -- the run


def attack(
    service: Service, client: MoeClient, good: Good, count: int, seed: int, many: int = THREADS
) -> Tally:
    """Sends `count` messages from so many threads, while good calls go on."""
    tallies = [Tally() for _ in range(many)]
    left = iter(range(count))
    lock = threading.Lock()
    done = threading.Event()

    def send_all(number: int) -> None:
        mutations = Mutations(seed * 1000 + number)
        found, channels = senders(service, client, tallies[number])
        try:
            while not done.is_set():
                with lock:
                    if next(left, None) is None:
                        return
                mutations.random.choice(found)(mutations)
        finally:
            for channel in channels:
                channel.close()

    threads = [threading.Thread(target=send_all, args=(number,)) for number in range(many)]
    for thread in threads:
        thread.start()
    try:
        while any(thread.is_alive() for thread in threads):
            good.call()
            if service.process.poll() is not None or len(good.wrong) > 20:
                break
            time.sleep(0.05)
    finally:
        done.set()
        for thread in threads:
            thread.join(4 * SECONDS)
    whole = Tally()
    for tally in tallies:
        whole.sent += tally.sent
        whole.ended += tally.ended
        whole.wrong += tally.wrong
    return whole


@contextlib.contextmanager
def running(folder: Path) -> Iterator[tuple[Service, MoeClient, Good]]:
    """A service, a client of it, and good calls."""
    torch.set_num_threads(1)
    checkpoint = folder / "checkpoint"
    make_checkpoint(checkpoint, SERVED)
    service = Service(checkpoint, folder / "log")
    try:
        with MoeClient(service.address) as client:
            yield service, client, Good(checkpoint, client)
    finally:
        service.close()


def main() -> int:
    """Runs it, prints what came of it, and writes the record where all is as it has to be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=16)
    parser.add_argument("--log", type=Path, help="where to keep the service's log")
    parser.add_argument("--record", action="store_true", help="write bench/results/fuzz.jsonl")
    args = parser.parse_args()
    random.seed(args.seed)
    with tempfile.TemporaryDirectory() as folder, running(Path(folder)) as (service, client, good):
        for _ in range(20):
            good.call()
        warm = attack(service, client, good, int(WARM_UP * args.messages), args.seed + 1, 4 * THREADS)
        time.sleep(SETTLE_SECONDS)
        generation, before = client.topology().generation, service.held()
        started, logged = time.monotonic(), service.log.stat().st_size
        tally = attack(service, client, good, args.messages, args.seed)
        seconds = time.monotonic() - started
        for _ in range(20):
            good.call()
        time.sleep(SETTLE_SECONDS)
        wrong = [*warm.wrong, *tally.wrong, *good.wrong]
        alive = service.process.poll() is None
        after = settled(service, before) if alive else {}
        now = client.topology().generation if alive else -1
        logged = service.log.stat().st_size - logged
        text = service.log.read_text(errors="replace")
        if args.log:
            args.log.write_text(text)
    if not alive or now != generation or after.keys() != before.keys():
        wrong.append(f"generation {now} after {generation}; processes {sorted(after)} after {sorted(before)}")
    if (sent := sum(tally.sent.values())) < args.messages:
        wrong.append(f"{sent} messages were sent of {args.messages}")
    wrong += grown(before, after)
    allowed = (seconds / 60 + 2) * (1 << 20) * len(before)
    if logged > allowed:
        wrong.append(f"{logged} bytes were logged in {seconds:.0f} s; {allowed:.0f} may be")
    show(tally, good, before, after, (seconds, logged, text.count("Traceback")))
    for kind, count in Counter(wrong).most_common(30):
        print(f"WRONG, {count} times: {kind}")
    if args.record and not wrong:
        write(results(tally, good, (before, after), (seconds, logged)))
    return 1 if wrong else 0


def settled(service: Service, before: dict[int, Held]) -> dict[int, Held]:
    """What processes hold once it is no more than before, or after LATEST_SECONDS."""
    end = time.monotonic() + LATEST_SECONDS
    while grown(before, after := service.held()) and time.monotonic() < end:
        time.sleep(1.0)
    return after


def grown(before: dict[int, Held], after: dict[int, Held]) -> list[str]:
    """What processes hold more of than they did."""
    found = []
    for pid in before.keys() & after.keys():
        was, now = before[pid], after[pid]
        if now.descriptors > was.descriptors + SPARE:
            more = dict(now.kinds - was.kinds)
            found.append(
                f"process {pid} has {now.descriptors} descriptors after {was.descriptors}, more: {more}"
            )
        if now.threads > was.threads + SPARE:
            found.append(f"process {pid} has {now.threads} threads after {was.threads}")
        if now.nbytes > MEMORY * was.nbytes:
            found.append(f"process {pid} has {now.nbytes >> 20} MiB after {was.nbytes >> 20}")
    return found


def show(
    tally: Tally, good: Good, before: dict[int, Held], after: dict[int, Held], told: tuple[float, int, int]
) -> None:
    """Prints what was sent, how it ended, and what processes hold."""
    seconds, logged, tracebacks = told
    print(f"{sum(tally.sent.values())} malformed messages in {seconds:.0f} s:")
    for kind, count in sorted(tally.sent.items()):
        print(f"  {kind}: {count}")
    print(f"calls and streams ended: {dict(tally.ended.most_common())}")
    print(f"good calls: {good.calls}, slowest {good.slowest:.3f} s, wrong or failed {len(good.wrong)}")
    print(f"log: {logged} bytes, {tracebacks} tracebacks")
    for pid, was in before.items():
        print(f"process {pid}: {was} -> {after.get(pid)}")


def results(
    tally: Tally, good: Good, held: tuple[dict[int, Held], dict[int, Held]], told: tuple[float, int]
) -> list[Result]:
    """The record."""
    seconds, logged = told
    sent = sum(tally.sent.values())
    before, after = ({pid: one.nbytes for pid, one in each.items()} for each in held)
    memory = max(after[pid] / before[pid] for pid in before)
    counts = {kind: float(count) for kind, count in sorted(tally.sent.items())}
    return [
        Result("fuzz", "malformed messages", float(sent), "messages", "higher", 100_000.0, counts),
        Result(
            "fuzz",
            "good calls wrong or failed",
            float(len(good.wrong)),
            "calls",
            "lower",
            0.0,
            {"good calls": float(good.calls), "slowest, s": good.slowest},
        ),
        Result("fuzz", "memory afterwards, the process that grew most", memory, "x", "lower", MEMORY),
        Result(
            "fuzz",
            "log",
            logged / seconds * 60 / len(before),
            "bytes a minute and process",
            "lower",
            float(1 << 20),
        ),
    ]


if __name__ == "__main__":
    sys.exit(main())
