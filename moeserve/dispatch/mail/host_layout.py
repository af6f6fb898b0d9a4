"""`HostMailLayout`: a lane whose rows and answers lie in host memory, as kernels of an owner see it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from moeserve.dispatch.mail.layout import MailLayout
from moeserve.proto.passes.mailbox import WORD, MailboxLayout

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True)
class HostMailLayout(MailLayout):
    """The places of a `MailboxLayout`. In place of lines a stage has the one header that its caller's host
    writes, and the one of its answer. buffers: in how many the caller may want it.
    """

    buffers: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.wire:
            raise ValueError(f"rows in host memory come as they are, not as {self.wire}")

    @property
    def in_host_memory(self) -> bool:
        """They do."""
        return True

    @cached_property
    def words(self) -> MailboxLayout:
        """What lies where, for the hosts of both."""
        sizes = (self.hidden, self.experts, self.top_k)
        return MailboxLayout.of((self.rows, self.stages), sizes, NAMES[self.dtype], self.buffers)

    @property
    def answer_buffers(self) -> tuple[int, int]:
        """In how many a stage's answer may be wanted, and bytes from one to the next."""
        return self.buffers, self.words.buffer_bytes

    @property
    def mailbox_bytes(self) -> int:
        """Of what the caller writes."""
        return self.words.mailbox_bytes

    @property
    def answers_bytes(self) -> int:
        """Of what the owner writes."""
        return self.words.answers_bytes

    def columns(self, stage: int) -> tuple[int, int, int, int, int]:
        """Where a stage's header, hidden states, ids, weights and logits begin in the mailbox."""
        return self.words.header(stage) * WORD, *self.words.columns(stage)

    def answer(self, stage: int) -> tuple[int, int]:
        """Where a stage's header and its answer begin in the answers."""
        return self.words.answer_header(stage) * WORD, self.words.answer(stage)
