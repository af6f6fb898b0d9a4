"""The table of expert kernels: one file a backend, one line here; a plan tries them in this order.

Our own Hopper kernels stand first: beside the libraries they are the fastest, or as fast, on the models that
were measured, but for FP8 blocks with thousands of rows a slot, where DeepGEMM's GEMMs are faster; they
want weights in another form, and all kernels of a plan share one. A family's kernels stand together.
Then come the libraries, each where the field's systems try it; what a GPU has no library for, and PADDED rows
that a library does not take, our portable kernel computes. `docs/backends.md` has the times.
"""

from moeserve.experts.kernel import KernelEntry
from moeserve.experts.kernels import (
    aiter,
    cuda_bf16,
    cuda_fp4,
    cuda_fp8,
    cuda_w4a8,
    deep_gemm,
    flashinfer_cutedsl,
    flashinfer_cutlass,
    flashinfer_trtllm,
    torch_grouped_mm,
    torch_reference,
    torch_scaled_grouped_mm,
    triton_bf16,
    triton_dequant,
    triton_fp4,
    triton_fp8,
    triton_kernels,
)

KERNELS: dict[str, KernelEntry] = {
    entry.name: entry
    for entry in (
        *cuda_fp4.ENTRIES,
        triton_fp4.ENTRY,
        *cuda_fp8.ENTRIES,
        cuda_w4a8.ENTRY,
        *cuda_bf16.ENTRIES,
        triton_fp8.ENTRY,
        triton_bf16.ENTRY,
        aiter.ENTRY,
        flashinfer_trtllm.ENTRY,
        torch_grouped_mm.ENTRY,
        triton_kernels.ENTRY,
        flashinfer_cutlass.ENTRY,
        flashinfer_cutedsl.ENTRY,
        deep_gemm.ENTRY,
        torch_scaled_grouped_mm.ENTRY,
        triton_dequant.ENTRY,
        torch_reference.ENTRY,
    )
}

PINS: dict[str, tuple[KernelEntry, ...]] = {
    name: tuple(entry for entry in KERNELS.values() if name in (entry.pinned_as, entry.name))
    for entry in KERNELS.values()
    for name in (entry.pinned_as, entry.name)
}
"""What a configuration may name: a family, for its own kernels, and every kernel by itself."""
