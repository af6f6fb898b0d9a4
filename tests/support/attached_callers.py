"""Callers that are attached to a service: one pass, its answers compared, and a process of such."""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from houses import Alone
from torch import Tensor

from moeserve.proto.client import Choice
from moeserve.proto.passes.attached import AttachedLane, Wanted
from moeserve.proto.passes.running import Pass, PassLate
from moeserve.proto.tensors import as_torch


def answer_of(run: Pass, stage: int) -> Tensor:
    """The answer of a stage's step, as a tensor of torch."""
    found = run.take_plain(stage)
    return as_torch(found.storage.data, found.spec)


def one_pass(lane: AttachedLane, alone: Alone, *, stages: int, seed: int) -> None:
    """A pass over both layers with rows of any number, each answer compared."""
    most = min(8, lane.wanted.rows)
    with lane.begin([0, 1], stages=stages) as run:
        for layer in (0, 1):
            batches = [alone.batch((seed + 3 * at) % most + 1, seed=100 * seed + at) for at in range(stages)]
            for stage, (hidden, ids, weights) in enumerate(batches):
                run.post(stage, hidden, Choice(ids, weights))
            for stage in reversed(range(stages)):
                expected = alone.forward(layer, *batches[stage])
                torch.testing.assert_close(answer_of(run, stage), expected, rtol=1e-4, atol=1e-4)


def name_of(pid: int) -> str:
    """The name of the lane of a caller that is this process: one that was just killed may have its still."""
    return f"steady-{pid}"


def run_caller(address: str, path: Path, rank: int, pipe: Connection) -> None:
    """A process that makes passes until it is told to stop, says how many, and what went wrong."""
    torch.set_num_threads(1)
    alone, done = Alone(path), 0
    try:
        name = name_of(os.getpid())
        wanted = Wanted(name, dtype="fp32", rows=16, stages=2, rank=rank, timeout=20.0)
        with AttachedLane.attach(address, wanted) as lane:
            while not pipe.poll():
                try:
                    one_pass(lane, alone, stages=2, seed=done)
                except PassLate:
                    continue
                done += 1
                pipe.send(done)
            pipe.send("ended")
    except BaseException as error:
        pipe.send(f"{type(error).__name__}: {error}")
        raise


class Steady:
    """The test's end of such a process."""

    def __init__(self, process: Any, pipe: Connection) -> None:
        self._process, self._pipe = process, pipe
        self._done = 0
        self._over = False

    @property
    def pid(self) -> int:
        """Its process."""
        return int(self._process.pid)

    def started(self) -> None:
        """Waits for its first pass."""
        self.passes(more_than=0)

    def passes(self, more_than: int = -1) -> int:
        """Right passes so far; waits for more than `more_than`. AssertionError where one was wrong."""
        until = time.monotonic() + 30
        while self._pipe.poll(0.0 if self._done > more_than else max(0.0, until - time.monotonic())):
            said = self._pipe.recv()
            assert isinstance(said, int), said
            self._done = said
        assert self._done > more_than, "no further pass"
        return self._done

    def stop(self) -> None:
        """Has it end; its passes were right until then."""
        if self._over:
            return
        self._pipe.send("stop")
        while (said := self._pipe.recv()) != "ended":
            assert isinstance(said, int), said

    def gone(self) -> None:
        """It was killed."""
        self._over = True
