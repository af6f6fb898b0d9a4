"""A step of many bf16 rows on Hopper, launched: its groups of rows, and the GEMMs of `prefill_wide.cu`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from moeserve.experts.activation import Activation
from moeserve.experts.kernels.device.steps import (
    NO_NUMBERS,
    OUTS,
    Block,
    Form,
    Groups,
    by_eights,
    numbers,
    source,
)
from moeserve.experts.nvrtc import Argument, Function, Program, tensor_map

GROUP_ROWS = 256
"""Most rows of one slot that a cluster works on at once."""

UNIT, DEPTH, BOX = 16, 64, 64
"""Rows by which a group is wider or narrower, columns of a step of K, rows of one copy."""

BLOCK = Block(384, 196800)


@dataclass(frozen=True)
class Weights:
    """One side's weights `[e, N, K]` bf16, and biases `[e, N]` float32 if any."""

    values: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class Step(Groups):
    """A batch cut into groups of at most 256 rows of one slot; nothing is read on the host."""

    @property
    def cut(self) -> tuple[int, int]:
        """The rows by which a group grows, and the most it has."""
        return UNIT, GROUP_ROWS

    def gate_up(self, x: Tensor, weights: Weights, activation: Activation, inner: int) -> Tensor:
        """bf16 `[R, inner]`: rows `x [R, H]` bf16 after the first GEMM and one of `FUSED_ACTIVATIONS`."""
        out = torch.empty((self.capacity, inner), dtype=torch.bfloat16, device=x.device)
        form = Form(weights.bias is not None, fused=True, limited=activation.limit is not None)
        self._run(form, (x, weights), out, numbers(activation))
        return out

    def down(self, x: Tensor, weights: Weights, hidden: int, out_dtype: torch.dtype) -> Tensor:
        """`[R, hidden]`: rows times their slot's weights, plus the bias; other rows are not written."""
        out = torch.empty((self.capacity, hidden), dtype=out_dtype, device=x.device)
        form = Form(weights.bias is not None, out=OUTS[out_dtype])
        self._run(form, (x, weights), out, NO_NUMBERS)
        return out

    def _run(
        self, form: Form, given: tuple[Tensor, Weights], out: Tensor, numbers: tuple[float, float, float]
    ) -> None:
        x, weights = given
        n, values = out.shape[1], weights.values
        flat = values.view(-1, values.shape[-1])
        arguments: tuple[Argument, ...] = (
            tensor_map(x, (BOX, DEPTH)),
            by_eights(values, 8) if form.fused else tensor_map(flat, (128, DEPTH)),
            self.tiles if weights.bias is None else weights.bias,  # one that is not there is not read
            out,
            self.tiles,
            n,
            -(-x.shape[1] // DEPTH),
            *numbers,
        )
        self.launch(_function(form), BLOCK, arguments, form.tiles_across(n))


@cache
def _function(form: Form) -> Function:
    return Program(source("prefill_wide.cu"), form.options).function("prefill_wide")
