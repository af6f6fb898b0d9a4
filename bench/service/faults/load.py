"""Load for `overload`, each in a process of its own: callers who never wait, callers who do, and nuisances.

    python -m bench.service.faults.load KIND '{"addresses": [...], ...}'

Prints `ready` once it begins, works until its time is over or its stdin ends, and prints what it saw as JSON.
"""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from moeserve.proto import health, moe_pb2
from moeserve.proto.errors import PUSHBACK_KEY

FORWARD = "/moeserve.v1.LaneService/Forward"
STREAM = "/moeserve.v1.LaneService/ForwardStream"
UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
CLOSE = 1e-4  # relative to the answer's largest number
MOST_UNDER_WAY = 2000  # of one caller that never waits: beyond, it leaves out a call and counts that


@dataclass
class Seen:
    """How calls ended: seconds by code, wrong answers among them, and calls that were not made."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    wrong: int = 0
    left_out: int = 0
    began: float = field(default_factory=time.perf_counter)
    lasted: float = 0.0  # seconds from `began` until the last call ended
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, code: str, seconds: float, *, right: bool = True) -> None:
        """One call ended."""
        with self.lock:
            self.seconds.setdefault(code, []).append(round(seconds, 6))
            self.wrong += not right
            self.lasted = time.perf_counter() - self.began


class Questions:
    """Requests and what they have to be answered, from a file that `overload` wrote; taken in turn."""

    def __init__(self, path: str) -> None:
        with np.load(path) as arrays:
            self._asked = [arrays[name].tobytes() for name in sorted(arrays) if name.startswith("asked")]
            self._right = [arrays[name] for name in sorted(arrays) if name.startswith("right")]

    def at(self, turn: int) -> bytes:
        """The request of a turn."""
        return self._asked[turn % len(self._asked)]

    def answered(self, turn: int, reply: bytes) -> bool:
        """Whether the reply is right."""
        right = self._right[turn % len(self._right)]
        found = moe_pb2.ForwardReply.FromString(reply).hidden.data
        if len(found) != right.nbytes:
            return False
        off = np.abs(np.frombuffer(found, np.float32).reshape(right.shape) - right).max()
        return bool(off <= CLOSE * np.abs(right).max())


def stubs(spec: dict[str, Any], path: str = FORWARD) -> list[Any]:
    """A connection of its own to each of the addresses."""
    channels = [grpc.insecure_channel(address, options=UNLIMITED) for address in spec["addresses"]]
    for channel in channels:
        grpc.channel_ready_future(channel).result(30)
    return [channel.unary_unary(path) for channel in channels]


def rude(spec: dict[str, Any]) -> Seen:
    """Calls at a fixed rate, whatever becomes of them."""
    questions, calls, seen = Questions(spec["questions"]), stubs(spec), Seen()
    under_way = threading.Semaphore(MOST_UNDER_WAY)

    def ended(turn: int, began: float, call: Any) -> None:
        took = time.perf_counter() - began
        under_way.release()
        if call.code() is grpc.StatusCode.OK:
            seen.note("OK", took, right=questions.answered(turn, call.result()))
        else:
            seen.note(call.code().name, took)

    say_ready()
    started, turn = time.perf_counter(), 0
    seen.began = started
    while (now := time.perf_counter() - started) < spec["seconds"]:
        if (early := turn / spec["rate"] - now) > 0:
            time.sleep(early)
            continue
        if under_way.acquire(blocking=False):
            began = time.perf_counter()
            call = calls[turn % len(calls)].future(questions.at(turn), timeout=spec["deadline"])
            call.add_done_callback(lambda call, turn=turn, began=began: ended(turn, began, call))
        else:
            seen.left_out += 1
        turn += 1
    for _ in range(MOST_UNDER_WAY):
        under_way.acquire(timeout=spec["deadline"] + 10)
    return seen


def polite(spec: dict[str, Any]) -> Seen:
    """Workers that call one after the other, and come back when they are told to."""
    questions, calls, seen = Questions(spec["questions"]), stubs(spec), Seen()
    seen.began = time.perf_counter()
    until = seen.began + spec["seconds"]

    def work(worker: int) -> None:
        turn = worker
        while time.perf_counter() < until:
            began, wait = time.perf_counter(), 0.0
            try:
                reply = calls[turn % len(calls)](questions.at(turn), timeout=spec["deadline"])
            except grpc.RpcError as failed:
                seen.note(failed.code().name, time.perf_counter() - began)
                told = dict(failed.trailing_metadata() or ())
                wait = int(told.get(PUSHBACK_KEY, 0)) / 1000
            else:
                took = time.perf_counter() - began
                seen.note("OK", took, right=questions.answered(turn, reply))
                turn += spec["workers"]
            time.sleep(wait + spec.get("pause", 0.0))

    say_ready()
    in_threads(work, spec["workers"])
    return seen


def probes(spec: dict[str, Any]) -> Seen:
    """Asks for health, over gRPC at each address and over HTTP at `http`, ten times a second."""
    checks, seen = stubs(spec, health.METHOD), Seen()
    say_ready()
    until = time.perf_counter() + spec["seconds"]
    while time.perf_counter() < until:
        for at, check in enumerate(checks):
            began = time.perf_counter()
            with contextlib.suppress(grpc.RpcError):
                state = health.decode_check(check(b"", timeout=30))
                seen.note(f"{spec['names'][at]} {state}", time.perf_counter() - began)
        began, code = time.perf_counter(), 0
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"http://{spec['http']}/readyz", timeout=30) as answer,
        ):
            code = answer.status
        seen.note(f"http {code}", time.perf_counter() - began)
        time.sleep(0.1)
    return seen


def streams(spec: dict[str, Any]) -> Seen:
    """Opens streams and says nothing on them."""
    seen, ends = Seen(), threading.Event()
    channels = [grpc.insecure_channel(address, options=UNLIMITED) for address in spec["addresses"]]

    def silent() -> Iterator[bytes]:
        ends.wait()
        yield from ()

    opened = [channels[at % len(channels)].stream_stream(STREAM)(silent()) for at in range(spec["count"])]
    time.sleep(2.0)
    seen.note("open", 0.0)
    say_ready()
    wait_for_the_end()
    seen.left_out = sum(each.done() for each in opened)
    ends.set()
    for each in opened:
        each.cancel()
    return seen


def half_open(spec: dict[str, Any]) -> Seen:
    """Opens connections that begin to speak HTTP/2 and do not go on."""
    seen, kept = Seen(), []
    for at in range(spec["count"]):
        host, port = spec["addresses"][at % len(spec["addresses"])].rsplit(":", 1)
        made = socket.create_connection((host, int(port)), timeout=30)
        made.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[: at % 25])
        kept.append(made)
    say_ready()
    wait_for_the_end()
    seen.left_out = len(kept)
    return seen


def garbage(spec: dict[str, Any]) -> Seen:
    """Sends large messages that are none, one after the other on each of `count` connections."""
    seen, over = Seen(), threading.Event()
    body = b"\x00" * spec["nbytes"]

    def send(worker: int) -> None:
        address = spec["addresses"][worker % len(spec["addresses"])]
        call = grpc.insecure_channel(address, options=UNLIMITED).unary_unary(FORWARD)
        while not over.is_set():
            began = time.perf_counter()
            try:
                call(body, timeout=30)
            except grpc.RpcError as failed:
                seen.note(failed.code().name, time.perf_counter() - began)

    workers = [threading.Thread(target=send, args=(at,), daemon=True) for at in range(spec["count"])]
    for worker in workers:
        worker.start()
    say_ready()
    wait_for_the_end()
    over.set()
    for worker in workers:
        worker.join(40)
    return seen


def unread(spec: dict[str, Any]) -> Seen:
    """Streams that send as fast as they may and read no reply."""
    questions, seen, over = Questions(spec["questions"]), Seen(), threading.Event()

    def requests(sent: queue.SimpleQueue[int]) -> Iterator[bytes]:
        turn = 0
        while not over.is_set():
            sent.put(turn)
            yield questions.at(turn)
            turn += 1

    opened, counts = [], []
    for at in range(spec["count"]):
        channel = grpc.insecure_channel(spec["addresses"][at % len(spec["addresses"])], options=UNLIMITED)
        counts.append(queue.SimpleQueue[int]())
        opened.append(channel.stream_stream(STREAM)(requests(counts[-1])))
    say_ready()
    time.sleep(spec["seconds"])
    over.set()
    for each in opened:
        each.cancel()
    seen.left_out = sum(each.qsize() for each in counts)
    return seen


KINDS: dict[str, Callable[[dict[str, Any]], Seen]] = {
    each.__name__: each for each in (rude, polite, probes, streams, half_open, garbage, unread)
}


def in_threads(work: Callable[[int], None], count: int) -> None:
    """Runs `work` in so many threads, and waits for them."""
    threads = [threading.Thread(target=work, args=(at,)) for at in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def say_ready() -> None:
    """Tells the parent that this begins."""
    print("ready", flush=True)


def wait_for_the_end() -> None:
    """Returns when the parent closes stdin."""
    sys.stdin.read()


def main() -> None:
    """Runs one kind."""
    kind, spec = sys.argv[1], json.loads(sys.argv[2])
    seen = KINDS[kind](spec)
    Path(spec["into"]).write_text(
        json.dumps({name: getattr(seen, name) for name in ("seconds", "wrong", "left_out", "lasted")})
    )


if __name__ == "__main__":
    main()
