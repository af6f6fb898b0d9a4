"""Times the coordinator's stream beside others: a step header to another process and one back.

    python -m bench.service.control_streams [--rounds 4000]

All echo the same message over loopback, a Unix socket, or rings in shared memory, with and without a spin,
one round at a time, in blocks that take turns; each end decodes and encodes it. Microseconds of a round
trip, of processor time at this end, and of making a header for many lanes and reading it. The record is
bench/results/control_streams.jsonl.
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
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import grpc

from bench.lib.record import Result, write
from moeserve.runtime.control.frames import LENGTH, decoded, encoded
from moeserve.runtime.control.messages import header_message
from moeserve.runtime.control.ring import RING_BYTES
from moeserve.runtime.control.rings import RingOffers, take_ring
from moeserve.runtime.control.stream import Message, Stream, StreamClosed, connect
from moeserve.runtime.step import Header

METHOD = "/bench.Control/Echo"
HEADER = header_message(Header(1, 1, 3, (8, 8, 8, 8), ((17, 8),)), 1)
BLOCK = 200
SPINS = {"frames over rings": 0.0, "frames over rings, a spin of 20 us": 20e-6}


def echo_frames(listener: socket.socket, spin: float | None = None) -> None:
    """Answers every frame of one peer with the same message. spin: of the ring that it takes; None: none."""
    stream = Stream(listener.accept()[0])
    if spin is not None:
        stream.take_ring = partial(take_ring, spin=spin)
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
    rings = []
    for spin in SPINS.values():
        rings.append(socket.create_server(("127.0.0.1", 0)))
        threading.Thread(target=echo_frames, args=(rings[-1], spin), daemon=True).start()
    server = grpc.server(ThreadPoolExecutor(4))
    handler = grpc.stream_stream_rpc_method_handler(echo_grpc)
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("bench.Control", {"Echo": handler})]
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    ports.send((listener.getsockname()[1], port, [one.getsockname()[1] for one in rings]))
    echo_frames(listener)
    server.stop(None)


def over_frames(stream: Stream) -> tuple[Callable[[], object], Callable[[], None]]:
    """A round trip over the coordinator's stream, and what closes it."""

    def trip() -> Message:
        stream.send(HEADER)
        return stream.receive()

    return trip, stream.close


def over_ring(port: int, spin: float) -> Stream:
    """The coordinator's stream once both ends have moved to rings."""
    offers = RingOffers(RING_BYTES, spin)
    stream = connect(f"127.0.0.1:{port}", 10.0)
    offers.offer(stream)
    while not stream.moved:
        stream.send(HEADER)
        stream.receive()
    stream.on_close = offers.close
    return stream


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
    parser.add_argument("--dry", action="store_true", help="print only, leave the record as it is")
    args = parser.parse_args()
    rounds = args.rounds
    folder = tempfile.TemporaryDirectory()
    path = str(Path(folder.name) / "near")
    near, far = mp.get_context("spawn").Pipe()
    process = mp.get_context("spawn").Process(target=serve, args=(far, path), daemon=True)
    process.start()
    frame_port, grpc_port, ring_ports = near.recv()
    ways = {
        "frames": over_frames(connect(f"127.0.0.1:{frame_port}", 10.0)),
        "frames over a Unix socket": over_frames(over_unix(path)),
        "gRPC stream": over_grpc(grpc_port),
    }
    for port, (name, spin) in zip(ring_ports, SPINS.items(), strict=True):
        ways[name] = over_frames(over_ring(port, spin))
    trips = {name: trip for name, (trip, _) in ways.items()}
    times = in_turns(trips, rounds)
    own = {name: processor_time(trip) for name, trip in trips.items()}
    for _, close in reversed(ways.values()):
        close()
    process.join(10)
    folder.cleanup()
    results = [
        Result(
            *("control_streams", "processor time of a header and back, at one end", own.pop("frames")),
            *("us", "lower", None, own),
        )
    ]
    print(f"processor time at one end: {results[0]}")
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
    if not args.dry:
        write(results)


def processor_time(trip: Callable[[], object]) -> float:
    """Microseconds of this thread's processor time for a round trip: the mean of many."""
    before = time.thread_time()
    for _ in range(4 * BLOCK):
        trip()
    return round((time.thread_time() - before) / (4 * BLOCK) * 1e6, 2)


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
