"""Many callers for minutes, every answer compared: none may be wrong, and nothing may grow.

    python -m bench.service.hop_soak [--seconds 600] [--callers 16] [--rows 24] [--ranks 1] [--out FILE]

Two ranks, or one, serve several layers; callers in four processes call them in turn, by every way in turn:
placed, plain, inline. The memory of head and ranks, their threads and open files are looked at after a third
of the time, when every way was gone several times, and at the end; a run whose --seconds are too few for that
takes longer. Where every rank has a GPU, the experts are large, and the memory in use on the GPUs is looked
at too. Writes bench/results/hop_soak.jsonl, or FILE.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch

from bench.lib.held import Held
from bench.lib.record import Result, write
from bench.service.hops.callers import KINDS, Callers, Load
from bench.service.hops.service import checkpoint_folder, config_of, group_of, on_gpus, sizes_of
from bench.service.hops.sizes import write_checkpoint
from moeserve.proto.client import MoeClient
from moeserve.runtime.launch.environment import tune_process
from moeserve.runtime.launch.local_cluster import LocalCluster

ROUND_SECONDS = 10.0
WARM_ROUNDS = 2 * len(KINDS)  # clients have as many idle regions as they keep, and pools their threads
PROCESSES = 4
REST_SECONDS, SETTLE_SECONDS = 1.0, 3.0  # connections have given their memory back at a look
MOST_GROWTH = 0.05  # of resident memory from the first look to the last; and so many bytes beside it
SLACK_BYTES = 64 << 20
MOST_THREADS_MORE = 8  # pools grow to their size with the first large calls
MOST_FILES_MORE = 8
MOST_GPU_MIB_MORE = 16  # the driver maps registered regions by 2 MiB


def grown(before: Held, now: Held) -> list[str]:
    """What has grown, in words; empty where nothing has."""
    found = []
    if now.nbytes > (1 + MOST_GROWTH) * before.nbytes + SLACK_BYTES:
        found.append(f"resident memory from {before.nbytes >> 20} to {now.nbytes >> 20} MiB")
    if now.threads > before.threads + MOST_THREADS_MORE:
        found.append(f"threads from {before.threads} to {now.threads}")
    if now.descriptors > before.descriptors + MOST_FILES_MORE:
        more = dict(now.kinds - before.kinds)
        found.append(f"open files from {before.descriptors} to {now.descriptors}: {more} more")
    return found


def used_on_gpus(ranks: int) -> dict[str, int]:
    """MiB in use on each rank's GPU, by whichever process; empty where ranks have none. Who asks has a CUDA
    context from then on, with files and memory of its own.
    """
    if not on_gpus(ranks):
        return {}
    free_and_total = {f"GPU {at}": torch.cuda.mem_get_info(at) for at in range(ranks)}
    return {name: (total - free) >> 20 for name, (free, total) in free_and_total.items()}


def looks(pids: dict[str, int]) -> dict[str, Held]:
    """What the processes hold, by name, once they have let go of what callers gave back."""
    time.sleep(SETTLE_SECONDS)
    return {name: Held.of(pid) for name, pid in pids.items()}


def main() -> None:
    """Runs, prints a line a round, and writes the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600.0, help="of calling; 600 by default")
    parser.add_argument("--callers", type=int, default=16, help="at the same time; 16 by default")
    parser.add_argument("--rows", type=int, default=24, help="of a call; 24 by default")
    parser.add_argument("--ranks", type=int, choices=(1, 2), default=2, help="2 by default")
    parser.add_argument("--out", type=Path, help="where the result goes; by default into the record")
    args = parser.parse_args()
    sizes = sizes_of(args.ranks)
    tune_process()
    calls, wrong, failed = 0, 0, list[str]()
    first, first_on_gpus = dict[str, Held](), used_on_gpus(args.ranks)
    with checkpoint_folder(sizes) as folder:
        write_checkpoint(folder, sizes)
        config = config_of(folder, args.ranks).with_values({"server.connection_rest_seconds": REST_SECONDS})
        with (
            LocalCluster(config) as cluster,
            MoeClient(cluster.address, timeout=120) as client,
            Callers(cluster.address, sizes, PROCESSES) as callers,
        ):
            client.model()
            pids = {"head": os.getpid()} | {f"rank {rank}": cluster.pid(rank) for rank in range(args.ranks)}
            begun, at, looked = time.monotonic(), 0, 0
            while (
                (spent := time.monotonic() - begun) < args.seconds
                or not first
                or at < looked + len(KINDS)  # every way once more between the looks, however slow
            ):
                seconds = min(ROUND_SECONDS, args.seconds / (4 * WARM_ROUNDS))
                load = Load(KINDS[at % len(KINDS)], args.rows, sizes.layers, args.ranks, seconds)
                found, at = callers.run(load, args.callers), at + 1
                calls, wrong, failed = calls + len(found.seconds), wrong + found.wrong, failed + found.failed
                if not first and at >= WARM_ROUNDS and spent > args.seconds / 3:
                    first, first_on_gpus, looked = looks(pids), used_on_gpus(args.ranks), at
                told = {"seconds": round(spent), "calls": calls, "wrong": wrong}
                print(json.dumps(told | used_on_gpus(args.ranks)), flush=True)
            last, last_on_gpus = looks(pids), used_on_gpus(args.ranks)
    more = [f"{name}: {text}" for name in pids for text in grown(first[name], last[name])]
    more += [
        f"{name}: from {first_on_gpus[name]} to {used} MiB"
        for name, used in last_on_gpus.items()
        if used > first_on_gpus[name] + MOST_GPU_MIB_MORE
    ]
    held = {f"{name} MiB": float(last[name].nbytes >> 20) for name in pids}
    held |= {f"{name} MiB after a third": float(first[name].nbytes >> 20) for name in pids}
    held |= {f"{name} MiB": float(used) for name, used in last_on_gpus.items()}
    held |= {f"{name} MiB after a third": float(used) for name, used in first_on_gpus.items()}
    brought = f"{args.rows} rows x {sizes.hidden}, {args.seconds:.0f} s, by every way"
    case = f"{group_of(args.ranks)}{args.callers} callers of {brought}"
    bad = wrong + len(failed) + len(more)
    held |= {"calls": float(calls), "failed": float(len(failed)), "wrong": float(wrong)}
    print(json.dumps({"case": case, "bad": bad, "grown": more, "first failed": failed[:5]} | held))
    unit = "answers wrong, failed, or what grew"
    write([Result("hop_soak", case, float(bad), unit, "lower", 0.0, held)], args.out)
    if bad:
        raise SystemExit(f"{wrong} wrong, {len(failed)} failed, grown: {more}")


if __name__ == "__main__":
    main()
