"""`TwoStreams`: a caller and an owner as two streams of this process, on one GPU or on two."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable

import torch

from bench.service.hops.sizes import Sizes
from moeserve.dispatch.mail.kernels import CHOICE, CallerKernels, words
from moeserve.dispatch.mail.layout import STEPS, WORDS, MailLayout, Word
from moeserve.runtime.launch.torchrun import HostedRank
from moeserve.runtime.planning.passes import rows_wire
from moeserve.runtime.rank.runs.runs import Flight, PassRuns, Run

PATIENCE = 3.0  # seconds
AHEAD = 2  # passes that are launched and have not ended, before the host waits
COPIES = 8  # of what a caller's table is announced with, pinned


class TwoStreams:
    """A lane of `rows` rows and so many stages. Each pass goes through all layers `depth` steps long."""

    def __init__(
        self,
        runs: PassRuns,
        rank: HostedRank,
        sizes: Sizes,
        home: str,
        shape: tuple[int, int, int],
        *,
        rounded: bool = True,
    ) -> None:
        """shape: rows, stages and depth. rounded: rows come in the wire of the layers, as a service's do."""
        rows, stages, depth = shape
        widths = sizes.hidden, sizes.experts, sizes.top_k
        wire = rows_wire(rank.plans.values(), rows) if rounded else ""
        self.layout = MailLayout(rows, stages, *widths, torch.bfloat16, wire)
        box = torch.zeros(self.layout.mailbox_bytes, dtype=torch.uint8, device=rank.device)
        answers = torch.zeros(self.layout.answers_bytes, dtype=torch.uint8, device=home)
        self._held, self._addresses = (box, answers), (box.data_ptr(), answers.data_ptr())
        self.runs, self._rows = runs, rows
        self.lane = runs.lane(self.layout, self._addresses, PATIENCE)
        self.table = words(torch.device(home))
        self.kernels = CallerKernels(self.layout, self.table)
        self.there, self.here = torch.cuda.Stream(rank.device), torch.cuda.Stream(home)
        self._steps = tuple((at % sizes.layers, stage) for at in range(depth) for stage in range(stages))
        self._number = 0
        self._copies = deque(torch.zeros(WORDS, dtype=torch.int64, pin_memory=True) for _ in range(COPIES))
        self._flights = deque[Flight]()
        self.host = list[float]()  # seconds of each launch of the owner's
        self._failed = 0  # how a pass has ended, a status, though another came after it
        self._announce()
        torch.cuda.synchronize()

    def launcher(self, work: Callable[[], None], *, announced: bool) -> Callable[[], None]:
        """What launches a pass of both: `work` is the caller's, recorded once. announced: each pass anew,
        else one that stands.
        """
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=self.here):
            work()

        def launch() -> None:
            started = time.perf_counter()
            if announced and self.host:
                self._announce()
            begins = self._number if announced or not self.host else 0
            run = Run(self.lane, self._steps, self._rows, CHOICE, begins)
            with torch.cuda.stream(self.there):
                self._flights.append(self.runs.launch(run, (1, 1)))
            self.host.append(time.perf_counter() - started)
            with torch.cuda.stream(self.here):
                graph.replay()
            if len(self._flights) > AHEAD:
                self._landed(self._flights.popleft())

        return launch

    def ended(self) -> tuple[int, int]:
        """How the pass has ended for the caller and for the owner; zeros: it has not."""
        torch.cuda.synchronize()
        while self._flights:
            self._landed(self._flights.popleft())
        told = int(self.table[Word.ENDED]), self._failed
        if any(told):
            print(json.dumps({"steps": [int(side[STEPS]) for side in (self.table, self.lane.state)]}))
        return told

    def close(self) -> None:
        """Lets go of what was recorded for this lane; waits for both streams."""
        self.ended()
        self.runs.forget(self.lane)

    def _announce(self) -> None:
        """Has the caller's kernels count from the beginning of another pass, on its stream."""
        self._number += 1
        told = self._copies[0]
        self._copies.rotate()
        told.zero_()
        told[Word.MAILBOX], told[Word.ANSWERS] = self._addresses
        told[Word.NUMBER], told[Word.PATIENCE] = self._number, int(PATIENCE * 1e9)
        with torch.cuda.stream(self.here):
            self.table.copy_(told, non_blocking=True)

    def _landed(self, flight: Flight) -> None:
        flight.event.synchronize()
        self._failed = self._failed or flight.read().ended
