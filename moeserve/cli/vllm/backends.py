"""The tables of vLLM's expert backends: every member of its enums, and every name `--moe-backend` takes.

A member maps to the kernel of `KERNELS` that computes the same here, or says why none does. The names are
those of vLLM's releases of 2026; what only some of them have is listed as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from moeserve.quant.format import Scheme
from moeserve.quant.formats.floats import FLOATS


class VllmFamily(Enum):
    """The kinds of experts that vLLM chooses a backend for; vLLM has an enum for each."""

    UNQUANTIZED = "unquantized"
    FP8 = "FP8"
    MXFP8 = "MXFP8"
    NVFP4 = "NVFP4"
    MXFP4 = "MXFP4"
    WNA16 = "WNA16"
    INT8 = "INT8"
    W4A8_FP8 = "W4A8-FP8"
    W4A8_INT8 = "W4A8-INT8"


def family_of(scheme: Scheme) -> VllmFamily | None:
    """Returns vLLM's family of a scheme; None for a number format that vLLM has no family for."""
    weights, plain = scheme.weights.name, scheme.activations in FLOATS.values()
    if scheme.weights in FLOATS.values():
        return VllmFamily.UNQUANTIZED
    if weights.startswith("int4") and scheme.activations.name.startswith("fp8"):
        return VllmFamily.W4A8_FP8
    if weights.startswith("int4"):
        return VllmFamily.WNA16 if plain else VllmFamily.W4A8_INT8
    if weights.startswith("int8"):
        return VllmFamily.WNA16 if plain else VllmFamily.INT8
    if weights.startswith(("mxfp6", "mxint8")):
        return VllmFamily.MXFP4  # OCP MX has one enum there
    return next((family for family in VllmFamily if weights.startswith(family.value.lower())), None)


@dataclass(frozen=True)
class VllmMember:
    """One member of an enum of vLLM, and the entry of `KERNELS` that corresponds to it."""

    family: VllmFamily
    name: str
    classes: str  # what computes it there, tried in this order
    kernel: str = ""  # empty: `note` says why
    note: str = ""
    plain: bool = False  # leaves activations as they are, whatever the checkpoint says


@dataclass(frozen=True)
class MoeBackend:
    """One name of vLLM's `--moe-backend`: the members that it asks for, by family."""

    name: str
    members: Mapping[VllmFamily, tuple[str, ...]] = field(default_factory=dict)
    device: str = "auto"  # `plan.device`
    note: str = ""  # of the name as a whole; the reason where it has no members


AUTO_MEMBER = "auto"
"""As a member of a `MoeBackend`: the name leaves the choice to the plan."""

AITER_METHODS = "a static scale for all experts (method 1): no entry here; other kinds by their methods"
AITER_W4A16 = "not built: AITER's kernel for bf16 rows, which has one activation, gpt-oss' own"
AITER_W4A8 = "no kernel: AITER's rounds rows with one static scale for all experts"
AITER_MX8 = "not built: AITER's MXFP8 experts, which the package flydsl compiles (gfx950)"
B12X = "not built: FlashInfer's B12x kernels (SM120)"
BLACKWELL = "on Blackwell"
CUTLASS_FP8 = "static scales; 128x128 blocks on Hopper"
DEEP_GEMM_FP8 = "128x128 blocks on Hopper; on Blackwell those whose scales are powers of two"
HUMMING = "not built: the package humming"
INTEGERS = "INT4 and INT8 weights decoded in the kernel"
MXINT4 = "no kernel: theirs reads scales in BF16, which would round a checkpoint's"
ONE_INNER_SCALE = "BF16 rows, or NVFP4 rows where all experts round what is between the GEMMs by one scale"
OWN = "no kernel: theirs is compiled into vLLM, and no package has it alone"
OWN_BATCHED = f"{OWN} (padded rows: triton_dequant)"
PLUG_IN = "no kernel: there it stands for what a plug-in brings"
XPU = "not built: Intel GPUs are no machine of a plan yet"
REFERENCE = "decodes weights and rounds activations by the formats' own formulas, in float32"
ON_CPU = "weights are decoded by the reference (those AMX kernels are compiled into vLLM)"
PADDED = "takes padded rows too, so there is no batched twin"
NO_CHOICE = "no kernel: nothing was chosen, which is an error here, with every reason"

_FP8_BLOCKS = "128x128 blocks on Hopper (per-tensor and per-channel weights: triton_dequant)"
_SAME_PACKAGE = "the same package; on Hopper our own cuda_fp4 is as fast with few rows, and faster with many"
_ROW_WISE = "scales a row and a token, by torch's own CUTLASS kernel, on Hopper and Blackwell"
_MARLIN4 = "four-bit weights decoded in the kernel, on Hopper"
_MARLIN8 = "8-bit weights decoded in the kernel"


def _unquantized() -> tuple[VllmMember, ...]:
    kind = VllmFamily.UNQUANTIZED
    return (
        VllmMember(
            kind, "FLASHINFER_TRTLLM", "TrtLlmBf16 monolithic, modular", "flashinfer_trtllm", BLACKWELL
        ),
        VllmMember(
            kind, "FLASHINFER_CUTLASS", "FlashInferExperts", "flashinfer_cutlass", "on Hopper and Blackwell"
        ),
        VllmMember(kind, "AITER", "AiterExperts", "aiter", "gated activations"),
        VllmMember(kind, "TRITON", "TritonExperts", "triton_bf16", "on Hopper"),
        VllmMember(kind, "BATCHED_TRITON", "BatchedTritonExperts", "triton_bf16", PADDED),
        VllmMember(kind, "XPU", "XPUExperts", note=XPU),
        VllmMember(
            kind,
            "CPU",
            "CPUUnquantized x86, Arm, portable",
            "torch_grouped_mm",
            "on any CPU, by AMX where it has it",
        ),
        VllmMember(kind, "TPU", "none", note=PLUG_IN),
        VllmMember(kind, "OOT", "none", note=PLUG_IN),
    )


def _fp8() -> tuple[VllmMember, ...]:
    kind = VllmFamily.FP8
    return (
        VllmMember(kind, "NONE", "none", note=NO_CHOICE),
        VllmMember(kind, "AITER", "AiterExperts", "aiter", AITER_METHODS),
        VllmMember(
            kind, "FLASHINFER_TRTLLM", "TrtLlmFp8 monolithic, modular", "flashinfer_trtllm", BLACKWELL
        ),
        VllmMember(kind, "FLASHINFER_CUTLASS", "FlashInferExperts", "flashinfer_cutlass", CUTLASS_FP8),
        VllmMember(kind, "DEEPGEMM", "TritonOrDeepGemmExperts", "deep_gemm", DEEP_GEMM_FP8),
        VllmMember(kind, "BATCHED_DEEPGEMM", "BatchedDeepGemmExperts", "deep_gemm", PADDED),
        VllmMember(kind, "VLLM_CUTLASS", "TritonOrCutlassExperts", "torch_scaled_grouped_mm", _ROW_WISE),
        VllmMember(kind, "BATCHED_VLLM_CUTLASS", "CutlassBatchedExpertsFp8", note=OWN_BATCHED),
        VllmMember(kind, "TRITON", "TritonExperts", "triton_fp8", _FP8_BLOCKS),
        VllmMember(kind, "BATCHED_TRITON", "BatchedTritonExperts", "triton_fp8", f"{_FP8_BLOCKS}, {PADDED}"),
        VllmMember(kind, "MARLIN", "MarlinExperts", "triton_dequant", _MARLIN8, plain=True),
        VllmMember(kind, "HUMMING", "Humming indexed, grouped", note=HUMMING),
        VllmMember(kind, "XPU", "XPUExperts Fp8, MxFp8, BlockFp8", note=XPU),
        VllmMember(kind, "CPU", "CPUExpertsFp8", "torch_reference", ON_CPU),
        VllmMember(kind, "HPC", "HPCExperts", note="not built: the package hpc"),
    )


def _mxfp8() -> tuple[VllmMember, ...]:
    kind = VllmFamily.MXFP8
    return (
        VllmMember(
            kind, "FLASHINFER_TRTLLM", "TrtLlmFp8 monolithic, modular", "flashinfer_trtllm", BLACKWELL
        ),
        VllmMember(kind, "DEEPGEMM", "DeepGemmExperts", "deep_gemm", BLACKWELL),
        VllmMember(kind, "MARLIN", "MarlinExperts", "triton_dequant", _MARLIN8, plain=True),
        VllmMember(kind, "XPU", "XPUExpertsMxFp8", note=XPU),
        VllmMember(kind, "AITER_MXFP8", "AiterMxfp8Experts", note=AITER_MX8),
        VllmMember(kind, "HUMMING", "Humming indexed, grouped", note=HUMMING),
        VllmMember(kind, "TRITON_MXFP8", "Mxfp8NativeTriton", note="not built: MX instructions of gfx950"),
        VllmMember(kind, "EMULATION", "Mxfp8Emulation", "torch_reference", REFERENCE),
    )


def _nvfp4() -> tuple[VllmMember, ...]:
    kind = VllmFamily.NVFP4
    return (
        VllmMember(
            kind, "FLASHINFER_TRTLLM", "TrtLlmNvFp4 monolithic, modular", "flashinfer_trtllm", BLACKWELL
        ),
        VllmMember(
            kind, "FLASHINFER_CUTEDSL", "FlashInferCuteDSLExperts", "flashinfer_cutedsl", ONE_INNER_SCALE
        ),
        VllmMember(
            kind,
            "FLASHINFER_CUTEDSL_BATCHED",
            "FlashInferCuteDSLBatchedExperts",
            "flashinfer_cutedsl",
            PADDED,
        ),
        VllmMember(kind, "FLASHINFER_CUTLASS", "FlashInferExperts", "flashinfer_cutlass", BLACKWELL),
        VllmMember(kind, "FLASHINFER_B12X", "FlashInferB12xExperts", note=B12X),
        VllmMember(kind, "VLLM_CUTLASS", "CutlassExpertsFp4", note=OWN),
        VllmMember(kind, "MARLIN", "MarlinExperts", "cuda_fp4", _MARLIN4, plain=True),
        VllmMember(kind, "HUMMING", "Humming indexed, grouped, batched", note=HUMMING),
        VllmMember(kind, "EMULATION", "Nvfp4QuantizationEmulationTriton", "torch_reference", REFERENCE),
    )


def _mxfp4() -> tuple[VllmMember, ...]:
    kind, trtllm, cutlass = VllmFamily.MXFP4, "TrtLlmMxfp4 monolithic, modular", "FlashInferExperts"
    return (
        VllmMember(kind, "NONE", "none", note=NO_CHOICE),
        VllmMember(kind, "FLASHINFER_TRTLLM_MXFP4_BF16", trtllm, "flashinfer_trtllm", BLACKWELL),
        VllmMember(kind, "FLASHINFER_TRTLLM_MXFP4_MXFP8", trtllm, "flashinfer_trtllm", BLACKWELL),
        VllmMember(kind, "FLASHINFER_CUTLASS_MXFP4_BF16", cutlass, "flashinfer_cutlass", "on Hopper"),
        VllmMember(kind, "FLASHINFER_CUTLASS_MXFP4_MXFP8", cutlass, "flashinfer_cutlass", BLACKWELL),
        VllmMember(kind, "AITER_MXFP4_BF16", "AiterExperts, AiterW4A16", note=AITER_W4A16),
        VllmMember(kind, "AITER_MXFP4_FP8", "AiterW4A8", note=AITER_W4A8),
        VllmMember(kind, "AITER_MXFP4_MXFP4", "AiterExperts", "aiter", "on gfx950"),
        VllmMember(kind, "TRITON", "OAITriton monolithic, OAITritonExperts", "triton_kernels", _SAME_PACKAGE),
        VllmMember(kind, "TRITON_UNFUSED", "UnfusedOAITritonExperts", "triton_kernels", _SAME_PACKAGE),
        VllmMember(kind, "DEEPGEMM_MXFP4", "DeepGemmFP4Experts", "deep_gemm", "MXFP8 rows, on Blackwell"),
        VllmMember(kind, "MARLIN", "MarlinExperts", "cuda_fp4", _MARLIN4, plain=True),
        VllmMember(kind, "BATCHED_MARLIN", "BatchedMarlinExperts", "cuda_fp4", PADDED, plain=True),
        VllmMember(kind, "HUMMING", "Humming indexed, grouped, batched", note=HUMMING),
        VllmMember(kind, "XPU", "XPUExpertsMxFp4", note=XPU),
        VllmMember(kind, "CPU", "CPUExpertsMxfp4", "torch_reference", ON_CPU),
        VllmMember(kind, "EMULATION", "OCP_MXQuantizationEmulationTriton", "torch_reference", REFERENCE),
        VllmMember(kind, "CK", "AiterExperts", "aiter", "MXFP4 rows, on gfx950"),
        VllmMember(kind, "SM100_FI_MXFP4_MXFP8_TRTLLM", trtllm, "flashinfer_trtllm", BLACKWELL),
        VllmMember(kind, "SM100_FI_MXFP4_MXFP8_CUTLASS", cutlass, "flashinfer_cutlass", BLACKWELL),
        VllmMember(kind, "SM100_FI_MXFP4_BF16", trtllm, "flashinfer_trtllm", BLACKWELL),
        VllmMember(kind, "SM90_FI_MXFP4_BF16", cutlass, "flashinfer_cutlass", "on Hopper"),
    )


def _integers() -> tuple[VllmMember, ...]:
    kind, int8, humming = VllmFamily.WNA16, VllmFamily.INT8, "Humming indexed, grouped, batched"
    return (
        VllmMember(kind, "FLASHINFER_TRTLLM", "TrtLlmMxint4 monolithic", note=MXINT4),
        VllmMember(kind, "MARLIN", "MarlinExperts", "triton_dequant", INTEGERS, plain=True),
        VllmMember(kind, "BATCHED_MARLIN", "BatchedMarlinExperts", "triton_dequant", PADDED, plain=True),
        VllmMember(kind, "TRITON", "TritonWNA16Experts", "triton_dequant", INTEGERS),
        VllmMember(kind, "HUMMING", humming, note=HUMMING),
        VllmMember(kind, "CPU", "CPUExpertsInt4", "torch_reference", ON_CPU),
        VllmMember(kind, "XPU", "XPUExpertsWNA16", note=XPU),
        VllmMember(kind, "EMULATION", "Int4EmulationTriton", "torch_reference", f"{REFERENCE}, INT8 too"),
        VllmMember(int8, "TRITON", "TritonExperts", "triton_dequant", "products of int8 codes"),
        VllmMember(int8, "HUMMING", humming, note=HUMMING),
        VllmMember(int8, "CPU", "CPUExpertsInt8 Arm, x86", "torch_reference", ON_CPU),
        VllmMember(VllmFamily.W4A8_FP8, "VLLM_CUTLASS", "CutlassExpertsW4A8Fp8", note=OWN),
        VllmMember(VllmFamily.W4A8_INT8, "CPU", "CPUExpertsInt4 Arm", "torch_reference", ON_CPU),
    )


MEMBERS: dict[tuple[VllmFamily, str], VllmMember] = {
    (member.family, member.name): member
    for member in (*_unquantized(), *_fp8(), *_mxfp8(), *_nvfp4(), *_mxfp4(), *_integers())
}
"""The table of members, by family and name."""

_U, _F8, _M8, _N4, _M4, _W, _I8 = list(VllmFamily)[:7]
_TRT4 = ("FLASHINFER_TRTLLM_MXFP4_BF16", "FLASHINFER_TRTLLM_MXFP4_MXFP8")
_CUT4 = ("FLASHINFER_CUTLASS_MXFP4_BF16", "FLASHINFER_CUTLASS_MXFP4_MXFP8")
_AITER4 = ("AITER_MXFP4_BF16", "AITER_MXFP4_FP8", "AITER_MXFP4_MXFP4")
_ANY = dict.fromkeys(VllmFamily, (AUTO_MEMBER,))


def _same(member: str, *families: VllmFamily) -> dict[VllmFamily, tuple[str, ...]]:
    return dict.fromkeys(families, (member,))


MOE_BACKENDS: dict[str, MoeBackend] = {
    backend.name: backend
    for backend in (
        MoeBackend("auto", _ANY),
        MoeBackend(
            "triton",
            _same("TRITON", _U, _F8, _M4, _W, _I8) | {_M8: ("TRITON_MXFP8",)},
            note="there is one kernel for batched and other dispatchers",
        ),
        MoeBackend("batched_triton", _same("BATCHED_TRITON", _U)),
        MoeBackend("triton_unfused", _same("TRITON_UNFUSED", _M4)),
        MoeBackend("deep_gemm", _same("DEEPGEMM", _F8, _M8) | {_M4: ("DEEPGEMM_MXFP4",)}),
        MoeBackend(
            "deep_gemm_mega_moe",
            note="not built: one kernel that both carries rows and computes",
        ),
        MoeBackend("cutlass", _same("VLLM_CUTLASS", _F8, _N4)),
        MoeBackend("flashinfer_trtllm", _same("FLASHINFER_TRTLLM", _U, _F8, _M8, _N4, _W) | {_M4: _TRT4}),
        MoeBackend("flashinfer_cutlass", _same("FLASHINFER_CUTLASS", _U, _F8, _N4) | {_M4: _CUT4}),
        MoeBackend("flashinfer_trtllm_afp8", _same(_TRT4[1], _M4)),
        MoeBackend("flashinfer_cutlass_afp8", _same(_CUT4[1], _M4)),
        MoeBackend("flashinfer_cutedsl", {_N4: ("FLASHINFER_CUTEDSL", "FLASHINFER_CUTEDSL_BATCHED")}),
        MoeBackend("flashinfer_b12x", _same("FLASHINFER_B12X", _N4)),
        MoeBackend("marlin", _same("MARLIN", _F8, _M8, _N4, _W) | {_M4: ("MARLIN", "BATCHED_MARLIN")}),
        MoeBackend("humming", _same("HUMMING", _F8, _M8, _N4, _M4, _W, _I8) | {_U: (AUTO_MEMBER,)}),
        MoeBackend("aiter", _same("AITER", _U, _F8) | {_M8: ("AITER_MXFP8",), _M4: _AITER4}),
        MoeBackend("aiter_mxfp4_fp8", _same("AITER_MXFP4_FP8", _M4)),
        MoeBackend("aiter_mxfp4_mxfp4", _same("AITER_MXFP4_MXFP4", _M4)),
        MoeBackend("flydsl", note="not built: a package of ROCm kernels"),
        MoeBackend("xpu", _same("XPU", _M8, _M4)),
        MoeBackend("cpu", _same("CPU", _M4), device="cpu"),
        MoeBackend("hpc", _same("HPC", _F8)),
        MoeBackend("emulation", _same("EMULATION", _N4, _M4, _W)),
    )
}
"""The table of names that `--moe-backend` takes."""
