"""`Colocated`: processes that each have a half of the rows, of the attention and of the experts."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import socket
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.service.hops.in_process import end_all
from bench.service.hops.sizes import Sizes
from bench.service.passes.gpu.shares import Batches, LongAttention, Passes, Share, divided, period
from bench.service.passes.gpu.steps import check
from moeserve.runtime.config import Config
from moeserve.runtime.launch.environment import set_environment
from moeserve.runtime.launch.torchrun import join_torchrun
from moeserve.torch.in_process import InProcess

RANKS = 2
LOAD_SECONDS = 240.0
ORDER_SECONDS = 60.0


class Colocated:
    """The processes, a GPU each, which do what they are asked together; a context. They load while others
    do: `loaded` waits for that. seconds: after which a process is ended where it hangs.
    """

    def __init__(self, config: Config, sizes: Sizes, on_gpus: bool, seconds: float) -> None:
        context = multiprocessing.get_context("spawn")
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        pairs = [context.Pipe() for _ in range(RANKS)]
        self._pipes = [ours for ours, _ in pairs]
        self._processes = [
            context.Process(
                target=_rank, args=(index, port, config, sizes, on_gpus, seconds, theirs), daemon=True
            )
            for index, (_, theirs) in enumerate(pairs)
        ]
        self._estimated = 0.0  # seconds of a pass
        for process, (_, theirs) in zip(self._processes, pairs, strict=True):
            process.start()
            theirs.close()

    def loaded(self) -> None:
        """Waits until all hold their experts. Raises RuntimeError where one does not."""
        self._answers("load", LOAD_SECONDS)

    def prepare(self, rows: int, attention: float) -> float:
        """Has passes made of `rows` rows in all, with so many microseconds of attention to all rows on one
        GPU; seconds that one takes, about.
        """
        self._estimated = max(self._ask("prepare", rows, attention))
        return self._estimated

    def seconds(self, passes: int) -> float:
        """Of a pass, one after another; those of the slower process."""
        return max(self._ask("measure", passes, limit=ORDER_SECONDS + 3 * passes * self._estimated))

    def compare(self, what: str, right: Path) -> None:
        """Compares answers of a last pass with those in the file. Raises RuntimeError where one is off."""
        self._ask("compare", what, right)

    def _ask(self, what: str, *given: object, limit: float = ORDER_SECONDS) -> list[float]:
        for pipe in self._pipes:
            pipe.send((what, given))
        return self._answers(what, limit)

    def _answers(self, what: str, seconds: float) -> list[float]:
        found = list[float]()
        for index, pipe in enumerate(self._pipes):
            if not pipe.poll(seconds):
                raise RuntimeError(f"rank {index} in process does not {what} within {seconds:g} s")
            try:
                answer = pipe.recv()
            except EOFError:
                raise RuntimeError(f"rank {index} in process has ended: {what}") from None
            if isinstance(answer, str):
                raise RuntimeError(answer)
            found.append(answer)
        return found

    def __enter__(self) -> Colocated:
        return self

    def __exit__(self, *ended: object) -> None:
        end_all(self._pipes, self._processes)


class _Rank:
    """One process. Every order is collective."""

    def __init__(self, index: int, config: Config, sizes: Sizes) -> None:
        self._index, self._sizes = index, sizes
        rank = join_torchrun(config)
        self._way, self._device = InProcess(rank), rank.device
        self._attention = None if rank.device == "cpu" else LongAttention(rank.device)
        self._passes: Passes | None = None
        self._rows = 0

    def prepare(self, rows: int, attention: float) -> float:
        """As `Colocated.prepare`."""
        if self._attention is not None:
            self._attention.set(attention / RANKS)
        if self._passes is None or rows != self._rows:
            self._passes = None
            gc.collect()
            share = Share(rows, (self._own(rows),))
            self._passes = Passes(self._way, Batches(self._sizes, share, self._device), self._attention)
            self._rows = rows
        with self._counted():
            self._passes.record(max(map(len, divided(rows, RANKS))))
            return self._passes.estimated()

    def measure(self, passes: int) -> float:
        """Seconds of a pass."""
        assert self._passes is not None
        with self._counted():
            return self._passes.seconds(passes)

    def compare(self, what: str, right: Path) -> float:
        """As `Colocated.compare`."""
        assert self._passes is not None
        own = self._own(self._rows)
        with self._counted():
            (found,) = self._passes.answers()
        stored: Tensor = torch.load(right, mmap=True)
        known = [one[own.start : own.stop].to(self._device) for one in stored]
        again = period(self._sizes.layers)
        check(f"{what}, rank {self._index}", (0, 0), found, [known[at % again] for at in range(len(found))])
        return 0.0

    def close(self) -> None:
        """Leaves the group."""
        self._passes = None
        gc.collect()
        self._way.close()

    def _own(self, rows: int) -> range:
        return divided(rows, RANKS)[self._index]

    def _counted(self) -> Any:
        """All ranks know how many rows each brings, as a scheduler of a model server has them know."""
        return self._way.rows([len(part) for part in divided(self._rows, RANKS)])


@torch.no_grad()
def _rank(
    index: int,
    port: int,
    config: Config,
    sizes: Sizes,
    on_gpus: bool,
    seconds: float,
    pipe: Connection,
) -> None:
    faulthandler.dump_traceback_later(seconds, exit=True)
    set_environment("127.0.0.1")
    os.environ |= {"RANK": str(index), "LOCAL_RANK": str(index), "WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(4 if on_gpus else 1)
    try:
        rank = _Rank(index, config, sizes)
        pipe.send(0.0)
        while True:
            what, given = pipe.recv()
            pipe.send(getattr(rank, what)(*given))
    except EOFError:  # whoever asked is gone
        rank.close()
    except (Exception, SystemExit) as error:  # the others would wait for this one in vain
        with suppress(OSError):  # whoever asked is gone
            pipe.send(f"rank {index} in process: {type(error).__name__}: {error}")
