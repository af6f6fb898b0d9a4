"""Times the coordinator's stream beside others: a step header to another process and one back.

    python -m bench.service.control_streams [--rounds 4000]

All echo the same message over loopback, or a Unix socket, one round at a time, in blocks that take turns;
each end decodes and encodes it. Microseconds of a round trip, and of making a header for many lanes and
reading it. The record is bench/results/control_streams.jsonl.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import queue
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import grpc

from bench.lib.record import Result, write
from moeserve.runtime.control.frames import LENGTH, decoded, encoded
from moeserve.runtime.control.messages import header_message
from moeserve.runtime.control.stream import Message, Stream, StreamClosed, connect
from moeserve.runtime.step import Header

METHOD = "/bench.Control/Echo"
HEADER = header_message(Header(1, 1, 3, (8, 8, 8, 8), ((17, 8),)), 1)
BLOCK = 200


def echo_frames(listener: socket.socket) -> None:
    """Answers every frame of one peer with the same message."""
    stream = Stream(listener.accept()[0])
    try:
        while True:
            stream.send(stream.receive())
    except StreamClosed:
        return


def echo_grpc(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
    """Answers every request with the same message, decoded and encoded as a frame's is."""
    for request in requests:
        yield encoded(decoded(request))[LENGTH.size :]


def serve(ports: Connection, path: str) -> None:
    """The other process: all echoes; it ends with the streams."""
    listener = socket.create_server(("127.0.0.1", 0))
    near = socket.create_server(path, family=socket.AF_UNIX)
    threading.Thread(target=echo_frames, args=(near,), daemon=True).start()
    server = grpc.server(ThreadPoolExecutor(4))
    handler = grpc.stream_stream_rpc_method_handler(echo_grpc)
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("bench.Control", {"Echo": handler})]
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    ports.send((listener.getsockname()[1], port))
    echo_frames(listener)
    server.stop(None)


def over_frames(stream: Stream) -> tuple[Callable[[], object], Callable[[], None]]:
    """A round trip over the coordinator's stream, and what closes it."""

    def trip() -> Message:
        stream.send(HEADER)
        return stream.receive()

    return trip, stream.close


def over_grpc(port: int) -> tuple[Callable[[], object], Callable[[], None]]:
    """A round trip over one bidirectional gRPC stream, and what closes it."""
    channel = grpc.insecure_channel(f"127.0.0.1:{port}")
    requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    replies = channel.stream_stream(METHOD)(iter(requests.get, None))

    def trip() -> Message:
        requests.put(encoded(HEADER)[LENGTH.size :])
        return decoded(next(replies))

    def close() -> None:
        requests.put(None)
        channel.close()

    return trip, close


def over_unix(path: str) -> Stream:
    """The coordinator's stream over a Unix socket."""
    near = socket.socket(socket.AF_UNIX)
    near.connect(path)
    return Stream(near)


def words(lanes: int) -> dict[str, Callable[[], object]]:
    """How a header for so many lanes is made and read: as it is, and as JSON."""
    header = header_message(Header(1 << 20, 7, 3, (8,) * lanes, ((1 << 30, 8),)), 1)
    return {
        "MessagePack": lambda: decoded(encoded(header)[LENGTH.size :]),
        "JSON": lambda: json.loads(json.dumps(header, separators=(",", ":")).encode()),
    }


def timed(trip: Callable[[], object]) -> list[float]:
    """Microseconds of each of a block's round trips."""
    times = []
    for _ in range(BLOCK):
        begin = time.perf_counter()
        trip()
        times.append((time.perf_counter() - begin) * 1e6)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description="The coordinator's stream beside a gRPC stream.")
    parser.add_argument("--rounds", type=int, default=4000)
    rounds = parser.parse_args().rounds
    folder = tempfile.TemporaryDirectory()
    path = str(Path(folder.name) / "near")
    near, far = mp.get_context("spawn").Pipe()
    process = mp.get_context("spawn").Process(target=serve, args=(far, path), daemon=True)
    process.start()
    frame_port, grpc_port = near.recv()
    ways = {
        "frames": over_frames(connect(f"127.0.0.1:{frame_port}", 10.0)),
        "frames over a Unix socket": over_frames(over_unix(path)),
        "gRPC stream": over_grpc(grpc_port),
    }
    times = in_turns({name: trip for name, (trip, _) in ways.items()}, rounds)
    for _, close in reversed(ways.values()):
        close()
    process.join(10)
    folder.cleanup()
    results = []
    for percent, at in (("p50", 0.50), ("p99", 0.99)):
        values = quantile(times, at)
        ours = values.pop("frames")
        results.append(
            Result("control_streams", f"header and back, {percent}", ours, "us", "lower", None, values)
        )
        print(f"{percent}: frames {ours} us, {values}")
    for lanes in (4, 64):
        values = quantile(in_turns(words(lanes), rounds), 0.50)
        case = f"a header for {lanes} lanes, made and read, p50"
        ours = values.pop("MessagePack")
        results.append(Result("control_streams", case, ours, "us", "lower", None, values))
        print(f"{case}: {ours} us, {values}")
    write(results)


def in_turns(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Microseconds of each way's rounds."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for block in range(rounds // BLOCK + 1):
        for name, way in ways.items():
            found = timed(way)
            times[name] += found if block else []  # the first block warms up
    return times


def quantile(times: dict[str, list[float]], at: float) -> dict[str, float]:
    """One quantile of each way's."""
    return {
        name: round(statistics.quantiles(found, n=1000)[int(at * 1000) - 1], 1)
        for name, found in times.items()
    }


if __name__ == "__main__":
    main()
