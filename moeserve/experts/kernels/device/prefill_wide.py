"""A step of many bf16 rows on Hopper, launched: its groups of rows, and the GEMMs of `prefill_wide.cu`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

from moeserve.experts.activation import Activation
from moeserve.experts.batch import ExpertBatch
from moeserve.experts.kernels.device import prefill
from moeserve.experts.kernels.device.prefill import CLUSTER, OUTS
from moeserve.experts.nvrtc import Argument, Function, Program, TensorMap, tensor_map

GROUP_ROWS = 256
"""Most rows of one slot that a cluster works on at once."""

UNIT, DEPTH, BOX = 16, 64, 64
"""Rows by which a group is wider or narrower, columns of a step of K, rows of one copy."""

EIGHT = 8
"""Gate and up rows of the weights alternate by so many."""

THREADS, SHARED_BYTES = 384, 196800


@dataclass(frozen=True)
class Weights:
    """One side's weights `[e, N, K]` bf16, and biases `[e, N]` float32 if any."""

    values: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class Form:
    """One compiled form of `prefill_wide.cu`: with an activation fused, or with an output dtype."""

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
    """A batch cut into groups of at most 256 rows of one slot; nothing is read on the host."""

    batch: ExpertBatch
    capacity: int  # rows of the batch, PADDED ones flat

    @property
    def limit(self) -> int:
        """Most groups there can be."""
        return prefill.most_groups(self.batch, self.capacity, GROUP_ROWS)

    @cached_property
    def tiles(self) -> Tensor:
        """The list of groups, `[4 + 4 limit]` int32, as `prefill_rows.cu` writes it."""
        return prefill.list_groups(self.batch, self.limit, (UNIT, GROUP_ROWS))

    def gate_up(self, x: Tensor, weights: Weights, activation: Activation, inner: int) -> Tensor:
        """bf16 `[R, inner]`: rows `x [R, H]` bf16 after the first GEMM and one of `FUSED_ACTIVATIONS`."""
        out = torch.empty((self.capacity, inner), dtype=torch.bfloat16, device=x.device)
        limited = activation.limit is not None
        form = Form(bias=weights.bias is not None, fused=True, limited=limited)
        self._launch(form, (x, weights), out, prefill.numbers(activation))
        return out

    def down(self, x: Tensor, weights: Weights, hidden: int, out_dtype: torch.dtype) -> Tensor:
        """`[R, hidden]`: rows times their slot's weights, plus the bias; other rows are not written."""
        out = torch.empty((self.capacity, hidden), dtype=out_dtype, device=x.device)
        form = Form(bias=weights.bias is not None, out=OUTS[out_dtype])
        self._launch(form, (x, weights), out, (0.0, 0.0, 0.0))
        return out

    def _launch(
        self, form: Form, given: tuple[Tensor, Weights], out: Tensor, numbers: tuple[float, float, float]
    ) -> None:
        x, weights = given
        n, values = out.shape[1], weights.values
        flat = values.view(-1, values.shape[-1])
        arguments: tuple[Argument, ...] = (
            tensor_map(x, (BOX, DEPTH)),
            _by_eights(values) if form.fused else tensor_map(flat, (128, DEPTH)),
            self.tiles if weights.bias is None else weights.bias,  # one that is not there is not read
            out,
            self.tiles,
            n,
            -(-x.shape[1] // DEPTH),
            *numbers,
        )
        function = _function(form)
        resident = prefill.resident_clusters(function, THREADS, SHARED_BYTES)
        clusters = min(resident, self.limit * -(-n // form.columns))
        function.launch(clusters * CLUSTER, THREADS, arguments, shared=SHARED_BYTES, cluster=CLUSTER)


def _by_eights(values: Tensor) -> TensorMap:
    """`values [e, 2I, K]` bf16 in boxes of eight times eight gate rows and their eight up rows.

    Raises RuntimeError for the driver's refusal.
    """
    from cuda.bindings import driver

    slots, rows, k = values.shape
    inner, row = rows // 2, k * values.itemsize
    sizes = (k, EIGHT, 2, inner // EIGHT, slots)
    steps = (row, inner * row, EIGHT * row, rows * row)
    box = (DEPTH, EIGHT, 2, EIGHT, 1)
    status, made = driver.cuTensorMapEncodeTiled(
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        len(sizes),
        values.data_ptr(),
        [driver.cuuint64_t(size) for size in sizes],
        [driver.cuuint64_t(step) for step in steps],
        [driver.cuuint32_t(size) for size in box],
        [driver.cuuint32_t(1)] * len(sizes),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"no tensor map of {list(values.shape)} by eights: {status.name}")
    return TensorMap(made, values)


def options(form: Form) -> tuple[str, ...]:
    """What `prefill_wide.cu` is told of a form."""
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
    return Program(prefill.source("prefill_wide.cu"), options(form)).function("prefill_wide")
