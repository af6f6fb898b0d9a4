"""`Stages`: which stage of a device lane a call is of, and on which of the caller's streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


class Stages:
    """Steps of each stage of the pass that runs, and of the graph that is recorded. Of one thread at a time.

    A call says its layer alone. It is of a free stage whose next layer that is; of several, of the one that
    was called on the same stream last, so that a micro-batch with a stream of its own keeps its stage.
    """

    def __init__(self, count: int, current: Callable[[], torch.cuda.Stream]) -> None:
        """current: the stream on which the calling thread launches."""
        self._current = current
        self._sent = [0] * count  # steps, without those of replayed graphs
        self._streams: dict[int, torch.cuda.Stream] = {}  # of the last call, by stage
        self._recorded = [0] * count  # while a graph is recorded
        self._recorded_on: dict[int, torch.cuda.Stream] = {}

    def __len__(self) -> int:
        return len(self._sent)

    def begin(self) -> None:
        """Another pass begins."""
        self._sent = [0] * len(self)

    def whole(self, steps: int) -> bool:
        """Whether no stage is in the middle of a forward pass of so many."""
        return not any(sent % steps for sent in self._sent)

    def recorded(self) -> list[int]:
        """What was recorded of each stage since this was asked last."""
        found, self._recorded, self._recorded_on = self._recorded, [0] * len(self), {}
        return found

    def fits(self, layer: int, free: Sequence[int], layers: Sequence[int]) -> bool:
        """Whether any of the `free` ones has this layer next. layers: of a forward pass."""
        return self._next(layer, free, layers) is not None

    def take(self, layer: int, free: Sequence[int], layers: Sequence[int]) -> int | None:
        """The stage of a call, which counts as a step of it; None where none fits."""
        stage = self._next(layer, free, layers)
        if stage is not None:
            self._sent[stage] += 1
        return stage

    def take_recorded(self, layer: int, free: Sequence[int], layers: Sequence[int]) -> int | None:
        """The same, of a call that is recorded. In a graph nothing orders two streams that call one stage: a
        stage that no stream has called goes before another stream's.
        """
        fits = [at for at in free if layers[self._recorded[at] % len(layers)] == layer]
        on, now = self._recorded_on, self._current()
        own = [at for at in fits if _same(on.get(at), now)]
        others = [at for at in fits if at not in on] + [at for at in on if at in fits]
        stage = min(
            own or others,  # of the others the one that was called longest ago is the first
            key=lambda at: (at in on, self._recorded[at] % len(layers) == 0),
            default=None,
        )
        if stage is not None:
            self._recorded[stage] += 1
        return stage

    def follow(self, stage: int, *, capturing: bool) -> None:
        """A call of the stage is launched on the current stream now, behind the one before on another."""
        now = self._current()
        if capturing:
            self._recorded_on.pop(stage, None)
            self._recorded_on[stage] = now
            return
        before = self._streams.get(stage)
        if before is not None and before != now:
            now.wait_stream(before)
        self._streams[stage] = now

    def _next(self, layer: int, free: Sequence[int], layers: Sequence[int]) -> int | None:
        """Of those that fit and were called on other streams, one in the middle of a forward pass."""
        fits = [at for at in free if layers[self._sent[at] % len(layers)] == layer]
        now = self._current()
        return min(
            fits,
            key=lambda at: (not _same(self._streams.get(at), now), self._sent[at] % len(layers) == 0),
            default=None,
        )


def _same(before: torch.cuda.Stream | None, now: torch.cuda.Stream) -> bool:
    """Whether a stage was called on this stream last. PyTorch finds no stream unequal to None."""
    return before is not None and before == now
