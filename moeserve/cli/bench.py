"""`moeserve bench`: drives a running service and times its answers."""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeserve.cli.arguments.remote import add_address, client_of
from moeserve.cli.shown.lines import say
from moeserve.proto import moe_pb2
from moeserve.proto.client import MoeClient
from moeserve.proto.client.payload import TRANSPORTS
from moeserve.proto.errors import MoeError
from moeserve.proto.timeouts import LONGEST_SECONDS

WARM_UP_CALLS = 5  # of each caller, not counted


@dataclass(frozen=True)
class BenchLoad:
    """The call that every caller repeats."""

    layer: int
    hidden: NDArray[Any]  # [T, H]; bf16 as uint16 bits
    experts: NDArray[np.int32]  # [T, K]
    weights: NDArray[np.float32]  # [T, K]
    dtype: str  # declares what `hidden` holds
    transport: str


@dataclass(frozen=True)
class Result:
    """The result of a measurement; latencies are of whole calls, in seconds, as a caller sees them, and None
    where no call was answered.
    """

    layer: int
    rows: int
    concurrency: int
    transport: str
    seconds: float
    calls: int
    errors: dict[str, int]
    reasons: dict[str, str]  # of each code of `errors`, as the first of them was said
    p50: float | None
    p90: float | None
    p99: float | None
    longest: float | None
    calls_per_second: float
    rows_per_second: float
    jobs_per_step: float | None  # None where no step was counted, nobody tells, or the head counts anew


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand `bench` and its arguments."""
    about = "drive a running service with random rows and time its answers"
    parser = subparsers.add_parser("bench", help=about, description=about)
    add_address(parser, timeout=30.0)
    parser.add_argument("--layer", type=int, help="decoder layer to call; the first one by default")
    parser.add_argument("--rows", type=int, default=32, help="number of tokens in a call; 32 by default")
    parser.add_argument(
        "--concurrency", type=int, default=1, help="number of callers at the same time; 1 by default"
    )
    parser.add_argument(
        "--duration",
        type=float,
        default=5.0,
        metavar="SECONDS",
        help="length of the measurement; 5 by default",
    )
    parser.add_argument(
        "--transport", choices=TRANSPORTS, default="auto", help="how rows travel; auto by default"
    )
    parser.add_argument("--lane", type=int, metavar="RANK", help="send everything to this rank's lane")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random rows; 0 by default")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Prints latency and throughput; 1 when no call was answered. Raises ValueError or MoeError."""
    for name in ("rows", "concurrency", "duration"):
        if getattr(args, name) <= 0:
            raise ValueError(f"--{name}={getattr(args, name)} must be more than 0")
    if args.seed < 0:
        raise ValueError(f"--seed={args.seed} must be 0 or more")
    if not args.duration <= LONGEST_SECONDS:
        raise ValueError(f"--duration={args.duration:g} must be {LONGEST_SECONDS:g} seconds or less")
    with client_of(args, lane=args.lane, transport=args.transport) as client:
        load = make_load(client.model(), args)
        result = measure(client, load, args.concurrency, args.duration)
    print(json.dumps(asdict(result)) if args.json else text(result))
    return 0 if result.calls else 1


def make_load(model: moe_pb2.GetModelReply, args: argparse.Namespace) -> BenchLoad:
    """Makes random rows in the model's dtype, each for different random experts with even weights.

    ValueError: the layer is not served.
    """
    layers = {info.layer: info for info in model.layers}
    chosen, rows = next(iter(layers)) if args.layer is None else args.layer, args.rows
    if chosen not in layers:
        raise ValueError(f"--layer={chosen} is not served; served: {', '.join(map(str, layers))}")
    info, random = layers[chosen], np.random.default_rng(args.seed)
    hidden: NDArray[Any] = random.standard_normal((rows, info.hidden), dtype=np.float32)
    dtype = moe_pb2.DType.Name(model.dtype).removeprefix("DTYPE_").lower()
    if dtype == "bf16":
        hidden = (hidden.view(np.uint32) >> 16).astype(np.uint16)
    elif dtype == "fp16":
        hidden = hidden.astype(np.float16)
    experts = np.argsort(random.random((rows, info.experts)), axis=1)[:, : info.top_k].astype(np.int32)
    weights = np.full((rows, info.top_k), 1 / info.top_k, dtype=np.float32)
    return BenchLoad(chosen, hidden, experts, weights, dtype if dtype == "bf16" else "", args.transport)


def measure(client: MoeClient, load: BenchLoad, concurrency: int, duration: float) -> Result:
    """Drives the service for `duration` seconds from `concurrency` threads of one client. Raises what the
    client says of calls that cannot be made.
    """
    callers = [_Caller(client, load) for _ in range(concurrency)]
    ready, begin, end = threading.Barrier(concurrency + 1), threading.Event(), threading.Event()
    threads = [
        threading.Thread(target=caller.run, args=(ready, begin, end), name=f"caller-{at}", daemon=True)
        for at, caller in enumerate(callers)
    ]
    for thread in threads:
        thread.start()
    try:
        ready.wait()
    except threading.BrokenBarrierError:
        raise next(caller.wrong for caller in callers if caller.wrong is not None) from None
    before, started = _status(client), time.perf_counter()
    begin.set()
    time.sleep(duration)
    end.set()
    for thread in threads:
        thread.join()
    seconds, after = time.perf_counter() - started, _status(client)
    return _result(load, callers, seconds, _jobs_per_step(before, after))


def _status(client: MoeClient) -> moe_pb2.GetStatusReply | None:
    """None where the service does not tell: its head is away, or the caller's role does not have it told."""
    try:
        return client.status()
    except MoeError as failed:
        say(sys.stderr, f"moeserve bench: how many jobs a step has is not told: {failed}")
        return None


def _jobs_per_step(
    before: moe_pb2.GetStatusReply | None, after: moe_pb2.GetStatusReply | None
) -> float | None:
    """None where counts do not say it: there are none, or the head started again in between, from 0."""
    if before is None or after is None:
        return None
    jobs, steps = after.jobs - before.jobs, after.steps - before.steps
    return jobs / steps if jobs >= 0 and steps > 0 else None


class _Caller:
    """A thread that makes one call after another."""

    def __init__(self, client: MoeClient, load: BenchLoad) -> None:
        self.latencies: list[float] = []
        self.errors: Counter[str] = Counter()
        self.reasons: dict[str, str] = {}  # the first of each code
        self.wrong: Exception | None = None  # with the calls themselves
        self._client = client
        self._load = load

    def run(self, ready: threading.Barrier, begin: threading.Event, end: threading.Event) -> None:
        """Warms up, then calls from `begin` to `end`."""
        try:
            for _ in range(WARM_UP_CALLS):
                self._call()
        except MoeError as failed:
            self._failed(failed)
        except Exception as wrong:  # which no call changes: nothing is measured
            self.wrong = wrong
            ready.abort()
            return
        try:
            ready.wait()
        except threading.BrokenBarrierError:
            return
        begin.wait()
        while not end.is_set():
            started = time.perf_counter()
            try:
                self._call()
            except MoeError as failed:
                self._failed(failed)
                end.wait(0.05)  # a service that refuses everything is not to be hammered
                continue
            self.latencies.append(time.perf_counter() - started)

    def _failed(self, failed: MoeError) -> None:
        self.errors[failed.code] += 1
        self.reasons.setdefault(failed.code, str(failed))

    def _call(self) -> None:
        load = self._load
        self._client.forward(load.layer, load.hidden, load.experts, load.weights, dtype=load.dtype)


def _result(load: BenchLoad, callers: list[_Caller], seconds: float, jobs_per_step: float | None) -> Result:
    latencies = [latency for caller in callers for latency in caller.latencies]
    calls, rows = len(latencies), load.hidden.shape[0]
    found = map(float, np.percentile(latencies, (50, 90, 99, 100))) if latencies else (None,) * 4
    p50, p90, p99, longest = found
    return Result(
        layer=load.layer,
        rows=rows,
        concurrency=len(callers),
        transport=load.transport,
        seconds=seconds,
        calls=calls,
        errors=dict(sum((caller.errors for caller in callers), Counter())),
        reasons={code: said for caller in reversed(callers) for code, said in caller.reasons.items()},
        p50=p50,
        p90=p90,
        p99=p99,
        longest=longest,
        calls_per_second=calls / seconds,
        rows_per_second=calls * rows / seconds,
        jobs_per_step=jobs_per_step,
    )


def text(result: Result) -> str:
    """Formats the result as text."""
    latencies = result.p50, result.p90, result.p99, result.longest
    ms = ["-" if value is None else f"{1000 * value:.2f}" for value in latencies]
    together = "-" if result.jobs_per_step is None else f"{result.jobs_per_step:.1f}"
    failed = ", ".join(f"{count} {code}" for code, count in sorted(result.errors.items())) or "none"
    return "\n".join(
        [
            f"load        layer {result.layer}, {result.rows} rows a call, {result.concurrency} callers, "
            f"transport {result.transport}",
            f"latency     p50 {ms[0]} ms, p90 {ms[1]} ms, p99 {ms[2]} ms, longest {ms[3]} ms",
            f"throughput  {result.calls_per_second:.0f} calls/s, {result.rows_per_second:.0f} rows/s, "
            f"{together} jobs a step",
            f"calls       {result.calls} in {result.seconds:.1f} s; errors: {failed}",
            *(f"            {said}" for _, said in sorted(result.reasons.items())),
        ]
    )
