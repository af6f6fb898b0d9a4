"""A step of some rows a slot on four-bit weights in one launch. Its text is in `text/decode_codes`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import inf

import torch
from torch import Tensor

from moeserve.device.arguments import Argument, Arguments
from moeserve.device.nvrtc import Function, Program, tensor_map
from moeserve.device.source import Part
from moeserve.device.streams import TRACKS, at_once, spared, track
from moeserve.device.waits import FIELDS, grid_wait
from moeserve.experts.batch import ExpertBatch, ExpertShape
from moeserve.experts.kernel import KernelSpec
from moeserve.experts.kernels.cuda.prefill_codes import PrefillCodesWeights
from moeserve.experts.kernels.cuda.steps import (
    CLUSTER,
    NUMBERS,
    OUTS,
    Block,
    defined,
    numbers,
    resident_clusters,
    source,
)

PARTS = ("task", "work", "copies", "products", "sums", "step")

ARGUMENTS = Arguments(
    "DecodeArguments",
    x="TensorMap",  # rows [R, H] bf16
    inner="TensorMap",  # inner rows [R, I] bf16
    gate_up="const u8*",  # [e, blocks of 64 rows, pieces of 256, CODE_BYTES]
    gate_up_scales="const u8*",  # [e, blocks, pieces, SCALE_BYTES]
    gate_up_scale="const float*",  # [e, n]
    gate_up_bias="const float*?",  # [e, n]
    down="const u8*",
    down_scales="const u8*",
    down_scale="const float*",
    down_bias="const float*?",
    counts="const int*",
    offsets="const int*",
    inner_rows="u16*",  # [R, I] bf16
    out="void*",  # [R, H]
    made="u32*",  # blocks that are through, then by slot its parts of inner rows; zero between launches
    slots="int",
    hidden="int",  # H
    inner_size="int",  # I
    **FIELDS,
    **NUMBERS,
)

SOURCES: tuple[Part, ...] = (
    "codes.cu",
    "waits.cu",
    ARGUMENTS,
    *(f"decode_codes/{part}.cu" for part in PARTS),
)

MOST_SLOTS = 512
"""The most slots that the list in shared memory has room for."""

INNER_MULTIPLE = 64
"""What the inner size must be a multiple of: a block of 64 rows of weights is gate's or up's."""

ROWS = ((6.0, 16), (inf, 24))
"""Likely rows of a slot up to which so many at once read weights least often."""

THREADS = 640
DEPTH = 256
WEIGHT_BYTES = 4 * (8192 + 1024)
"""Bytes of weights in a stage: four blocks of 64 rows x 256 codes, and their scales."""

MOST_SHARED = 227 << 10


@dataclass(frozen=True)
class DecodeForm:
    """One compiled form of the kernel."""

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
        """How many stages there is room for, up to five: more bring nothing."""
        return min(5, (MOST_SHARED - self._fixed) // self._stage)

    @property
    def shared(self) -> int:
        """How many bytes of shared memory a block needs."""
        return self._fixed + self.stages * self._stage

    @property
    def options(self) -> tuple[str, ...]:
        """The compiler's options for this form."""
        flags = {"ROWS": self.rows, "STAGES": self.stages, "BIAS": self.bias, "LIMITED": self.limited}
        return defined(flags | {"OUT": OUTS[self.out]})


def form_for(spec: KernelSpec, batch: ExpertBatch) -> DecodeForm:
    """How the kernel computes `batch`."""
    shape = spec.shape
    rows = next(rows for most, rows in ROWS if batch.rows_a_slot <= most)
    return DecodeForm(rows, bias=shape.bias, limited=shape.activation.limit is not None, out=spec.out_dtype)


def step(
    form: DecodeForm, x: Tensor, batch: ExpertBatch, sides: Sequence[PrefillCodesWeights], shape: ExpertShape
) -> Tensor:
    """`[R, H]` of `form.out`: rows `x [R, H]` bf16 through gate and up `sides[0]`, and down `sides[1]`.

    Rows outside the slots' segments are not written. Nothing is read on the host. RuntimeError: blocks of an
    earlier launch waited in vain for others.
    """
    rows, device = x.shape[0], x.device
    wait = grid_wait("decode_codes", device)
    wait.check()
    inner = torch.empty((rows, shape.inner), dtype=torch.bfloat16, device=device)
    out = torch.empty((rows, shape.hidden), dtype=form.out, device=device)
    gate_up, down = sides
    given: dict[str, Argument] = {
        "x": tensor_map(x, (8, 64)),
        "inner": tensor_map(inner, (8, 64)),
        "gate_up": gate_up.codes,
        "gate_up_scales": gate_up.scale,
        "gate_up_scale": gate_up.row_scale,
        "gate_up_bias": gate_up.bias,
        "down": down.codes,
        "down_scales": down.scale,
        "down_scale": down.row_scale,
        "down_bias": down.bias,
        "counts": batch.counts,
        "offsets": batch.offsets,
        "inner_rows": inner,
        "out": out,
        "made": _made(device)[track()],
        "slots": batch.slots,
        "hidden": shape.hidden,
        "inner_size": shape.inner,
        **wait.arguments(),
        **numbers(shape.activation),
    }
    function = _function(form)
    blocks = CLUSTER * max(1, resident_clusters(function, Block(THREADS, form.shared)) - spared())
    function.launch(blocks, THREADS, given, shared=form.shared, cluster=CLUSTER, cooperative=at_once())
    return out


@cache
def _function(form: DecodeForm) -> Function:
    return Program(source(*SOURCES), form.options).function("decode_codes", ARGUMENTS)


@cache
def _made(device: torch.device) -> tuple[Tensor, ...]:
    """Counts that a launch keeps and its last block clears: blocks that are through, and by slot inner rows;
    by track.

    One serves all launches of a track of a device, which never run at once.
    """
    return tuple(torch.zeros(1 + MOST_SLOTS, dtype=torch.int32, device=device) for _ in TRACKS)
