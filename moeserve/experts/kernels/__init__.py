"""The table of expert kernels: one file a backend, one line here; a plan tries them in this order."""

from moeserve.experts.kernel import KernelRow
from moeserve.experts.kernels import torch_grouped_mm, torch_reference

KERNELS: dict[str, KernelRow] = {
    row.name: row
    for row in (
        torch_grouped_mm.ROW,
        torch_reference.ROW,
    )
}
