"""The hop on GPUs: what a call costs beyond its step, by rows and way; many callers; layers in a loop.

    python -m bench.service.gpu_hop [--seconds 240] [--graph-rows 2048] [--parts truth,alone,callers,layers]
        [--ranks 1] [--rows 1 16] [--callers 16x16] [--ways placed plain] [--spin 0.001]
        [--client-spin 0 0.001] [--out FILE]

Two ranks with 128 FP8 experts of 7168 x 2048, top-8, or one with 64. In one run:

    step      the same step in process, rank 0's lane alone brings the rows; wall clock, launch to end
    rate      steps in process to which all lanes bring rows, one launched after another
    dma       the rows' bytes from pinned memory to the GPU and back, by its engines
    copy      the rows' bytes there and back on the host, by all cores
    echo      a bare Python gRPC server that returns the bytes it is sent
    placed    the client's call with rows and answer in a lane's shared memory
    plain     the same with torch tensors of its own
    inline    the same in the message
    inline any lane   the same, by a client that names no lane
    lane placed, lane   as placed and plain, by a client whose calls go over device lanes (LaneClient)
    pass      a step of a standing pass of a lane in host memory, whose steps are launched ahead while its
              caller is alone (passes.host_ahead); rows are copied there, and answers from there
    pass placed   the same with rows and answer where they lie
    truth     what the device tells of a step's phases and rows, beside what is known of them otherwise

Callers run in processes of their own; each of their answers is compared, and those of a few rows with float32
from the same weights. With fewer GPUs than ranks the sizes are tiny: that tries the program, no more.
Prints a JSON line a case; writes bench/results/gpu_hop.jsonl, or FILE.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import numpy as np
import torch

from bench.lib.record import Result, write
from bench.service.hop import Child
from bench.service.hops.callers import KINDS, WARM_UP_CALLS, Callers, Load
from bench.service.hops.echo_server import METHOD, OPTIONS
from bench.service.hops.in_process import InProcess
from bench.service.hops.phases import Phases
from bench.service.hops.service import DEFAULTS, checkpoint_folder, config_of, group_of, on_gpus, sizes_of
from bench.service.hops.sizes import Experts, Sizes, write_checkpoint
from moeserve.proto.client import MoeClient
from moeserve.runtime.config import Config
from moeserve.runtime.launch.environment import tune_process
from moeserve.runtime.launch.local_cluster import LocalCluster

ROWS = (1, 16, 128, 1024, 4096)
CALLS = 2000
PROCESSES = 16
ERROR_BOUND = 6e-2  # of an answer against float32 with rows that are not rounded
PARTS = ("truth", "alone", "callers", "layers")
FEW = 16
"""Callers that are to reach 0.7 of what steps in process do; more are to reach no less than these."""

LOOPED = ("placed", "lane placed", "inline")
"""Ways by which callers go over layers in a loop."""

WEIGHTS = {"alone": 2.0}  # of the run's time, where it is not 1: its large calls take long to compare


class Clock:
    """How much of the run's time is left."""

    def __init__(self, seconds: float) -> None:
        self.whole = seconds
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds."""
        return max(0.0, self._end - time.monotonic())


class Told:
    """Results so far: each is printed as it comes."""

    def __init__(self, group: str) -> None:
        """`group`: which ranks, where it is not two; the first word of each case."""
        self.results: list[Result] = []
        self.wrong = 0
        self._group = group
        self.spins = 0.0  # seconds that callers look for an answer before they sleep

    def add(self, case: str, ours: float, unit: str, better: str, **peers: float) -> None:
        """One number of ours and what stands beside it; `aim` among the peers is what it is aimed at."""
        aim = peers.pop("aim", None)
        rounded = {name: round(value, 4) for name, value in peers.items()}
        spin = f", callers spin {self.spins * 1e3:g} ms" if self.spins else ""
        case = f"{self._group}{case}{spin}"
        made = Result("gpu_hop", case, round(ours, 4), unit, better, aim and round(aim, 4), rounded)
        self.results.append(made)
        print(
            json.dumps({"case": made.case, "ours": made.ours, "unit": unit, "aim": made.aim} | rounded),
            flush=True,
        )


def p(seconds: list[float], percent: float) -> float:
    """A percentile in milliseconds."""
    return float(np.percentile(seconds, percent)) * 1e3


def in_process(
    config: Config, args: argparse.Namespace, clock: Clock, told: Told
) -> dict[str, dict[int, float]]:
    """Medians in process: `step` and `dma` in ms by rows, `rate` in rows a second by rows of a step."""
    sizes, rows = args.sizes, args.rows
    found: dict[str, dict[int, float]] = {"step": {}, "step p99": {}, "dma": {}, "rate": {}}
    with InProcess(config, sizes, args.ranks) as ranks:
        for count in rows:
            few = p(ranks.ask("time", count, 10), 50) / 1e3
            seconds = ranks.ask("time", count, steps_within(few, 0.01 * clock.whole))
            found["step"][count], found["step p99"][count] = p(seconds, 50), p(seconds, 99)
            found["dma"][count] = ranks.ask("dma", count, 30) * 1e3
        most = args.ranks * (ROWS if "callers" in args.parts else rows)[-1]  # many callers share a step
        for count in [2**at for at in range(1, 14) if 2**at <= most]:
            few = count / ranks.ask("rate", count, 5)
            found["rate"][count] = ranks.ask("rate", count, steps_within(few, 0.004 * clock.whole))
        if "truth" in args.parts:
            args.parts.remove("truth")
            truth(ranks, told)
    print(json.dumps({"in process": found, "left": round(clock.left(), 1)}), flush=True)
    return found


def truth(ranks: InProcess, told: Told) -> None:
    """What the device tells of its steps: does it agree, what does it cost, are all rows counted."""
    for rows in (32, 2048):
        found = ranks.ask("truth", rows, 50, 21)
        for name, aim, unit, better in (
            ("told", None, "of the time between two timestamps", "higher"),
            ("cost", 1.01, "of steps without timestamps", "lower"),
            ("counted", None, "of the rows chosen", "higher"),
        ):
            if name in found:
                peers = {} if aim is None else {"aim": aim}
                told.add(f"truth: {name}, steps of {rows} rows", found[name], unit, better, **peers)


def steps_within(one: float, seconds: float) -> int:
    """How many steps of `one` seconds to run: up to 500, and 5 at least."""
    return max(5, min(500, int(seconds / one)))


def rate_at(rates: dict[int, float], rows: float) -> float:
    """Rows a second in process at so many rows a step, between those measured."""
    sizes = sorted(rates)
    return float(np.interp(rows, sizes, [rates[size] for size in sizes]))


def check(client: MoeClient, sizes: Sizes) -> None:
    """Answers of every layer against float32, as launched, recorded and replayed."""
    for layer in range(sizes.layers):
        batch = sizes.batch(2, 50 + layer)
        wanted, worst = Experts(sizes).answer(layer, batch), 0.0
        for _ in range(4):
            answer = client.forward(layer, *batch)
            assert isinstance(answer, torch.Tensor)
            worst = max(worst, float((answer.float() - wanted).norm() / wanted.norm()))
        if not worst < ERROR_BOUND:
            raise SystemExit(f"layer {layer}: relative error {worst} is over {ERROR_BOUND}")
        print(json.dumps({"layer": layer, "relative error": round(worst, 5)}), flush=True)


def timed(act: Callable[[], object], times: int, seconds: float) -> list[float]:
    """Seconds of each of up to `times` calls, within so many seconds but at least five."""
    found, end = list[float](), time.monotonic() + seconds
    while len(found) < times and (len(found) < 5 or time.monotonic() < end):
        started = time.perf_counter()
        act()
        found.append(time.perf_counter() - started)
    return found


def peers(sizes: Sizes, rows: tuple[int, ...], port: str) -> dict[str, dict[int, float]]:
    """Medians in ms of the bare echo and of the copies by all cores, by rows."""
    found: dict[str, dict[int, float]] = {"echo": {}, "echo p99": {}, "copy": {}}
    torch.set_num_threads(os.cpu_count() or 1)
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=OPTIONS) as channel:
        bounce = channel.unary_unary(METHOD)
        for count in rows:
            body = bytes(sizes.nbytes(count))
            timed(lambda body=body: bounce(body), 10, 2.0)  # type: ignore[misc]
            seconds = timed(lambda body=body: bounce(body), 500, 3.0)  # type: ignore[misc]
            found["echo"][count], found["echo p99"][count] = p(seconds, 50), p(seconds, 99)
            one, other = (torch.ones(count, sizes.hidden, dtype=torch.bfloat16) for _ in range(2))

            def copies(one: torch.Tensor = one, other: torch.Tensor = other) -> None:
                other.copy_(one)
                one.copy_(other)

            timed(copies, 10, 1.0)
            found["copy"][count] = p(timed(copies, 200, 1.0), 50)
    torch.set_num_threads(1)
    return found


def alone(
    callers: Callers,
    base: dict[str, dict[int, float]],
    phases: Phases,
    args: argparse.Namespace,
    told: Told,
) -> None:
    """One caller, by rows and way; of placed rows also where a call's time goes."""
    end, left = time.monotonic() + args.share, len(args.ways) * len(args.rows)
    for rows in args.rows:
        for kind in args.ways:
            budget = (end - time.monotonic()) / left  # the first ones need less than their part
            left -= 1
            load = Load(kind, rows, seconds=budget, most_calls=CALLS)
            phases.means()
            found = callers.run(load, 1)
            told.wrong += found.wrong + len(found.failed)
            if not found.seconds:
                raise SystemExit(f"{kind}, {rows} rows: no call was answered: {found.failed[:3]}")
            call, step = p(found.seconds, 50), base["step"][rows]
            bytes_time = base["dma"][rows]
            if args.gpus and kind.startswith("pass") and phases.means()["dispatch"]:
                raise SystemExit(f"{kind}, {rows} rows: steps were calls, and not launched ahead")
            if kind == "placed":
                mean = sum(found.seconds) / len(found.seconds)
                print(json.dumps({"microseconds of a call": phases.table(mean), "rows": rows}), flush=True)
            aim = step + {1: 0.35, 16: 0.35, 128: 0.5}.get(rows, 0.15 * step + 1.15 * bytes_time)
            if kind in ("plain", "lane", "pass"):
                aim += 1.2 * base["copy"][rows]
            elif kind.startswith("inline"):
                aim = 1.5 * base["echo"][rows] + step
            told.add(
                f"{kind}, {rows} rows",
                call,
                "ms",
                "lower",
                aim=aim,
                p99=p(found.seconds, 99),
                hop=call - step,
                calls=len(found.seconds),
                wrong=found.wrong,
                **{name: base[name][rows] for name in ("step", "dma", "echo", "copy")},
            )


def many(
    callers: Callers,
    base: dict[str, dict[int, float]],
    seen: tuple[MoeClient, Phases],
    args: argparse.Namespace,
    told: Told,
) -> None:
    """16 and 64 callers on all lanes, beside steps in process with as many rows."""
    client, phases = seen
    kinds = [kind for kind in args.ways if not kind.startswith("inline")]
    cases = [(kind, count, rows) for kind in kinds for count, rows in args.callers]
    few: dict[tuple[str, int], float] = {}  # rows a second of 16 callers, by way and rows
    for kind, count, rows in cases:
        before, _ = client.status(), phases.means()
        found = callers.run(Load(kind, rows, lanes=args.ranks, seconds=args.share / len(cases)), count)
        after = client.status()
        parts = {name: round(mean * 1e6, 1) for name, mean in phases.means().items()}
        print(json.dumps({"microseconds of a step": parts}), flush=True)
        told.wrong += found.wrong + len(found.failed)
        steps = max(1, after.steps - before.steps)
        rows_a_step = (len(found.seconds) + count * WARM_UP_CALLS) * rows / steps
        reached = len(found.seconds) * rows / found.lasted
        ideal = rate_at(base["rate"], rows_a_step)
        if count <= FEW:
            few[kind, rows] = reached
            aim = {"aim": 0.7 * ideal}
        else:  # no worse than few, where they were measured
            aim = {"aim": few[kind, rows]} if (kind, rows) in few else {}
        told.add(
            f"{count} callers of {rows} rows, {kind}",
            reached,
            "rows/s",
            "higher",
            **aim,
            in_process=ideal,
            share=reached / ideal,
            rows_a_step=rows_a_step,
            p50=p(found.seconds, 50),
            p99=p(found.seconds, 99),
            calls=len(found.seconds),
            fewest=min(found.each) / max(1.0, np.mean(found.each)),
            most=max(found.each) / max(1.0, np.mean(found.each)),
            wrong=found.wrong,
        )


def loops(
    callers: Callers,
    base: dict[str, dict[int, float]],
    sizes: Sizes,
    args: argparse.Namespace,
    told: Told,
) -> None:
    """All layers in a loop, as a model calls them."""
    kinds = [kind for kind in LOOPED if kind in args.ways]
    cases = [(kind, count, rows) for kind in kinds for count in (1, 4, 16) for rows in args.loop_rows]
    for kind, count, rows in cases:
        load = Load(kind, rows, sizes.layers, args.ranks, seconds=args.share / len(cases))
        found = callers.run(load, count)
        told.wrong += found.wrong + len(found.failed)
        told.add(
            f"{sizes.layers} layers in a loop, {count} callers of {rows} rows, {kind}",
            p(found.seconds, 50),
            "ms",
            "lower",
            p99=p(found.seconds, 99),
            rows_per_s=len(found.seconds) * rows / found.lasted,
            calls=len(found.seconds),
            wrong=found.wrong,
            **({"step": base["step"][rows]} if rows in base["step"] else {}),
        )


def over_the_service(
    config: Config,
    base: dict[str, dict[int, float]],
    args: argparse.Namespace,
    clock: Clock,
    told: Told,
) -> None:
    """Starts the service and its callers, and runs the parts that are theirs."""
    sizes: Sizes = args.sizes
    with Child([sys.executable, "-m", "bench.service.hops.echo_server"], r"(\d+)") as echo:
        base |= peers(sizes, args.rows, echo.said[0])
    with LocalCluster(config) as cluster, MoeClient(cluster.address, timeout=120) as client:
        print(
            json.dumps({"serving": str(client.model().layers[0]), "left": round(clock.left(), 1)}),
            flush=True,
        )
        check(client, sizes)
        phases = Phases(cluster.head.coordinator.seats()[0].metrics)
        runs = [(spin, part) for spin in args.client_spin for part in args.parts]
        for at, (spin, part) in enumerate(runs):
            weights = [WEIGHTS.get(part, 1.0) for _, part in runs[at:]]
            args.share = max(10.0, 0.85 * clock.left() * weights[0] / sum(weights))
            told.spins = spin
            with Callers(cluster.address, sizes, PROCESSES if args.gpus else 2, spin) as callers:
                if part == "alone":
                    alone(callers, base, phases, args, told)
                elif part == "callers":
                    many(callers, base, (client, phases), args, told)
                else:
                    loops(callers, base, sizes, args, told)


def arguments() -> argparse.Namespace:
    """The command line, and what follows from the machine."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seconds", type=float, default=240.0, help="of the whole run, about; 240 by default"
    )
    parser.add_argument("--graph-rows", type=int, default=DEFAULTS.step.graph_rows, help="step.graph_rows")
    parser.add_argument("--dispatcher", default="auto", help="by name; auto: by measured cost")
    parser.add_argument(
        "--parts", default=",".join(PARTS), help="which of truth, alone, callers, layers; all by default"
    )
    parser.add_argument(
        "--spin",
        type=float,
        default=DEFAULTS.cluster.spin_seconds,
        help="seconds that readers of rings look before they sleep; cluster.spin_seconds",
    )
    parser.add_argument(
        "--client-spin",
        type=float,
        nargs="+",
        default=[0.0],
        help="seconds that callers look for their answers; the parts run once for each",
    )
    parser.add_argument(
        "--ways",
        nargs="+",
        choices=KINDS,
        default=KINDS,
        help="of a lone caller; all by default",
    )
    parser.add_argument("--rows", type=int, nargs="+", choices=ROWS, help="of a lone caller")
    parser.add_argument(
        "--callers",
        nargs="+",
        metavar="16x256",
        help="so many callers of so many rows each; four cases by default",
    )
    parser.add_argument("--ranks", type=int, choices=(1, 2), default=2, help="of the service")
    parser.add_argument("--out", type=Path, help="where results go; by default into the record")
    args = parser.parse_args()
    args.gpus, args.sizes = on_gpus(args.ranks), sizes_of(args.ranks)
    args.rows = tuple(args.rows or (ROWS if args.gpus else (1, 16, 128)))
    many = args.callers or (["16x16", "16x256", "64x16", "64x256"] if args.gpus else ["4x4", "8x16"])
    args.callers = [tuple(int(number) for number in case.split("x")) for case in many]
    args.loop_rows = (1, 16, 128) if args.gpus else (4,)
    args.parts = [part for part in PARTS if part in args.parts.split(",")]
    return args


def main() -> None:
    """Runs what was asked for, prints it and writes the record."""
    args = arguments()
    told = Told(group_of(args.ranks))
    clock = Clock(args.seconds)
    sizes: Sizes = args.sizes
    tune_process()  # the head lives in this process
    with checkpoint_folder(sizes) as folder:
        write_checkpoint(folder, sizes)
        print(json.dumps({"checkpoint": str(folder), "left": round(clock.left(), 1)}), flush=True)
        config = config_of(
            folder, args.ranks, dispatcher=args.dispatcher, graph_rows=args.graph_rows, spin=args.spin
        )
        base = in_process(config, args, clock, told)
        if args.parts:
            over_the_service(config, base, args, clock, told)
    print(json.dumps({"wrong or failed": told.wrong, "left": round(clock.left(), 1)}), flush=True)
    if args.gpus or args.out:
        write(told.results, args.out)
    if told.wrong:
        raise SystemExit(f"{told.wrong} answers were wrong or failed")


if __name__ == "__main__":
    main()
