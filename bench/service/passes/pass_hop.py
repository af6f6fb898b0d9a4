"""A step of a pass beside the client's calls: one caller, the same rows, in turn in one run.

    python -m bench.service.passes.pass_hop [--seconds 60] [--out FILE]

    pass      a step of a standing pass over a device lane: rows posted, answer taken
    placed    the client's call with rows and answer in a lane's shared memory
    plain     the client's call with torch tensors of its own
    step      the same step as a CUDA graph of a rank in process; on a GPU alone
    hop       what the step of the pass takes beyond that

One rank on a CPU with small experts; on a machine with a GPU the rank is on it, with large ones. Blocks of
calls take turns, so that what else the machine does meets all ways alike; the pass rests before its block
until calls count as company no more, which has its steps be calls. Every answer is compared with the first.
Prints a JSON line a case; writes bench/results/pass_hop.jsonl, or FILE.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.lib.record import Result, write
from bench.service.hops.sizes import Sizes, write_checkpoint
from bench.service.passes.gpu.steps import batches, steps_alone
from moeserve.proto.client import Choice, MoeClient
from moeserve.proto.passes.attached import AttachedLane, Wanted
from moeserve.proto.tensors import as_torch
from moeserve.runtime.config import Config
from moeserve.runtime.doors.passes.device_lanes import COMPANY_SECONDS
from moeserve.runtime.launch.environment import tune_process
from moeserve.runtime.launch.local_cluster import LocalCluster
from moeserve.runtime.launch.torchrun import join_torchrun, leave_torchrun

ROWS = (1, 16, 128, 1024)
BLOCK = 40  # calls of one way before the next has its turn; of the pass, one forward pass
STEPS, REPLAYS = 8, 200  # of a graph, and how often it is replayed
LARGE, SMALL = Sizes(7168, 2048, 64, 8, 2), Sizes(1024, 256, 16, 2, 2)
LARGEST_ERROR = 2e-2  # of an answer against the first

Call = Callable[[], Tensor]


def main() -> None:
    """Runs, prints a line a case, and writes the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="of calling; 60 by default")
    parser.add_argument("--out", type=Path, help="where the result goes; by default into the record")
    args = parser.parse_args()
    gpu = torch.cuda.is_available()
    sizes = LARGE if gpu else SMALL
    tune_process()
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), sizes)
        alone = steps_of(config_of(folder, gpu=True), sizes) if gpu else {}
        with LocalCluster(config_of(folder, gpu=gpu)) as cluster, MoeClient(cluster.address) as client:
            client.model()
            for rows in ROWS:
                taken = compared(cluster.address, client, sizes, rows, args.seconds / len(ROWS))
                results.append(told(rows, sizes, taken, alone.get(rows)))
                print(json.dumps({"case": results[-1].case, "ours": results[-1].ours, **results[-1].peers}))
    write(results, args.out)


def config_of(folder: str, *, gpu: bool) -> Config:
    """A service of one rank."""
    given: dict[str, Any] = {
        "model.checkpoint": folder,
        "plan.device": "cuda" if gpu else "cpu",
        "parallel.enable_expert_parallel": True,
        "server.port": 0,
        "server.metrics_port": -1,
        "passes.lane_bytes": 1 << 30,
        "passes.host_ahead": gpu,
    }
    return Config().with_values(given)


def steps_of(config: Config, sizes: Sizes) -> dict[int, float]:
    """Microseconds of a step without a hop, by rows: the median of a rank of this process."""
    os.environ["LOCAL_RANK"] = "0"
    rank = join_torchrun(config)
    try:
        return {
            rows: statistics.median(
                steps_alone(rank, batches(sizes, rows, rank.device, STEPS), 1, REPLAYS)[0]
            )
            for rows in ROWS
        }
    finally:
        leave_torchrun(rank)
        del os.environ["LOCAL_RANK"]
        torch.cuda.empty_cache()


def compared(
    address: str, client: MoeClient, sizes: Sizes, rows: int, seconds: float
) -> dict[str, list[float]]:
    """Microseconds of each way's calls, at so many rows. Raises SystemExit where an answer is wrong."""
    batch = sizes.batch(rows, seed=rows)
    wanted = Wanted(f"hop-{rows}", rows=rows, dtype="bf16")
    with AttachedLane.attach(address, wanted) as lane, lane.begin([0] * BLOCK, standing=True) as run:
        placed_rows, placed_answer = (client.allocate(0, (rows, sizes.hidden)) for _ in range(2))
        placed_rows.tensor.copy_(batch[0])
        route = Choice(batch[1], batch[2])

        def by_pass() -> Tensor:
            run.post(0, batch[0], route)
            found = run.take_plain(0)
            return as_torch(found.storage.data, found.spec)

        def placed() -> Tensor:
            client.call(0, placed_rows, route, output=placed_answer)
            return placed_answer.tensor

        def plain() -> Tensor:
            answer: Tensor = client.forward(0, *batch)
            return answer

        ways: dict[str, Call] = {"pass": by_pass, "placed": placed, "plain": plain}
        first = placed().clone()
        taken: dict[str, list[float]] = {name: [] for name in ways}
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for name, call in ways.items():
                if name == "pass":
                    time.sleep(1.2 * COMPANY_SECONDS)
                taken[name] += timed(call, first)
        placed_rows.close()
        placed_answer.close()
    return taken


def timed(call: Call, first: Tensor) -> list[float]:
    """Microseconds of a block of calls, of which the first few are not counted."""
    found = []
    for at in range(BLOCK):
        began = time.perf_counter()
        answer = call()
        lasted = time.perf_counter() - began
        if at >= BLOCK // 4:
            found.append(lasted * 1e6)
        if (answer.float() - first.float()).norm() > LARGEST_ERROR * first.float().norm():
            raise SystemExit("an answer is wrong")
    return found


def told(rows: int, sizes: Sizes, taken: dict[str, list[float]], step: float | None) -> Result:
    """The result of one number of rows. step: microseconds of one without a hop; None: it is not known."""
    middle = {name: statistics.median(each) for name, each in taken.items()}
    late = {f"{name} p99": sorted(each)[int(0.99 * len(each))] for name, each in taken.items()}
    ours = middle.pop("pass")
    beyond = {} if step is None else {"step": step, "hop": ours - step}
    peers = {name: round(value, 1) for name, value in (middle | late | beyond).items()}
    case = f"{rows} rows x {sizes.hidden}: a call of one layer, p50"
    return Result("pass_hop", case, round(ours, 1), "us", "lower", None, peers)


if __name__ == "__main__":
    main()
