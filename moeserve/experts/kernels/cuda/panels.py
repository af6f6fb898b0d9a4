"""Tensor maps of weights in panels, the layout `panels`, as our CUDA C++ kernels read them."""

from __future__ import annotations

import torch
from torch import Tensor

from moeserve.device.arguments import TensorMap
from moeserve.device.nvrtc import LaunchError, mapped, tensor_map
from moeserve.quant.layouts.panels import BYTES, ROWS

EIGHT = 8
"""Gate and up rows alternate by so many in shared memory."""


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
