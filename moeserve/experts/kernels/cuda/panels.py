"""Weights as our CUDA C++ kernels read them: in panels of 64 rows by 128 bytes of K, each in one piece.

A box of rows as a checkpoint has them touches as many pages of memory as it has rows, and reading weights is
most of what a step of few rows does: from panels an H200 reads them 4 % faster.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moeserve.device.arguments import TensorMap
from moeserve.device.nvrtc import LaunchError, mapped, tensor_map

ROWS, BYTES, EIGHT = 64, 128, 8
"""Rows of a panel, bytes of each; gate and up rows alternate by so many in shared memory."""


def panels(weights: Tensor, sides: int = 1) -> Tensor:
    """`weights [e, sides * N, K]` as `[e, sides, N / 64, K / w, 64, w]`, where w elements are 128 bytes.

    Each side's rows and K are rounded up, with zeros past them.
    """
    if weights.itemsize == 1:
        weights = weights.view(torch.uint8)
    slots, rows, k = weights.shape
    own, width = rows // sides, BYTES // weights.itemsize
    down, across = -(-own // ROWS), -(-k // width)
    whole = weights.view(slots, sides, own, k)
    if (own, k) != (down * ROWS, across * width):
        whole = weights.new_zeros(slots, sides, down * ROWS, across * width)
        whole[:, :, :own, :k] = weights.view(slots, sides, own, k)
    return whole.view(slots, sides, down, ROWS, across, width).transpose(3, 4).contiguous()


def map_of(packed: Tensor) -> TensorMap:
    """Panels `packed` as one matrix of their rows, a panel a box."""
    return tensor_map(packed.view(torch.uint8).view(-1, BYTES), (ROWS, BYTES), dense=True)


def map_by_eights(packed: Tensor, slabs: int) -> TensorMap:
    """Panels `packed` of gate and up in boxes of `slabs` times eight gate rows and their up rows.

    Coordinates: 0, 0, 0, eights of a panel, panel of a gate. Raises LaunchError for the driver's refusal.
    """
    from cuda.bindings import driver

    slots, sides, down, across, rows, _ = packed.shape
    panel, side = ROWS * BYTES, down * across
    sizes = (BYTES, EIGHT, sides, rows // EIGHT, (slots * sides - 1) * side)
    steps = (BYTES, side * panel, EIGHT * BYTES, panel)
    box = (BYTES, EIGHT, sides, slabs, 1)
    status, made = driver.cuTensorMapEncodeTiled(
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8,
        len(sizes),
        packed.data_ptr(),
        [driver.cuuint64_t(size) for size in sizes],
        [driver.cuuint64_t(step) for step in steps],
        [driver.cuuint32_t(size) for size in box],
        [driver.cuuint32_t(1)] * len(sizes),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_NONE,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status != driver.CUresult.CUDA_SUCCESS:
        raise LaunchError(f"no tensor map of panels {list(packed.shape)} by eights: {status.name}")
    return mapped(made, packed)
