"""Overload: what a service does with five times the calls that it can serve, and who else notices.

    python -m bench.service.overload [--seconds 60] [--seed 0] [--service-cores 6] [--record]

A service of two ranks on the CPU serves one layer, float32. Load comes from processes of its own
(`faults/load.py`), over bare gRPC stubs; every answer is compared with what plain torch computes of the same
weights.

The layer is so heavy that the service answers 15 calls a second with two cores: five times as many calls take
little of the processor from it, also where there are no cores for them alone. With steps of a few ms it was
the load that took the cores, and calls waited in sockets where no door sees them. Deadlines and the rows of a
step fit such a layer. Where the machine has six cores or more the service gets cores of its own, at most six,
and the load runs on the others.

    idle       one caller, one call after the other: what a message takes when nothing else runs
    capacity   callers that wait for their answers, so many that more bring nothing
    overload   one client that calls at five times the capacity and never waits, and one whose workers come
               back when they are told to
    memory     of all processes of the service, 30 s after that and after streams that nobody reads
    health     probes, with 1000 idle streams, 1000 half-open connections and 12 large messages of garbage
               under way at any time; and good calls meanwhile
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import torch
from safetensors.torch import load_file

from bench.lib.checkpoint import Qwen3Moe, write_checkpoint
from bench.lib.cores import Cores, on, usual
from bench.lib.record import Result, write
from bench.service.hop import Child
from moeserve.proto import moe_pb2, moe_pb2_grpc
from moeserve.proto.tensors import encode, plain

HIDDEN, INNER, EXPERTS, TOP_K, ROWS = 1024, 32768, 4, 2, 16
QUESTIONS = 16
RANKS = 2
DEADLINE = 8.0
LANE_ROWS = 256  # a step of both lanes then takes two seconds on two cores
MOST_CORES = 6  # of the service
HEAD_CORES = 2  # of the service's, for all but its ranks' steps
TIMES = 5
WORKERS = 48  # of the polite client, and of those that find the capacity
CAPACITY_SECONDS = 30.0
SETTLE_SECONDS = 30.0
STREAMS = HALF_OPEN = 1000
GARBAGE = 12
MEGABYTE = 1 << 20

SERVE = (
    "-m moeserve serve --launcher local --device cpu --port 0 --metrics-port 0 --enable-expert-parallel "
    f"--data-parallel-size {RANKS}"
)


@dataclass(frozen=True)
class Seen:
    """What a load saw: seconds by how calls ended."""

    seconds: dict[str, list[float]]
    wrong: int
    left_out: int
    lasted: float  # seconds from the beginning until the last call ended

    def count(self, *codes: str) -> int:
        """Calls that ended so."""
        return sum(len(self.seconds.get(code, [])) for code in codes)

    def p(self, percent: float, *codes: str) -> float:
        """A percentile of the milliseconds of calls that ended so; NaN without any."""
        found = list(chain.from_iterable(self.seconds.get(code, []) for code in codes))
        return float(np.percentile(found, percent)) * 1e3 if found else float("nan")

    def codes(self) -> dict[str, int]:
        """Calls by how they ended."""
        return {code: len(found) for code, found in self.seconds.items()}


class Service:
    """The service under load, and where it is reached."""

    def __init__(self, folder: Path, seed: int, cores: Cores, settings: dict[str, Any]) -> None:
        self.cores = cores
        checkpoint, self.questions, config = folder / "layer", folder / "questions.npz", folder / "serve.toml"
        if not checkpoint.exists():
            make_checkpoint(checkpoint, seed)
            make_questions(checkpoint, self.questions, seed)
        lines = ["[step]", f"lane_rows = {LANE_ROWS}", "[cluster]", f"threads_per_rank = {threads(cores)}"]
        lines += ["[server]", *(f"{key} = {value}" for key, value in settings.items())]
        config.write_text("\n".join([*lines, ""]))
        command = [sys.executable, *SERVE.split(), "--checkpoint", str(checkpoint), str(config)]
        with on(cores.service):
            self._child = Child(command, r"probes on (\S+)", r"serving on (\S+)")
        self.probes, self.front = self._child.said
        with grpc.insecure_channel(self.front) as channel:
            found = moe_pb2_grpc.FrontServiceStub(channel).GetTopology(
                moe_pb2.GetTopologyRequest(), timeout=30
            )
        self.lanes = [lane.address for lane in found.lanes]

    def resident(self) -> int:
        """Bytes that its processes hold, of memory that they share a part each."""
        return sum(map(proportional_bytes, family(self._child.pid)))

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *ended: object) -> None:
        self._child.__exit__(*ended)


def threads(cores: Cores) -> int:
    """Of each rank's steps."""
    return max(1, (len(cores.service) - cores.apart * HEAD_CORES) // RANKS)


def family(pid: int) -> Iterator[int]:
    """A process, and all that it has started."""
    yield pid
    for thread in Path(f"/proc/{pid}/task").iterdir():
        for child in (thread / "children").read_text().split():
            yield from family(int(child))


def proportional_bytes(pid: int) -> int:
    """The memory that a process holds, by its own share of what several map."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    return 0


def make_checkpoint(path: Path, seed: int) -> None:
    """One Qwen3-MoE layer in float32 with random experts."""
    random, model = torch.Generator().manual_seed(seed), Qwen3Moe(HIDDEN, INNER, EXPERTS, TOP_K, layers=1)
    tensors = {name: torch.randn(shape, generator=random) / 32 for name, shape in model.matrices()}
    path.mkdir()
    write_checkpoint(path, model.config("float32"), tensors)


def make_questions(checkpoint: Path, into: Path, seed: int) -> None:
    """Requests, and their answers by plain torch."""
    weights = load_file(checkpoint / "model.safetensors")
    random = torch.Generator().manual_seed(seed + 1)
    arrays: dict[str, Any] = {}
    for at in range(QUESTIONS):
        hidden = torch.randn(ROWS, HIDDEN, generator=random)
        shares, experts = torch.rand(ROWS, EXPERTS, generator=random).topk(TOP_K)
        right = torch.zeros_like(hidden)
        for row in range(ROWS):
            for share, expert in zip(shares[row], experts[row].tolist(), strict=True):
                part = f"model.layers.0.mlp.experts.{expert}"
                gate, up = (weights[f"{part}.{name}_proj.weight"] @ hidden[row] for name in ("gate", "up"))
                inner = torch.nn.functional.silu(gate) * up
                right[row] += share * (weights[f"{part}.down_proj.weight"] @ inner)
        asked = moe_pb2.ForwardRequest(hidden=encode(plain(hidden, "hidden")))
        asked.choice.ids.CopyFrom(encode(plain(experts.int(), "ids")))
        asked.choice.weights.CopyFrom(encode(plain(shares, "weights")))
        arrays |= {
            f"asked{at:02}": np.frombuffer(asked.SerializeToString(), np.uint8),
            f"right{at:02}": right.numpy(),
        }
    np.savez(into, **arrays)


class Load:
    """A process of `faults/load.py`; `end` gives what it saw."""

    def __init__(self, kind: str, service: Service, **spec: Any) -> None:
        self._into = tempfile.NamedTemporaryFile("r", suffix=".json")  # noqa: SIM115  # until `end`
        given = {"addresses": service.lanes, "questions": str(service.questions), "deadline": DEADLINE}
        given |= spec | {"into": self._into.name}
        command = [sys.executable, "-m", "bench.service.faults.load", kind, json.dumps(given)]
        with on(service.cores.load):
            self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._child.stdout is not None
        if self._child.stdout.readline() != "ready\n":
            raise RuntimeError(f"the load {kind} ended with {self._child.wait()} before it began")

    def end(self) -> Seen:
        """Waits until it ends."""
        assert self._child.stdin is not None
        self._child.stdin.close()
        if self._child.wait(600):
            raise RuntimeError(f"{self._child.args} ended with {self._child.returncode}")
        with self._into as said:
            seen = Seen(**json.load(said))
        if seen.wrong:
            raise RuntimeError(f"{seen.wrong} answers were wrong")
        return seen


@contextmanager
def during(*loads: Load) -> Iterator[None]:
    """Ends `loads` afterwards, whose numbers nobody needs, and prints how their calls ended."""
    try:
        yield
    finally:
        for load in loads:
            seen = load.end()
            print("   ", seen.codes(), "not served or left out:", seen.left_out, flush=True)


def under_load(service: Service, seconds: float) -> Iterator[Result]:
    """Goodput, deadlines, refusals and shares at five times the capacity."""
    idle = Load("polite", service, workers=1, seconds=10, pause=0.02).end()
    capacity = Load("polite", service, workers=WORKERS, seconds=CAPACITY_SECONDS, deadline=60.0).end()
    served = capacity.count("OK") / capacity.lasted
    print(f"idle {idle.p(50, 'OK'):.1f} ms, capacity {served:.0f} calls/s {capacity.codes()}", flush=True)
    polite = Load("polite", service, workers=WORKERS, seconds=seconds)
    rude = Load("rude", service, rate=TIMES * served, seconds=seconds)
    theirs, ours = rude.end(), polite.end()
    print(f"rude {theirs.codes()} left out {theirs.left_out}; polite {ours.codes()}", flush=True)
    good = (theirs.count("OK") + ours.count("OK")) / max(theirs.lasted, ours.lasted)
    accepted = Seen(
        {
            code: theirs.seconds.get(code, []) + ours.seconds.get(code, [])
            for code in ("OK", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED")
        },
        0,
        0,
        seconds,
    )
    late = "DEADLINE_EXCEEDED"
    case = f"{TIMES} x capacity for {seconds:.0f} s"
    peers = {"capacity, calls/s": round(served, 1), "offered, calls/s": round(TIMES * served, 1)}
    yield Result(
        "overload", f"goodput, {case}", round(good, 1), "calls/s", "higher", round(0.9 * served, 1), peers
    )
    ended = {f"p{at}": round(accepted.p(at, "OK", late), 1) for at in (50, 90)}
    ended |= {"past their deadline": float(accepted.count(late)), "answered": float(accepted.count("OK"))}
    p99 = round(accepted.p(99, "OK", late), 1)
    yield Result("overload", f"accepted calls p99, {case}", p99, "ms", "lower", DEADLINE * 1e3, ended)
    base = idle.p(50, "OK")
    over = round(accepted.p(99, "RESOURCE_EXHAUSTED") - base, 1)
    peers = {"idle p50": round(base, 1), "idle p99": round(idle.p(99, "OK"), 1)}
    peers |= {f"refusals p{at}": round(accepted.p(at, "RESOURCE_EXHAUSTED"), 1) for at in (50, 90)}
    peers |= {"refusals p99": round(accepted.p(99, "RESOURCE_EXHAUSTED"), 1)}
    peers |= {"refusals": float(accepted.count("RESOURCE_EXHAUSTED"))}
    yield Result("overload", f"refusals p99 over an idle call, {case}", over, "ms", "lower", 10.0, peers)
    counts = {"polite, calls": float(ours.count("OK")), "rude, calls": float(theirs.count("OK"))}
    share = round(ours.count("OK") / max(1, theirs.count("OK")), 2)
    yield Result(
        "overload", f"polite client's share, {case}", share, "of a rude one's", "higher", 0.5, counts
    )


def memory(service: Service, before: int, what: str) -> Result:
    """What the service holds 30 s after a load, beside what it held before."""
    time.sleep(SETTLE_SECONDS)
    after = service.resident()
    peers = {"before": round(before / MEGABYTE, 1), "after": round(after / MEGABYTE, 1)}
    return Result(
        "overload", f"memory 30 s after {what}", round(after / before, 3), "of before", "lower", 1.1, peers
    )


def unread_streams(service: Service, before: int) -> Result:
    """Memory after streams whose replies nobody read."""
    seen = Load("unread", service, count=8, seconds=16).end()
    print(
        f"unread streams had sent {seen.left_out} calls; now {service.resident() / MEGABYTE:.0f} MB",
        flush=True,
    )
    return memory(service, before, "8 streams that nobody read")


def beside_nuisances(service: Service, nbytes: int, seconds: float) -> Iterator[Result]:
    """Probes and good calls, without and with everything that takes room at the doors."""
    alone = Load("polite", service, workers=2, seconds=seconds / 2, pause=0.01).end()
    doors = [service.probes, service.front, service.lanes[0]]
    names = ["probes", "front door", "lane"]
    streams = Load("streams", service, count=STREAMS)
    half = Load(
        "half_open", service, count=HALF_OPEN, addresses=[*service.lanes, service.front, service.probes]
    )
    garbage = Load("garbage", service, count=GARBAGE, nbytes=nbytes)
    with during(streams, half, garbage):
        asking = Load("probes", service, addresses=doors, names=names, http=service.probes, seconds=seconds)
        good = Load("polite", service, workers=2, seconds=seconds, pause=0.01, deadline=30.0).end()
        said = asking.end()
    print("    probes", said.codes(), "good calls", good.codes(), flush=True)
    what = f"{STREAMS} idle streams, {HALF_OPEN} half-open connections, {GARBAGE} x {nbytes // 10**6} MB"
    ready = ("probes SERVING", "http 200")
    peers = {f"grpc at the {name} p99": round(said.p(99, f"{name} SERVING"), 1) for name in names[1:]}
    peers |= {
        "probes": float(said.count(*ready)),
        "not ready, or no answer": float(said.count("http 0", "http 503")),
    }
    health = round(said.p(99, *ready), 1)
    yield Result("overload", f"health p99, {what}", health, "ms", "lower", 50.0, peers)
    peers = {"without p99": round(alone.p(99, "OK"), 1), "with p99": round(good.p(99, "OK"), 1)}
    peers |= {"without p50": round(alone.p(50, "OK"), 1), "with p50": round(good.p(50, "OK"), 1)}
    times = round(good.p(99, "OK") / alone.p(99, "OK"), 2)
    yield Result("overload", f"good calls p99, {what}", times, "of without", "lower", 3.0, peers)


def run(args: argparse.Namespace, folder: Path) -> Iterator[Result]:
    """Every case, one after the other."""
    parts, cores = args.parts.split(","), Cores.shared_out(args.service_cores)
    print(f"cores of the service {sorted(cores.service)}, of the load {sorted(cores.load)}", flush=True)
    with Service(folder, args.seed, cores, {}) as service:
        Load("polite", service, workers=WORKERS, seconds=10, deadline=60.0).end()  # steps of every size
        time.sleep(10)
        before = service.resident()
        if "load" in parts:
            yield from under_load(service, args.seconds)
            yield memory(service, before, f"{TIMES} x capacity")
        if "unread" in parts:
            yield unread_streams(service, before)
    if "health" in parts:
        with Service(folder, args.seed, cores, {"max_streams": 1024}) as service:
            Load("polite", service, workers=4, seconds=5).end()
            for nbytes in (200 * 10**6, 60 * 10**6):
                yield from beside_nuisances(service, nbytes, args.seconds / 2)


def main() -> None:
    """Measures every case, prints it and writes the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60, help="of overload; 60 by default")
    parser.add_argument("--seed", type=int, default=0, help="of weights and rows")
    parser.add_argument("--parts", default="load,unread,health", help="which of load, unread, health")
    parser.add_argument("--record", action="store_true", help="write bench/results/overload.jsonl")
    parser.add_argument(
        "--service-cores",
        type=int,
        default=usual(MOST_CORES),
        help="of the service alone, 0: all, with the load; by default half of six or more, at most 6",
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = []
        for result in run(args, Path(folder)):
            results.append(result)
            aim = f", aim {result.aim}" if result.aim is not None else ""
            print(f"{result.case}: {result.ours} {result.unit}{aim} {dict(result.peers)}", flush=True)
    if args.record:
        write(results)


if __name__ == "__main__":
    main()
