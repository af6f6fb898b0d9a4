"""`Attention`: a kernel in place of attention, which keeps the GPU's memory busy for so long."""

from __future__ import annotations

import torch

ELEMENTS = 1 << 29  # of float32: 2 GiB, far more than a GPU's caches hold
ROUNDS = 8  # of calibrating
LAUNCHES = 20  # of a graph
SUSTAINED = 0.25e6  # microseconds of one measurement
FIRST_RATE = 4e6 / 4  # elements a microsecond
CLOSE = 0.01


class Attention:
    """Reads as much memory as takes the time that is asked for; each launch reads another part.

    It fills the GPU: its blocks take all threads of all multiprocessors and read at the rate of the memory,
    each 64 KiB of it, and others take the place of those that have ended. Other kernels find places between.
    computes: it computes for as long, as many blocks, and reads nothing, where experts read the same memory.
    """

    def __init__(self, device: str, *, computes: bool = False) -> None:
        from bench.service.passes.gpu.reading import SHARE

        self._share, self._computes = SHARE, computes
        self._memory = torch.zeros(0 if computes else ELEMENTS, device=device)
        self._sums = torch.zeros(ELEMENTS // SHARE, device=device)
        self._device = device
        self._known: dict[float, tuple[int, float]] = {0.0: (0, 0.0)}  # elements and time, by the wanted time
        self._elements, self._at = 0, 0

    def set(self, wanted: float) -> float:
        """Has `run` take so many microseconds; how many they are, measured."""
        wanted = round(wanted, 1)
        if wanted not in self._known:
            self._known[wanted] = self._calibrated(wanted)
        self._elements, took = self._known[wanted]
        return took

    @property
    def rate(self) -> float:
        """Terabytes a second that it reads, alone on its GPU."""
        if self._computes:
            return 0.0
        took = next((took for elements, took in self._known.values() if elements == self._elements), 0.0)
        return self._elements * 4 / took / 1e6 if took else 0.0

    def run(self) -> None:
        """Launches it on the current stream; nothing where no time was asked for."""
        from bench.service.passes.gpu.reading import compute, read

        if not self._elements:
            return
        if self._computes:
            compute(self._elements // self._share, self._sums)
            return
        if self._at + self._elements > ELEMENTS:
            self._at = 0
        read(self._memory[self._at : self._at + self._elements], self._sums)
        self._at += self._elements

    def _calibrated(self, wanted: float) -> tuple[int, float]:
        """Elements that take about as long, and what they take: those that came closest."""
        elements, found = int(wanted * FIRST_RATE), dict[int, float]()
        for _ in range(ROUNDS):
            shares = min(ELEMENTS // self._share, max(1, round(elements / self._share)))
            self._elements = elements = shares * self._share
            took = found[elements] = self._measured(int(SUSTAINED / LAUNCHES / wanted) + 1)
            if abs(took - wanted) < CLOSE * wanted:
                break
            elements = int(elements * wanted / took)
        return min(found.items(), key=lambda one: abs(one[1] - wanted))

    def _measured(self, replays: int) -> float:
        """Microseconds of one launch."""
        with torch.cuda.device(self._device):
            stream, graph = torch.cuda.Stream(self._device), torch.cuda.CUDAGraph()
            with torch.cuda.stream(stream):
                self.run()
            torch.cuda.synchronize(self._device)
            with torch.cuda.graph(graph, stream=stream):
                for _ in range(LAUNCHES):
                    self.run()
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with torch.cuda.stream(stream):
                graph.replay()
                first.record()
                for _ in range(replays):
                    graph.replay()
                last.record()
            last.synchronize()
        return first.elapsed_time(last) * 1e3 / LAUNCHES / replays
