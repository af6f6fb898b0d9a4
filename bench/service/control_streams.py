"""Times the coordinator's stream beside a gRPC stream: a step header to another process and one back.

    python -m bench.service.control_streams [--rounds 4000]

Both ends echo the same JSON header over loopback, one round at a time, in blocks that take turns.
Microseconds of a round trip; the record is bench/results/control_streams.jsonl.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import queue
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection

import grpc

from bench.lib.record import Result, write
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
        yield _encoded(json.loads(request))


def serve(ports: Connection) -> None:
    """The other process: both echoes; it ends with the pipe."""
    listener = socket.create_server(("127.0.0.1", 0))
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


def over_frames(port: int) -> tuple[Callable[[], object], Callable[[], None]]:
    """A round trip over the coordinator's stream, and what closes it."""
    stream = connect(f"127.0.0.1:{port}", 10.0)

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
        requests.put(_encoded(HEADER))
        message: Message = json.loads(next(replies))
        return message

    def close() -> None:
        requests.put(None)
        channel.close()

    return trip, close


def _encoded(message: Message) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode()


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
    near, far = mp.get_context("spawn").Pipe()
    process = mp.get_context("spawn").Process(target=serve, args=(far,), daemon=True)
    process.start()
    frame_port, grpc_port = near.recv()
    ways = {"frames": over_frames(frame_port), "grpc": over_grpc(grpc_port)}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for block in range(rounds // BLOCK + 1):
        for name, (trip, _) in ways.items():
            found = timed(trip)
            times[name] += found if block else []  # the first block warms up
    for _, close in reversed(ways.values()):
        close()
    process.join(10)
    results = []
    for percent, at in (("p50", 0.50), ("p99", 0.99)):
        values = {
            name: round(statistics.quantiles(found, n=1000)[int(at * 1000) - 1], 1)
            for name, found in times.items()
        }
        results.append(
            Result(
                "control_streams",
                f"header and back, {percent}",
                values["frames"],
                "us",
                "lower",
                None,
                {"gRPC stream": values["grpc"]},
            )
        )
        print(f"{percent}: frames {values['frames']} us, gRPC stream {values['grpc']} us")
    write(results)


if __name__ == "__main__":
    main()
