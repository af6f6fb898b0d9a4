"""A lane whose rows lie in pinned host memory, and a caller that writes its words by hand."""

from __future__ import annotations

import time
from typing import Any

import torch
from host_words import HostWords
from houses import Alone
from pass_pairs import rows_taken
from torch import Tensor

from moeserve.dispatch.mail.host_layout import HostMailLayout
from moeserve.dispatch.mail.kernels import CHOICE
from moeserve.proto.passes import mailbox as m
from moeserve.runtime.rank.runs.runs import OwnerLane, PassRuns, Run, Told

SECONDS = 10.0


class HostPair(HostWords):
    """A caller's words in host memory, and an owner's stream."""

    def __init__(
        self,
        runs: PassRuns,
        alone: Alone,
        stages: int = 1,
        rows: int = 40,
        patience: float = 5.0,
        buffers: int = 1,
    ) -> None:
        sizes = alone.checkpoint
        widths = sizes.hidden, sizes.num_experts, sizes.top_k
        layout = HostMailLayout(rows, stages, *widths, torch.bfloat16, buffers=buffers)
        super().__init__(layout, pinned=True)
        self.owner: OwnerLane = runs.lane(self.layout, self.addresses, patience)
        self.there, self.runs = torch.cuda.Stream(), runs
        torch.cuda.synchronize()

    def begin(self) -> int:
        """A pass of another number, of which no answer is there."""
        torch.cuda.synchronize()
        self.number += 1
        return self.number

    def launch(self, steps: tuple[tuple[int, int], ...], rows: int, **more: Any) -> object:
        """Has a run queued."""
        with torch.cuda.stream(self.there):
            return self.runs.launch(Run(self.owner, steps, rows, CHOICE, **more), (7, 3))

    def answer(self, stage: int, step: int, rows: int, buffer: int = 0) -> Tensor:
        """Waits for an answer; it is on the GPU. Raises TimeoutError."""
        until = time.monotonic() + SECONDS
        while not self.answered(stage, step):
            if time.monotonic() > until:
                raise TimeoutError(f"step {step} of stage {stage} has no answer")
        head = self.words.answer_header(stage)
        assert (self.out[head + m.EPOCH], self.out[head + m.VERSION]) == (7, 3)
        return self.raw_answer(stage, rows, buffer).cuda()

    def told(self, flight: object) -> Told:
        """How far it came."""
        flight.event.synchronize()  # type: ignore[attr-defined]
        told: Told = flight.read()  # type: ignore[attr-defined]
        return told

    @property
    def taken(self) -> int:
        """Rows of the last step, as the owner has agreed upon them."""
        torch.cuda.synchronize()
        return rows_taken(self.owner.state)
