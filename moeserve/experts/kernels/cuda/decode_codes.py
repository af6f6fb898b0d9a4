"""A step of some rows a slot on four-bit weights, in one launch of `decode_codes.cu`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import inf

import torch
from torch import Tensor

from moeserve.device.nvrtc import Argument, Function, Program, tensor_map
from moeserve.experts.batch import ExpertBatch, ExpertShape
from moeserve.experts.kernel import KernelSpec
from moeserve.experts.kernels.cuda.prefill_codes import Weights
from moeserve.experts.kernels.cuda.steps import (
    CLUSTER,
    OUTS,
    Block,
    defined,
    numbers,
    resident_clusters,
    source,
)

SOURCES = ("codes.cu", "decode_codes.cu")

MOST_SLOTS = 512
"""Slots that the list in shared memory has room for."""

INNER_MULTIPLE = 64
"""What the inner size must be a multiple of: a block of 64 rows of weights is gate's or up's."""

ROWS = ((6.0, 16), (inf, 24))
"""Likely rows of a slot up to which so many at once read weights least often."""

THREADS = 640
DEPTH = 256
WEIGHT_BYTES = 4 * (8192 + 1024)
"""Of a stage: four blocks of 64 rows x 256 codes, and their scales."""

MOST_SHARED = 227 << 10


@dataclass(frozen=True)
class Form:
    """One compiled form of `decode_codes.cu`."""

    rows: int  # of a slot that one pass over its weights serves: 8, 16, 24 or 32
    bias: bool = False
    limited: bool = False
    out: torch.dtype = torch.bfloat16

    @property
    def _fixed(self) -> int:
        """Bytes of shared memory beside the ring: exchanged sums, the list of slots, two words."""
        return 512 * self.rows * 2 + MOST_SLOTS * 4 + 16

    @property
    def _stage(self) -> int:
        """Bytes of a stage, what it says of its tile and its barriers included."""
        return self.rows * DEPTH * 2 + WEIGHT_BYTES + 32 + 16

    @property
    def stages(self) -> int:
        """As many as there is room for, up to five: more of them bring nothing."""
        return min(5, (MOST_SHARED - self._fixed) // self._stage)

    @property
    def shared(self) -> int:
        """Bytes of shared memory."""
        return self._fixed + self.stages * self._stage

    @property
    def options(self) -> tuple[str, ...]:
        """What `decode_codes.cu` is told."""
        flags = {"ROWS": self.rows, "STAGES": self.stages, "BIAS": self.bias, "LIMITED": self.limited}
        return defined(flags | {"OUT": OUTS[self.out]})


def form_for(spec: KernelSpec, batch: ExpertBatch) -> Form:
    """How the kernel computes `batch`."""
    shape = spec.shape
    rows = next(rows for most, rows in ROWS if batch.rows_a_slot <= most)
    return Form(rows, bias=shape.bias, limited=shape.activation.limit is not None, out=spec.out_dtype)


def step(form: Form, x: Tensor, batch: ExpertBatch, sides: Sequence[Weights], shape: ExpertShape) -> Tensor:
    """`[R, H]` of `form.out`: rows `x [R, H]` bf16 through gate and up `sides[0]`, and down `sides[1]`.

    Rows outside the slots' segments are not written. Nothing is read on the host.
    """
    rows, device = x.shape[0], x.device
    inner = torch.empty((rows, shape.inner), dtype=torch.bfloat16, device=device)
    out = torch.empty((rows, shape.hidden), dtype=form.out, device=device)
    arguments: list[Argument] = [tensor_map(x, (8, 64)), tensor_map(inner, (8, 64))]
    for side in sides:
        assert side.scale is not None
        arguments += [side.codes, side.scale]
    for side in sides:
        arguments += [side.row_scale, side.row_scale if side.bias is None else side.bias]
    arguments += [batch.counts, batch.offsets, inner, out, _made(device)]
    arguments += [batch.slots, shape.hidden, shape.inner, *numbers(shape.activation)]
    function = _function(form)
    blocks = CLUSTER * resident_clusters(function, Block(THREADS, form.shared))
    function.launch(blocks, THREADS, arguments, shared=form.shared, cluster=CLUSTER, cooperative=True)
    return out


@cache
def _function(form: Form) -> Function:
    return Program(source(*SOURCES), form.options).function("decode_codes")


@cache
def _made(device: torch.device) -> Tensor:
    """Counts that a launch keeps and its last block clears: blocks that are through, and by slot inner rows.

    One serves all launches of a device: a block takes a whole multiprocessor and a launch all of them, so
    that two launches never run at once.
    """
    return torch.zeros(1 + MOST_SLOTS, dtype=torch.int32, device=device)
