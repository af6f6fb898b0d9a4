"""The kernels of device lanes of GPUs on a CPU, and rows for them."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from cuda_on_cpu import HostFunction, needs_compiler, on_cpu

from moeserve.device.arguments import Arguments
from moeserve.device.nvrtc import Program
from moeserve.dispatch.mail import kernels
from moeserve.dispatch.mail.arguments import AWAIT, BRING, COPY, EXCHANGE, FETCH, POST, TAKE
from moeserve.dispatch.mail.kernels import Given

FUNCTIONS = {
    "mail_bring": BRING,
    "mail_fetch": FETCH,
    "mail_exchange": EXCHANGE,
    "mail_take": TAKE,
    "mail_post": POST,
    "mail_words": COPY,
    "mail_await": AWAIT,
}


def library_in(folder: Path) -> ctypes.CDLL:
    """All of them, compiled; skips where there is no compiler."""
    needs_compiler()
    return on_cpu(kernels.program(), FUNCTIONS, folder)


def launches_by(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has what launches kernels launch those of the library."""

    def function(program: Program, name: str, arguments: Arguments) -> HostFunction:
        return HostFunction(library, name, arguments)

    monkeypatch.setattr(Program, "function", function)


def given(rows: int, widths: tuple[int, int, int], *, logits: bool = False) -> Given:
    """Rows of a step. widths: hidden, experts and top-k."""
    hidden, experts, top_k = widths
    random = torch.Generator().manual_seed(rows)
    states = torch.randn(rows, hidden, generator=random).bfloat16()
    if logits:
        return Given(states, torch.randn(rows, experts, generator=random), None)
    ids = torch.randint(0, experts, (rows, top_k), generator=random, dtype=torch.int32)
    return Given(states, ids, torch.rand(rows, top_k, generator=random))


def room_of(like: Given, padded: int) -> tuple[Given, torch.Tensor]:
    """Where `padded` rows like these come to, and which there are; as another step has left it."""
    room = Given(
        torch.full((padded, like.hidden.shape[1]), 7.0, dtype=torch.bfloat16),
        torch.full((padded, like.route.shape[1]), 9, dtype=like.route.dtype),
        None if like.weights is None else torch.full((padded, like.weights.shape[1]), 9.0),
    )
    return room, torch.ones(padded, dtype=torch.bool)
