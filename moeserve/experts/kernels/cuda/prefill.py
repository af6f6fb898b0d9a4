"""A step of many FP8 rows on Hopper, launched: its groups of rows, and the two GEMMs of `prefill.cu`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from moeserve.device.arguments import Argument, Arguments
from moeserve.device.nvrtc import Function, Program, tensor_map
from moeserve.experts.activation import Activation
from moeserve.experts.kernels.cuda.panels import map_of
from moeserve.experts.kernels.cuda.steps import (
    EXTENT,
    NO_NUMBERS,
    NUMBERS,
    OUTS,
    Block,
    GemmForm,
    Groups,
    numbers,
    source,
)

ARGUMENTS = Arguments(
    "PrefillArguments",
    x="TensorMap",  # E4M3 codes of rows
    w="TensorMap",  # panels of E4M3 codes
    x_scale="const float*",  # [groups, K / 128, 128], by row of a group
    w_scale="const float*",  # [e, rows / 128, K / 128]
    bias="const float*?",  # [e, rows]
    out="void*",
    out_scale="float*",  # as x_scale, of the next GEMM
    tiles="int*",  # as `rows.cu` lists them
    n="int",  # columns of the output
    k_blocks="int",  # blocks of 128 of K
    **EXTENT,
    **NUMBERS,
)

SOURCES = (ARGUMENTS, "prefill.cu")

UNIT, DEPTH = 64, 128

GROUP_ROWS = 128
"""Most rows of one slot that a cluster works on at once."""

BLOCK_WEIGHTS = 256
"""Rows of the weights that a block multiplies them by."""

BLOCK = Block(384, 208224, waits=True)


@dataclass(frozen=True)
class PrefillRows:
    """E4M3 codes `[R, K]`, and their scales `[groups, K / 128, 128]` float32, by row of a group."""

    codes: Tensor
    scale: Tensor


@dataclass(frozen=True)
class PrefillWeights:
    """One side's weights: panels of E4M3 codes, scales of 128x128, and biases `[e, N]` if any."""

    codes: Tensor
    scale: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class PrefillStep(Groups):
    """A batch cut into groups of at most 128 rows of one slot; nothing is read on the host."""

    @property
    def cut(self) -> tuple[int, int]:
        """The rows by which a group grows, and the most it has."""
        return UNIT, GROUP_ROWS

    def rows(self, codes: Tensor, scale: Tensor) -> PrefillRows:
        """Rows `codes [R, K]` and `scale [R, K / 128]`, of any strides, as the GEMM reads them."""
        return PrefillRows(codes, self.grouped(scale))

    def gate_up(
        self, x: PrefillRows, weights: PrefillWeights, activation: Activation, inner: int
    ) -> PrefillRows:
        """Rows `[R, inner]` after the first GEMM and an activation of `FUSED_ACTIVATIONS`, rounded again."""
        codes = torch.empty((self.capacity, inner), dtype=torch.float8_e4m3fn, device=x.codes.device)
        inner_rows = PrefillRows(codes, self.scale_storage(-(-inner // DEPTH)))
        form = GemmForm(weights.bias is not None, fused=True, limited=activation.limit is not None)
        self._run(form, (x, weights), inner_rows, numbers(activation))
        return inner_rows

    def down(self, x: PrefillRows, weights: PrefillWeights, hidden: int, out_dtype: torch.dtype) -> Tensor:
        """`[R, hidden]`: rows times their slot's weights, plus the bias; other rows are not written."""
        out = torch.empty((self.capacity, hidden), dtype=out_dtype, device=x.codes.device)
        form = GemmForm(weights.bias is not None, out=OUTS[out_dtype])
        self._run(form, (x, weights), PrefillRows(out, x.scale), NO_NUMBERS)
        return out

    def _run(
        self,
        form: GemmForm,
        given: tuple[PrefillRows, PrefillWeights],
        out: PrefillRows,
        numbers: Mapping[str, float],
    ) -> None:
        x, weights = given
        n = out.codes.shape[1]
        arguments: dict[str, Argument] = {
            "x": tensor_map(x.codes.view(torch.uint8), (UNIT, DEPTH)),
            "w": map_of(weights.codes),
            "x_scale": x.scale,
            "w_scale": weights.scale,
            "bias": weights.bias,
            "out": out.codes,
            "out_scale": out.scale,
            "tiles": self.tiles,
            "n": n,
            "k_blocks": -(-x.codes.shape[1] // DEPTH),
            **numbers,
        }
        self.launch(
            _function(form), BLOCK, arguments, (form.tiles_across(n, BLOCK_WEIGHTS), x.codes.shape[1])
        )


@cache
def _function(form: GemmForm) -> Function:
    return Program(source(*SOURCES), form.options).function("prefill", ARGUMENTS)
