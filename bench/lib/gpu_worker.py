"""`Worker`: a process on the GPU that does one thing at a time, and is replaced when it hangs or breaks.

A kernel that faults leaves its process without a working GPU context, and other systems' kernels may never
come back; neither must end the bench that compares with them. The processes are forked from one that has
imported what all need and has not touched the GPU.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context, set_forkserver_preload
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import torch

from bench.lib.record import ROOT

_CONTEXT: list[str] = ["forkserver"]

GRACE = 5.0
"""Seconds that an idle process is given to end by itself."""


class Failed(RuntimeError):
    """What a call raised in its process, or how the process ended."""


def share(*modules: str) -> None:
    """Has workers start with `modules` imported; if one of these uses the GPU, each imports them anew."""
    here = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(here)  # which the process that is forked looks into
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = (
        "1"  # asked there whether CUDA is available, torch uses no GPU
    )
    set_forkserver_preload([__name__, *modules])
    try:
        worker = Worker()
        worker.run(STARTED, _works)
        worker.close()
    except Failed as failed:
        print(f"workers start from nothing: {failed}", flush=True)
        _CONTEXT[0] = "spawn"


STARTED = 60.0
"""Seconds that a process may take to import what it needs."""


def _works() -> None:
    if torch.cuda.is_available():
        torch.ones(1, device="cuda").item()


def said(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {str(error)[:300]!r}"


class Worker:
    """One process at a time, made anew after a failure; what a call keeps in its modules stays there."""

    def __init__(self) -> None:
        self._start()

    def run(self, seconds: float, call: Callable[..., Any], *arguments: object) -> Any:
        """What `call(*arguments)` returns there. Raises Failed, also when it takes longer than `seconds`."""
        self._pipe.send((call, arguments))
        if not self._pipe.poll(max(0.0, seconds)):
            self._renew()
            raise Failed(f"no end in {max(0.0, seconds):.0f} s")
        try:
            answer, raised, lost = self._pipe.recv()
        except EOFError:
            self._process.join(GRACE)
            raised, lost = f"its process ended with status {self._process.exitcode}", True
        if lost:
            self._renew()
        if raised:
            raise Failed(raised)
        return answer

    def close(self) -> None:
        """Ends the process, and with it what it held on the GPU."""
        self._pipe.close()
        self._process.join(GRACE)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _start(self) -> None:
        context: Any = get_context(_CONTEXT[0])
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def _renew(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()
        self._start()


def on_workers(
    call: Callable[..., None], tasks: Sequence[tuple[Any, ...]], workers: int, deadline: float
) -> Worker:
    """`call(*task)` for all tasks in so many workers at once, and one of the workers to go on with.

    Prints a line for each that fails, or has not ended at `deadline`, of the monotonic clock.
    """
    free: SimpleQueue[Worker] = SimpleQueue()
    for _ in range(workers):
        free.put(Worker())

    def one(task: tuple[Any, ...]) -> None:
        worker = free.get()
        try:
            worker.run(deadline - time.monotonic(), call, *task)
        except Failed as failed:
            print(f"{call.__name__} {', '.join(map(str, task))}: {failed}", flush=True)
        free.put(worker)

    with ThreadPoolExecutor(workers) as threads:
        list(threads.map(one, tasks))
    for _ in range(workers - 1):
        free.get().close()
    return free.get()


def _serve(pipe: Connection) -> None:
    """Answers calls until the other end is closed, or a call has broken the GPU's context."""
    torch.set_num_threads(1)
    lost = False
    while not lost:
        try:
            call, arguments = pipe.recv()
        except EOFError:
            return
        answer, raised = None, ""
        try:
            answer = call(*arguments)
        except Exception as error:  # told to whoever called
            raised = said(error)
        lost = bool(raised) and _context_lost()
        if not lost:
            gc.collect()
            torch.cuda.empty_cache()
        pipe.send((answer, raised, lost))


def _context_lost() -> bool:
    """Whether nothing runs on the GPU any more, as after a fault in a kernel."""
    try:
        if torch.cuda.is_initialized():
            torch.ones(1, device="cuda").item()
    except RuntimeError:
        return True
    return False
