"""Attached callers of a GPU for minutes, every answer compared, while others of their kind do wrong.

    python -m bench.service.passes.gpu_soak [--seconds 600] [--experts 32] [--layers 4]
        [--short-rows 16] [--callers 1] [--stages 3] [--out FILE]

One rank with FP8 experts of 7168 x 2048, top-8, on the first GPU, and callers on the second. Two steady ones
make forward passes over all layers as fast as they can, of 1 to 64 rows, one as CUDA graphs and one eagerly.
With --callers 1 there is the first one alone, whose steps are launched ahead while no other calls; with
--stages their forward passes have more of them. All answers are compared on their device with those that
`MoeClient` had before: bit by bit, and within a bound. Meanwhile others attach, one at a time, and do wrong,
by turns:

    alone     nobody does
    killed    between two steps of a pass, whichever
    half way  killed when it has brought the rows of some layers and not of those behind them
    stopped   for a second, then continued, and killed
    detached  with steps under way, some times one after the other
    garbage   random bytes all over its mailbox, on the rank's GPU and on the host, for seconds; then killed
    asked     no caller: experts are rebalanced, and status and metrics asked for

Counted are wrong answers, passes of the steady ones that failed, the longest time that one of them had no
right answer (by turn, too), and by how much memory, threads and files of rank, head and steady callers grew
after a third of the time, and memory in use on the GPUs.

Two processes on one GPU take turns of milliseconds, whoever they are and whether their kernels compute or
wait. So the steady callers are two streams of one process. A rude one has a process of its own, or it could
not be killed, and the kernels of its few rows take turns with those of both: that is in the gap, beside what
the rank makes of it. Starting its process is, too, and what the driver does when it dies. A look at answers
comes every 8 passes, and nothing of another pass is launched before it: shorter gaps are not seen.

With one GPU the rank is on it, too. Without any, all runs on the CPU, with tiny experts and rows in host
memory, to try the program: bits and gaps are not judged then. Prints a JSON line a turn; writes
bench/results/gpu_pass_soak.jsonl, or FILE.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import multiprocessing
import os
import random
import re
import signal
import time
import urllib.request
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from bench.lib.held import Held
from bench.lib.record import Result, write
from bench.service.hop_soak import MOST_GPU_MIB_MORE, grown, looks, used_on_gpus
from bench.service.hops.service import TINY, checkpoint_folder
from bench.service.hops.sizes import Sizes, write_checkpoint
from bench.service.passes.gpu.soak_callers import Seen, Served, rude, steady
from moeserve.proto.client import MoeClient
from moeserve.runtime.config import Config
from moeserve.runtime.launch.environment import set_environment, tune_process
from moeserve.runtime.launch.local_cluster import LocalCluster

TURNS = ("alone", "killed", "half way", "stopped", "detached", "garbage", "asked")
ALONE_SECONDS = 3.0
GARBAGE_SECONDS = 4.0
STOPPED_SECONDS = 1.0
START_SECONDS = 120.0  # for the steady callers to begin, with all that is compiled and recorded
LIMIT_SECONDS = 60.0  # for any other word of a process
LONGEST_GAP = 0.5  # seconds
GRACE = 240.0  # seconds that a run may take longer than it was told, before it is ended where it hangs
GAUGE = re.compile(r'^moe_device_(lanes|bytes)\{(?:.*what="(.*)")?.*\} (\S+)', re.M)
_FRESH = multiprocessing.get_context("forkserver")  # that of the service, which has imported torch


@dataclass
class Watched:
    """What was seen of a run."""

    seen: list[Seen] = field(default_factory=list)
    seconds: float = 0.0
    gaps: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TURNS, 0.0))
    turns: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TURNS, 0))
    others_failed: list[str] = field(default_factory=list)
    first: dict[str, Held] = field(default_factory=dict)
    last: dict[str, Held] = field(default_factory=dict)
    first_on_gpus: dict[str, int] = field(default_factory=dict)
    last_on_gpus: dict[str, int] = field(default_factory=dict)

    @property
    def grown(self) -> list[str]:
        """What has grown between the two looks, in words."""
        more = [f"{name}: {text}" for name in self.last for text in grown(self.first[name], self.last[name])]
        return more + [
            f"{name}: from {self.first_on_gpus[name]} to {now} MiB in use"
            for name, now in self.last_on_gpus.items()
            if now > self.first_on_gpus[name] + MOST_GPU_MIB_MORE
        ]


class Watch:
    """A service with steady callers, and what is done to it."""

    def __init__(self, cluster: LocalCluster, served: Served, seconds: float) -> None:
        self._cluster, self._served, self._seconds = cluster, served, seconds
        self._pipe, theirs = _FRESH.Pipe()
        process = _FRESH.Process(target=steady, args=(served, theirs, seconds + GRACE), daemon=True)
        process.start()
        theirs.close()
        assert process.pid is not None
        self._pids = {"head": os.getpid(), "rank": cluster.pid(0), "steady callers": process.pid}
        self.found = Watched()

    def run(self) -> Watched:
        """All turns, until the time is over and each was had before the first look at memory and after it."""
        found = self.found
        self._heard(START_SECONDS)
        used_on_gpus(torch.cuda.device_count())  # which takes memory of this process, too
        begun, at, looked = time.monotonic(), 0, 0
        while (
            (spent := time.monotonic() - begun) < self._seconds or not found.first or at < looked + len(TURNS)
        ):
            turn = TURNS[at % len(TURNS)]
            told = self._turn(turn, at)
            at += 1
            if not found.first and at >= len(TURNS) and spent > self._seconds / 3:
                found.first, found.first_on_gpus, looked = *self._looks(), at
            self._tell(turn, time.monotonic() - begun, told)
        found.seconds = time.monotonic() - begun
        found.last, found.last_on_gpus = self._looks()
        self._pipe.send("end")
        found.seen = self._heard(LIMIT_SECONDS)
        return found

    def _looks(self) -> tuple[dict[str, Held], dict[str, int]]:
        return looks(self._pids), used_on_gpus(torch.cuda.device_count())

    def _heard(self, seconds: float) -> list[Seen]:
        """The steady callers' next word."""
        if not self._pipe.poll(seconds):
            raise SystemExit(f"the steady callers said nothing for {seconds:g} s")
        try:
            heard: list[Seen] = self._pipe.recv()
        except EOFError:
            raise SystemExit("the process of the steady callers has ended") from None
        return heard

    def _tell(self, turn: str, spent: float, told: dict[str, object]) -> None:
        self._pipe.send("look")
        found = self.found
        found.seen = self._heard(LIMIT_SECONDS)
        gap = max(one.gap for one in found.seen)
        found.gaps[turn], found.turns[turn] = max(found.gaps[turn], gap), found.turns[turn] + 1
        said = {
            "seconds": round(spent, 1),
            "turn": turn,
            "gap ms": round(1000 * gap, 1),
            "passes": [one.passes for one in found.seen],
            "wrong": sum(one.wrong for one in found.seen),
            "other bits": sum(one.other_bits for one in found.seen),
            "failed": sum(one.failures for one in found.seen),
        }
        print(json.dumps(said | told), flush=True)

    def _turn(self, turn: str, at: int) -> dict[str, object]:
        """What a turn has to tell beside what the steady callers saw."""
        if turn == "alone":
            time.sleep(ALONE_SECONDS)
            return {}
        if turn == "asked":
            return asked(self._cluster, "even" if at % 2 else "eplb")
        why = misuse(self._served, f"rude-{at}", turn)
        self.found.others_failed += [why] if why else []
        return {"other failed": why} if why else {}


def misuse(served: Served, name: str, how: str) -> str:
    """One caller that does wrong, from its start to its end; why it could not, or nothing."""
    ours, theirs = _FRESH.Pipe()
    process = _FRESH.Process(target=rude, args=(served, name, how, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        why = _word(ours, name)
        if why or how == "detached":
            return why
        assert process.pid is not None
        if how == "garbage":  # which may never have an answer
            time.sleep(GARBAGE_SECONDS)
            return ""
        if why := _word(ours, name):
            return why
        time.sleep(0.1 if how == "half way" else random.uniform(0.3, 1.0))
        if how == "stopped":
            os.kill(process.pid, signal.SIGSTOP)
            time.sleep(STOPPED_SECONDS)
            os.kill(process.pid, signal.SIGCONT)
            time.sleep(0.5)
        return ""
    finally:
        process.kill()
        process.join()
        process.close()
        ours.close()


def _word(pipe: Connection, name: str) -> str:
    """What a rude caller says next: nothing, or why it cannot go on."""
    if not pipe.poll(LIMIT_SECONDS):
        return f"{name}: said nothing for {LIMIT_SECONDS:g} s"
    try:
        word: str = pipe.recv()
    except EOFError:
        return f"{name}: ended without a word"
    return word


def asked(cluster: LocalCluster, policy: str) -> dict[str, object]:
    """Rebalances, and asks for status and metrics: what came of it."""
    with MoeClient(cluster.address, timeout=30) as client:
        moved = client.rebalance(policy=policy, timeout=30)
        state = client.status().state
    found: dict[str, object] = {"rebalanced": moved.outcome, "state": state}
    for target in cluster.metrics_targets():
        with urllib.request.urlopen(f"http://{target}/metrics", timeout=10) as answer:
            for name, what, value in GAUGE.findall(answer.read().decode()):
                found[f"{what} {name}".strip()] = float(value)
    return found


def main() -> None:
    """Runs, prints what was seen, and writes the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600.0, help="of calling; 600 by default")
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument(
        "--short-rows", type=int, default=0, help="passes.short_rows: steps of up to so many overtake others"
    )
    parser.add_argument("--callers", type=int, default=2, choices=(1, 2), help="that are compared")
    parser.add_argument("--stages", type=int, default=1, help="of their forward passes")
    parser.add_argument("--out", type=Path, help="where the result goes; by default into the record")
    args = parser.parse_args()
    faulthandler.dump_traceback_later(args.seconds + GRACE, exit=True)
    set_environment("127.0.0.1")  # streams of a process must not share connections
    tune_process()
    gpus = torch.cuda.device_count()
    sizes = Sizes(7168, 2048, args.experts, 8, args.layers) if gpus else TINY
    with checkpoint_folder(sizes) as folder:
        write_checkpoint(folder, sizes)
        given = {
            "model.checkpoint": str(folder),
            "plan.device": "cuda" if gpus else "cpu",
            "passes.share_gpu": gpus == 1,
            "passes.short_rows": args.short_rows,
            "server.port": 0,
            "server.metrics_port": 0,
        }
        with LocalCluster(Config().with_values(given)) as cluster:
            device = f"cuda:{min(1, gpus - 1)}" if gpus else "cpu"
            served = Served(cluster.address, sizes, device, args.callers, args.stages)
            found = Watch(cluster, served, args.seconds).run()
    told(args, found, sizes, gpus)
    faulthandler.cancel_dump_traceback_later()


def told(args: argparse.Namespace, found: Watched, sizes: Sizes, gpus: int) -> None:
    """Prints and writes the outcome. Raises SystemExit where something was wrong."""
    wrong, bits = (sum(getattr(one, name) for one in found.seen) for name in ("wrong", "other_bits"))
    failures, gap = sum(one.failures for one in found.seen), max(found.gaps.values())
    texts = [text for one in found.seen for text in one.failed] + found.others_failed + found.grown
    bad = wrong + failures + len(found.others_failed) + len(found.grown)
    if gpus:  # on a CPU steps are of several callers' rows, whose sums have another order, and slow
        bad += bits + (gap > LONGEST_GAP)
    where = ("the CPU", "one GPU", "two GPUs")[min(gpus, 2)]
    held = {
        "answers": float(sum(one.answers for one in found.seen)),
        "wrong": float(wrong),
        "other bits": float(bits),
        "failed": float(failures),
        "others failed": float(len(found.others_failed)),
        "longest gap ms": round(1000 * gap, 1),
        "passes a second": round(sum(one.passes for one in found.seen) / found.seconds, 1),
    }
    for name, last in found.last.items():
        held |= {f"{name} MiB at first": float(found.first[name].nbytes >> 20)}
        held |= {f"{name} MiB": float(last.nbytes >> 20)}
    for name, now in found.last_on_gpus.items():
        held |= {f"{name} MiB at first": float(found.first_on_gpus[name]), f"{name} MiB": float(now)}
    held |= {f"gap ms, {turn}": round(1000 * one, 1) for turn, one in found.gaps.items()}
    held |= {f"turns, {turn}": float(count) for turn, count in found.turns.items()}
    apart = f", steps of up to {args.short_rows} rows on a track of their own" if args.short_rows else ""
    who = "1 steady caller" if args.callers == 1 else f"{args.callers} steady callers"
    of = f"{sizes.layers} layers" if args.stages == 1 else f"{sizes.layers} layers in {args.stages} stages"
    case = f"{who} of {of} on {where}{apart}, {args.seconds:.0f} s, others do wrong"
    print(json.dumps({"case": case, "bad": bad, "texts": texts[:8]} | held), flush=True)
    unit = "answers wrong, passes failed, callers refused, things that grew, or too long gaps"
    write([Result("gpu_pass_soak", case, float(bad), unit, "lower", 0.0, held)], args.out)
    if bad:
        raise SystemExit(f"{bad} bad: {texts[:8]}")


if __name__ == "__main__":
    main()
