"""A step of many rows on Hopper, launched: its groups of rows, and the two GEMMs of `prefill.cu`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor

from moeserve.experts.activation import Activation
from moeserve.experts.batch import ExpertBatch
from moeserve.experts.nvrtc import Argument, Function, Program, tensor_map

UNIT, DEPTH = 64, 128
ROWS_THREADS = 512

GROUP_ROWS = 192
"""Most rows of one slot that a cluster works on at once."""

THREADS, SHARED_BYTES = 512, 172960
CLUSTER = 2
"""Blocks that share rows, each with 128 rows of the weights of its own."""

FUSED_ACTIVATIONS = frozenset({"silu", "swigluoai", "swigluoai_uninterleave"})
"""What the first GEMM activates itself: gate x sigmoid(alpha gate) x (up + beta), both halves limited."""

OUTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@dataclass(frozen=True)
class Rows:
    """E4M3 codes `[R, K]`, and their scales `[groups, K / 128, 192]` float32, by row of a group."""

    codes: Tensor
    scale: Tensor


@dataclass(frozen=True)
class Weights:
    """One side's weights: E4M3 codes `[e, N, K]`, scales of 128x128, and biases `[e, N]` if any."""

    codes: Tensor
    scale: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class Form:
    """One compiled form of `prefill.cu`: with an activation fused, or with an output dtype."""

    bias: bool
    fused: bool = False
    limited: bool = False
    out: int = 0

    @property
    def columns(self) -> int:
        """Columns of the output that a cluster computes."""
        return CLUSTER * (64 if self.fused else 128)


@dataclass(frozen=True)
class Step:
    """A batch cut into groups of at most 192 rows of one slot; nothing is read on the host."""

    batch: ExpertBatch
    capacity: int  # rows of the batch, PADDED ones flat

    @property
    def limit(self) -> int:
        """Most groups there can be."""
        return most_groups(self.batch, self.capacity, GROUP_ROWS)

    @cached_property
    def tiles(self) -> Tensor:
        """The list of groups, `[4 + 4 limit]` int32, as `prefill_rows.cu` writes it."""
        return list_groups(self.batch, self.limit, (UNIT, GROUP_ROWS))

    def rows(self, codes: Tensor, scale: Tensor) -> Rows:
        """Rows `codes [R, K]` and `scale [R, K / 128]`, of any strides, as the GEMM reads them."""
        blocks = scale.shape[1]
        grouped = self._scale_storage(blocks)
        given: list[Argument] = [scale, grouped, self.tiles, blocks, *scale.stride()]
        function = _rows_function("group_scales", (UNIT, GROUP_ROWS))
        function.launch(self.limit, ROWS_THREADS, given)
        return Rows(codes, grouped)

    def gate_up(self, x: Rows, weights: Weights, activation: Activation, inner: int) -> Rows:
        """Rows `[R, inner]` after the first GEMM and an activation of `FUSED_ACTIVATIONS`, rounded again."""
        codes = torch.empty((self.capacity, inner), dtype=torch.float8_e4m3fn, device=x.codes.device)
        inner_rows = Rows(codes, self._scale_storage(-(-inner // DEPTH)))
        limited = activation.limit is not None
        form = Form(bias=weights.bias is not None, fused=True, limited=limited)
        self._launch(form, (x, weights), inner_rows, numbers(activation))
        return inner_rows

    def down(self, x: Rows, weights: Weights, hidden: int, out_dtype: torch.dtype) -> Tensor:
        """`[R, hidden]`: rows times their slot's weights, plus the bias; other rows are not written."""
        out = torch.empty((self.capacity, hidden), dtype=out_dtype, device=x.codes.device)
        form = Form(bias=weights.bias is not None, out=OUTS[out_dtype])
        self._launch(form, (x, weights), Rows(out, x.scale), (0.0, 0.0, 0.0))
        return out

    def _scale_storage(self, blocks: int) -> Tensor:
        size = (self.limit, blocks, GROUP_ROWS)
        return torch.empty(size, dtype=torch.float32, device=self.batch.counts.device)

    def _launch(
        self, form: Form, given: tuple[Rows, Weights], out: Rows, numbers: tuple[float, float, float]
    ) -> None:
        x, weights = given
        n, codes = out.codes.shape[1], weights.codes
        arguments: tuple[Argument, ...] = (
            tensor_map(x.codes.view(torch.uint8), (UNIT, DEPTH)),
            x.scale,
            tensor_map(codes.view(torch.uint8).view(-1, codes.shape[-1]), (UNIT, DEPTH)),
            weights.scale,
            weights.scale if weights.bias is None else weights.bias,
            out.codes,
            out.scale,
            self.tiles,
            n,
            -(-x.codes.shape[1] // DEPTH),
            *numbers,
        )
        function = _function(form)
        resident = resident_clusters(function, THREADS, SHARED_BYTES)
        clusters = min(resident, self.limit * -(-n // form.columns))
        function.launch(clusters * CLUSTER, THREADS, arguments, shared=SHARED_BYTES, cluster=CLUSTER)


def most_groups(batch: ExpertBatch, capacity: int, group_rows: int) -> int:
    """Most groups of at most `group_rows` rows of one slot that `capacity` rows can make."""
    return min(batch.slots, capacity) + capacity // group_rows


def list_groups(batch: ExpertBatch, limit: int, cut: tuple[int, int]) -> Tensor:
    """The groups of `batch`, `[4 + 4 limit]` int32; `cut` has the rows of a unit and the most of a group."""
    tiles = torch.empty(4 + 4 * limit, dtype=torch.int32, device=batch.counts.device)
    given = (batch.counts, batch.offsets, batch.slots, tiles)
    _rows_function("list_groups", cut).launch(1, ROWS_THREADS, given)
    return tiles


def numbers(activation: Activation) -> tuple[float, float, float]:
    """Limit, alpha and beta of the fused form."""
    limit, alpha, beta = activation.limit, activation.alpha, activation.beta
    return float(limit or 0.0), 1.0 if alpha is None else float(alpha), float(beta or 0.0)


def source(name: str) -> str:
    """The text of `prefill.cu` or `prefill_rows.cu`, what they share before it."""
    folder = files(__package__)
    return (folder / "hopper.cu").read_text() + (folder / name).read_text()


def options(form: Form) -> tuple[str, ...]:
    """What `prefill.cu` is told of a form."""
    flags = {
        "CLUSTER": CLUSTER,
        "FUSED": int(form.fused),
        "BIAS": int(form.bias),
        "LIMITED": int(form.limited),
        "OUT": form.out,
    }
    return tuple(f"-D{name}={value}" for name, value in flags.items())


@cache
def _function(form: Form) -> Function:
    return Program(source("prefill.cu"), options(form)).function("prefill")


@cache
def _rows_function(name: str, cut: tuple[int, int]) -> Function:
    unit, group_rows = cut
    options = (f"-DUNIT={unit}", f"-DUNITS={group_rows // unit}")
    return Program(source("prefill_rows.cu"), options).function(name)


@cache
def resident_clusters(function: Function, threads: int, shared: int) -> int:
    """Clusters that the device runs at once: not all its multiprocessors can be of one.

    Raises RuntimeError where it runs none.
    """
    from cuda.bindings import driver

    function.resident_blocks(threads, shared)  # allows so much shared memory
    size: Any = driver.CUlaunchAttribute()
    size.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    size.value.clusterDim.x, size.value.clusterDim.y, size.value.clusterDim.z = CLUSTER, 1, 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = CLUSTER, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes, config.attrs, config.numAttrs = shared, [size], 1
    status, clusters = driver.cuOccupancyMaxActiveClusters(function.handle, config)
    if status != driver.CUresult.CUDA_SUCCESS or clusters < 1:
        raise RuntimeError(f"no cluster of {CLUSTER} blocks with {shared} bytes each runs here: {status}")
    return int(clusters)
