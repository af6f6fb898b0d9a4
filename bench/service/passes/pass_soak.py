"""Attached callers for minutes, every answer compared, while others of their kind do wrong.

    python -m bench.service.passes.pass_soak [--seconds 600] [--out FILE]

Three ranks on the CPU. Two steady callers, in processes of their own, make passes of two stages over two
layers, and compare each answer with float32 from the same weights. Meanwhile others attach, make passes, and
are killed in the middle of one, stopped and continued, detached under load, or write garbage all over their
mailbox; and experts are moved. Counted are wrong answers, passes of the steady ones that failed, the longest
time that one of them had no right answer, and by how much the ranks' memory grew after a third of the time.
Writes bench/results/pass_soak.jsonl, or FILE.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import tempfile
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from bench.lib.held import Held
from bench.lib.record import Result, write
from bench.service.hops.sizes import Experts, Sizes, write_checkpoint
from moeserve.proto.client import Choice, MoeClient
from moeserve.proto.errors import MoeError
from moeserve.proto.passes.attached import AttachedLane, Wanted
from moeserve.proto.tensors import as_torch
from moeserve.runtime.config import Config
from moeserve.runtime.launch.environment import tune_process
from moeserve.runtime.launch.local_cluster import LocalCluster

SIZES = Sizes(256, 128, 16, 2, 2)
RANKS, STEADY, STAGES, MOST_ROWS = 3, 2, 2, 6
LARGEST_ERROR = 6e-2  # against float32 with rows that are not rounded
WRONGS = ("killed", "stopped", "detached", "garbage")
STOPPED_SECONDS = 1.0
MOST_GROWTH = 64 << 20  # bytes of a rank
_SPAWN = multiprocessing.get_context("spawn")


def steady(address: str, at: int, pipe: Connection) -> None:
    """A process that makes passes until it is told to end; then it sends what it saw."""
    torch.set_num_threads(1)
    batches = [SIZES.batch(seed % MOST_ROWS + 1, seed) for seed in range(12)]
    right = {
        (layer, seed): Experts(SIZES).answer(layer, batch)
        for layer in (0, 1)
        for seed, batch in enumerate(batches)
    }
    seen: dict[str, Any] = {"answers": 0, "wrong": 0, "failed": [], "gap": 0.0}
    with AttachedLane.attach(address, Wanted(f"steady-{at}", rows=8, stages=STAGES, rank=at % RANKS)) as lane:
        pipe.send("begun")
        last, turn = time.monotonic(), 0
        while not pipe.poll():
            turn += 1
            seeds = [(turn + 5 * stage) % len(batches) for stage in range(STAGES)]
            try:
                with lane.begin([0, 1], stages=STAGES) as run:
                    for layer in (0, 1):
                        for stage, seed in enumerate(seeds):
                            hidden, ids, weights = batches[seed]
                            run.post(stage, hidden, Choice(ids, weights))
                        for stage, seed in enumerate(seeds):
                            found = run.take_plain(stage)
                            answer = as_torch(found.storage.data, found.spec).float()
                            expected = right[layer, seed]
                            seen["answers"] += 1
                            if (answer - expected).norm() > LARGEST_ERROR * expected.norm():
                                seen["wrong"] += 1
                            else:
                                seen["gap"], last = (
                                    max(seen["gap"], time.monotonic() - last),
                                    time.monotonic(),
                                )
            except MoeError as failed:
                seen["failed"].append(str(failed)[:200])
    pipe.send(seen)


def rude(address: str, at: int, how: str, pipe: Connection) -> None:
    """A process that makes passes, whatever becomes of it; with `garbage` it writes anything anywhere."""
    torch.set_num_threads(1)
    hidden, ids, weights = SIZES.batch(8, seed=at)
    with AttachedLane.attach(address, Wanted(f"rude-{at}", rows=8, rank=at % RANKS)) as lane:
        told = False
        words = torch.frombuffer(lane.memory.box.cast("B"), dtype=torch.uint8)
        while True:
            with suppress(MoeError), lane.begin([0, 1]) as run:
                for _ in range(2):
                    run.post(0, hidden, Choice(ids, weights))
                    if how == "garbage":
                        words.copy_(torch.randint(0, 256, words.shape, dtype=torch.uint8))
                    run.take(0, timeout=5)
                    if not told:
                        pipe.send("in a pass")
                        told = True


def misuse(address: str, at: int, how: str) -> None:
    """One caller that does wrong, from its start to its end."""
    ours, theirs = _SPAWN.Pipe()
    process = _SPAWN.Process(target=rude, args=(address, at, how, theirs), daemon=True)
    process.start()
    assert process.pid is not None
    if how != "garbage" and not ours.poll(60):  # which may never have an answer
        raise SystemExit("a caller did not come to its first answer within 60 s")
    time.sleep(random.uniform(1.0, 2.0) if how != "garbage" else 5.0)
    if how == "stopped":
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(STOPPED_SECONDS)
        os.kill(process.pid, signal.SIGCONT)
        time.sleep(1.0)
    process.kill()
    process.join()
    ours.close()
    theirs.close()


def detach(address: str, at: int) -> None:
    """Attaches, and detaches with steps under way."""
    hidden, ids, weights = SIZES.batch(8, seed=at)
    for turn in range(5):
        lane = AttachedLane.attach(address, Wanted(f"leaves-{turn}", rows=8, stages=2, rank=at % RANKS))
        run = lane.begin([0, 1], stages=2)
        for stage in range(2):
            run.post(stage, hidden, Choice(ids, weights))
        lane.close()


def resident(pids: list[int]) -> list[int]:
    """Bytes of each process that are in memory."""
    return [Held.of(pid).nbytes for pid in pids]


def main() -> None:
    """Runs, prints what was seen, and writes the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600.0, help="of calling; 600 by default")
    parser.add_argument("--out", type=Path, help="where the result goes; by default into the record")
    args = parser.parse_args()
    tune_process()
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), SIZES)
        given = {
            "model.checkpoint": folder,
            "plan.device": "cpu",
            "parallel.data_parallel_size": RANKS,
            "parallel.enable_expert_parallel": True,
            "balance.redundant_experts": 2,
            "server.port": 0,
            "server.metrics_port": 0,
        }
        with LocalCluster(Config().with_values(given)) as cluster:
            seen, grown, misused = watched(cluster, args.seconds)
    told(args, seen, grown, misused)


def watched(cluster: LocalCluster, seconds: float) -> tuple[list[dict[str, Any]], int, dict[str, int]]:
    """What steady callers saw, the bytes by which a rank grew, and how often others did wrong."""
    pipes = []
    for at in range(STEADY):
        ours, theirs = _SPAWN.Pipe()
        _SPAWN.Process(target=steady, args=(cluster.address, at, theirs), daemon=True).start()
        theirs.close()
        pipes.append(ours)
    for pipe in pipes:
        pipe.recv()
    pids = [cluster.pid(rank) for rank in range(RANKS)]
    begun, before, misused, turn = time.monotonic(), [0] * RANKS, dict.fromkeys(WRONGS, 0), 0
    with MoeClient(cluster.address, timeout=60) as client:
        while (spent := time.monotonic() - begun) < seconds:
            how = WRONGS[turn % len(WRONGS)]
            if how == "detached":
                detach(cluster.address, turn)
            else:
                misuse(cluster.address, turn, how)
            misused[how] += 1
            turn += 1
            client.rebalance(policy="even" if turn % 2 else "eplb", timeout=60)
            if spent > seconds / 3 and not before[0]:
                before = resident(pids)
            print(json.dumps({"seconds": round(spent), "misused": misused}), flush=True)
    after = resident(pids)
    for pipe in pipes:
        pipe.send("end")
    return [pipe.recv() for pipe in pipes], max(b - a for a, b in zip(before, after, strict=True)), misused


def told(args: Any, seen: list[dict[str, Any]], grown: int, misused: dict[str, int]) -> None:
    """Prints and writes the outcome. Raises SystemExit where something was wrong."""
    wrong, failed = sum(each["wrong"] for each in seen), [text for each in seen for text in each["failed"]]
    bad = wrong + len(failed) + (grown > MOST_GROWTH)
    held = {
        "answers": float(sum(each["answers"] for each in seen)),
        "wrong": float(wrong),
        "failed": float(len(failed)),
        "longest gap ms": round(1000 * max(each["gap"] for each in seen), 1),
        "a rank grew by MiB": round(grown / 2**20, 1),
        **{f"others {how}": float(count) for how, count in misused.items()},
    }
    case = f"{STEADY} steady callers x {RANKS} ranks, {args.seconds:.0f} s, others do wrong"
    print(json.dumps({"case": case, "bad": bad, "failed": failed[:5]} | held))
    unit = "answers wrong, passes failed, or ranks that grew"
    write([Result("pass_soak", case, float(bad), unit, "lower", 0.0, held)], args.out)
    if bad:
        raise SystemExit(f"{wrong} wrong, failed: {failed[:5]}, grown by {grown} bytes")


if __name__ == "__main__":
    main()
