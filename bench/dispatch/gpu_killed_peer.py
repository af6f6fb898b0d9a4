"""Does a process outlive a peer that is killed while it stores into the peer's GPU memory?

    python -m bench.dispatch.gpu_killed_peer        (two GPUs of one host)

The owner shares a buffer by CUDA IPC. The survivor maps it on its own device and stores into it without a
pause, by copy engine and by kernel in turns; the owner is killed (SIGKILL) meanwhile. Then the survivor is
asked for what a service needs: does its context still compute, do stores into the dead memory fail or vanish,
can the mapping be closed, and is the owner's memory free again after that. Prints what it saw, one line each,
and writes bench/results/gpu_killed_peer.jsonl.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch

from bench.lib.record import Result, write
from moeserve.runtime.rank.weights.cuda_ipc import opened, shared

BYTES = 1 << 30
STORES = 200  # after the kill


def own(pipe: Connection) -> None:
    """The owner: shares a buffer and waits for its end."""
    torch.cuda.set_device(1)
    buffer = torch.zeros(BYTES, dtype=torch.uint8, device="cuda:1")
    pipe.send(shared(buffer))
    time.sleep(600)


def attempt(name: str, act: Callable[[], object]) -> tuple[bool, str]:
    """Whether `act` went well, told in a line."""
    started = time.perf_counter()
    try:
        found = act()
        torch.cuda.synchronize()
    except Exception as error:
        text = str(error).splitlines()[0]
        print(f"{name}: FAILED after {time.perf_counter() - started:.3f} s: {text}", flush=True)
        return False, text
    print(f"{name}: well, {time.perf_counter() - started:.3f} s, {found}", flush=True)
    return True, ""


def main() -> None:
    """Runs the rank that survives."""
    if torch.cuda.device_count() < 2:
        sys.exit("this needs two GPUs of one host")
    torch.cuda.set_device(0)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    owner = context.Process(target=own, args=(there,), daemon=True)
    owner.start()
    mapped = [opened(here.recv(), 0)]
    source = torch.ones(BYTES, dtype=torch.uint8, device="cuda:0")

    def store() -> str:
        mapped[0].copy_(source, non_blocking=True)  # copy engine
        mapped[0].view(torch.int32).add_(1)  # a kernel's loads and stores over the link
        return ""

    for _ in range(5):
        store()
    torch.cuda.synchronize()
    for _ in range(50):
        store()  # queued: the kill falls into them
    assert owner.pid is not None
    os.kill(owner.pid, signal.SIGKILL)
    owner.join()
    free_dead = torch.cuda.mem_get_info(1)[0]
    outcomes = {
        "stores under way at the kill": attempt("stores under way at the kill", lambda: "drained"),
        "stores into the dead owner's memory": attempt(
            "stores into the dead owner's memory",
            lambda: [store() for _ in range(STORES)] and f"{STORES} pairs",
        ),
        "own computing": attempt(
            "own computing",
            lambda: float(
                (torch.ones(512, 512, device="cuda:0") @ torch.ones(512, 512, device="cuda:0")).sum()
            ),
        ),
        "peer memory of another process": attempt(
            "the dead owner's GPU", lambda: torch.zeros(8, device="cuda:1").sum()
        ),
    }
    mapped.clear()
    outcomes["closing the mapping"] = attempt("closing the mapping", torch.cuda.ipc_collect)
    freed = torch.cuda.mem_get_info(1)[0] - free_dead
    print(f"GPU 1 after closing: {freed / 2**20:+.0f} MiB free against right after the kill", flush=True)
    write(
        [
            Result("gpu_killed_peer", f"{name} (1: well, 0: failed)", float(well), "", "higher", None)
            for name, (well, _) in outcomes.items()
        ]
        + [
            Result(
                "gpu_killed_peer",
                "freed on the owner's GPU by closing the mapping",
                freed / 2**20,
                "MiB",
                "higher",
            )
        ]
    )


if __name__ == "__main__":
    main()
