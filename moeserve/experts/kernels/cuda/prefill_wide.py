"""A step of bf16 rows on Hopper, launched: its groups of rows, and the GEMMs of `prefill_wide.cu`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from moeserve.device.arguments import Argument, Arguments
from moeserve.device.nvrtc import Function, Program, tensor_map
from moeserve.experts.activation import Activation
from moeserve.experts.kernels.cuda.panels import map_by_eights, map_of
from moeserve.experts.kernels.cuda.steps import (
    EXTENT,
    NO_NUMBERS,
    NUMBERS,
    OUTS,
    Block,
    GemmForm,
    Groups,
    defined,
    numbers,
    source,
)

ARGUMENTS = Arguments(
    "WidePrefillArguments",
    x="TensorMap",  # bf16 rows
    w="TensorMap",  # panels of bf16
    bias="const float*?",  # [e, rows]
    out="void*",
    tiles="int*",  # as `rows.cu` lists them
    n="int",  # columns of the output
    k_blocks="int",  # blocks of 64 of K
    **EXTENT,
    **NUMBERS,
)

SOURCES = (ARGUMENTS, "prefill_wide.cu")

UNIT, DEPTH = 16, 64
"""Rows by which a group is wider or narrower, columns of a step of K."""


class Width(NamedTuple):
    """One compiled width: most rows of one slot that a cluster works on at once, rows of one copy of them."""

    rows: int
    box: int
    block: Block


WIDE = Width(256, 64, Block(384, 197120, waits=True))
NARROW = Width(32, 16, Block(384, 205408, waits=True))
"""Where reading weights is the limit."""


@dataclass(frozen=True)
class WideWeights:
    """One side's weights in panels of bf16, and biases `[e, N]` float32 if any."""

    values: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class WidePrefillStep(Groups):
    """A batch cut into groups of at most `width.rows` rows of one slot; nothing is read on the host."""

    width: Width = WIDE

    @property
    def cut(self) -> tuple[int, int]:
        """The rows by which a group grows, and the most it has."""
        return UNIT, self.width.rows

    def gate_up(self, x: Tensor, weights: WideWeights, activation: Activation, inner: int) -> Tensor:
        """bf16 `[R, inner]`: rows `x [R, H]` bf16 after the first GEMM and one of `FUSED_ACTIVATIONS`."""
        out = torch.empty((self.capacity, inner), dtype=torch.bfloat16, device=x.device)
        form = GemmForm(weights.bias is not None, fused=True, limited=activation.limit is not None)
        self._run(form, (x, weights), out, numbers(activation))
        return out

    def down(self, x: Tensor, weights: WideWeights, hidden: int, out_dtype: torch.dtype) -> Tensor:
        """`[R, hidden]`: rows times their slot's weights, plus the bias; other rows are not written."""
        out = torch.empty((self.capacity, hidden), dtype=out_dtype, device=x.device)
        form = GemmForm(weights.bias is not None, out=OUTS[out_dtype])
        self._run(form, (x, weights), out, NO_NUMBERS)
        return out

    def _run(
        self, form: GemmForm, given: tuple[Tensor, WideWeights], out: Tensor, numbers: Mapping[str, float]
    ) -> None:
        x, weights = given
        n, values, width = out.shape[1], weights.values, self.width
        arguments: dict[str, Argument] = {
            "x": tensor_map(x, (width.box, DEPTH)),
            "w": map_by_eights(values, 8) if form.fused else map_of(values),
            "bias": weights.bias,
            "out": out,
            "tiles": self.tiles,
            "n": n,
            "k_blocks": -(-x.shape[1] // DEPTH),
            **numbers,
        }
        self.launch(_function(form, width.rows), width.block, arguments, (form.tiles_across(n), x.shape[1]))


@cache
def _function(form: GemmForm, rows: int) -> Function:
    options = (*form.options, *defined({"MOST_ROWS": rows}))
    return Program(source(*SOURCES), options).function("prefill_wide", ARGUMENTS)
