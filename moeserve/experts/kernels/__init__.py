"""The table of expert kernels: one file a backend, one line here; a plan tries them in this order."""

from moeserve.experts.kernel import KernelRow
from moeserve.experts.kernels import (
    torch_grouped_mm,
    torch_reference,
    triton_bf16,
    triton_dequant,
    triton_fp4,
    triton_fp8,
)

KERNELS: dict[str, KernelRow] = {
    row.name: row
    for row in (
        triton_fp4.ROW,
        triton_fp8.ROW,
        triton_bf16.ROW,
        torch_grouped_mm.ROW,
        triton_dequant.ROW,
        torch_reference.ROW,
    )
}
