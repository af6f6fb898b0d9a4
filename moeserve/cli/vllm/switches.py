"""The table of vLLM's environment switches about experts, with the keys that do the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from moeserve.cli.vllm.backends import VllmFamily

Value = str | int

GIVEN = "<given>"
"""As a key's value: the number that the switch was set to."""

DISPATCHER = "<dispatcher>"
"""As a key's value: the dispatcher here that the switch's value names."""

WEIGHTS = "<weights>"
"""Within a key's value: the format that the checkpoint's weights are stored in."""

ANY = "*"
"""As an answer's value: whatever the switch is set to."""


@dataclass(frozen=True)
class Here:
    """What one value of a switch means: keys, a name of `MOE_BACKENDS`, or a reason why there is no key."""

    keys: Mapping[str, Value] = field(default_factory=dict)
    why: str = ""  # what the keys do, or why there are none
    backend: str = ""  # the same as this name of `MOE_BACKENDS`


@dataclass(frozen=True)
class Switch:
    """One environment variable of vLLM."""

    name: str
    default: str  # there
    does: str  # there
    answers: Mapping[str, Here]  # by value: `1` and `0` for a flag, its words, or `ANY`
    families: frozenset[VllmFamily] = frozenset(VllmFamily)  # the experts that it concerns
    beside: str = ""  # the switch that must be on as well, by its default where it is not set
    chosen_by: str = ""  # the switch that says which backend this one means, where that is set
    chooses: bool = False  # what it names counts only where a switch that is `chosen_by` it is on

    @property
    def flag(self) -> bool:
        """Whether the switch takes only on and off."""
        return "1" in self.answers


def _flag(on: Here, off: Here) -> dict[str, Here]:
    return {"1": on, "0": off}


def _always(why: str) -> dict[str, Here]:
    return {ANY: Here(why=why)}


def _of(*families: VllmFamily) -> frozenset[VllmFamily]:
    return frozenset(families)


ABSENT = Here(why="nothing to do: no kernel here uses it")
UNCHANGED = Here(why="nothing to do: it is so anyway")
LINEAR = "it is about linear layers, which stay with the model server"
ROUTER = "routing is the model server's, or the layer's gate here when logits are sent"

DEEP_GEMM = (
    Switch(
        "VLLM_USE_DEEP_GEMM",
        "1",
        "lets DeepGEMM compute experts and linear layers",
        _flag(Here(backend="deep_gemm"), ABSENT),
        _of(VllmFamily.FP8, VllmFamily.MXFP8, VllmFamily.MXFP4),
        beside="VLLM_MOE_USE_DEEP_GEMM",
    ),
    Switch(
        "VLLM_MOE_USE_DEEP_GEMM",
        "1",
        "lets DeepGEMM compute experts of FP8 blocks; 0 takes it off the list, 1 insists on it",
        _flag(Here(backend="deep_gemm"), ABSENT),
        _of(VllmFamily.FP8, VllmFamily.MXFP8, VllmFamily.MXFP4),
        beside="VLLM_USE_DEEP_GEMM",
    ),
    Switch(
        "VLLM_USE_DEEP_GEMM_E8M0",
        "1",
        "rounds scales of FP8 blocks to powers of two for DeepGEMM",
        _flag(
            Here(
                why="scales stay as they are stored; "
                '`model.load_as = "fp8_block128_ue8m0 x fp8_group128_ue8m0"` would round them for good'
            ),
            UNCHANGED,
        ),
        _of(VllmFamily.FP8),
    ),
)

FLASHINFER = (
    Switch("VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER", "1", "FlashInfer's GEMM for FP8 blocks", _always(LINEAR)),
    *(
        Switch(
            f"VLLM_USE_FLASHINFER_MOE_{short}",
            "0",
            f"insists on FlashInfer for {kind.value} experts",
            _flag(Here(backend="flashinfer_trtllm"), ABSENT),
            _of(kind),
            chosen_by="" if kind is VllmFamily.WNA16 else "VLLM_FLASHINFER_MOE_BACKEND",
        )
        for short, kind in (
            ("FP8", VllmFamily.FP8),
            ("FP4", VllmFamily.NVFP4),
            ("FP16", VllmFamily.UNQUANTIZED),
            ("INT4", VllmFamily.WNA16),
        )
    ),
    Switch(
        "VLLM_FLASHINFER_MOE_BACKEND",
        "latency",
        "which of FlashInfer's kernels the switches above mean",
        {
            "throughput": Here(backend="flashinfer_cutlass"),
            "latency": Here(backend="flashinfer_trtllm"),
            "masked_gemm": Here(backend="flashinfer_cutedsl"),
        },
        _of(VllmFamily.UNQUANTIZED, VllmFamily.FP8, VllmFamily.NVFP4),
        chooses=True,
    ),
    Switch(
        "VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8",
        "0",
        "insists on FlashInfer's TRT-LLM kernel of MXFP4 weights with MXFP8 activations",
        _flag(Here(backend="flashinfer_trtllm_afp8"), ABSENT),
        _of(VllmFamily.MXFP4),
    ),
    Switch(
        "VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8_CUTLASS",
        "0",
        "the same by FlashInfer's CUTLASS kernel",
        _flag(Here(backend="flashinfer_cutlass_afp8"), ABSENT),
        _of(VllmFamily.MXFP4),
    ),
    Switch(
        "VLLM_USE_FLASHINFER_MOE_MXFP4_BF16",
        "0",
        "insists on FlashInfer for MXFP4 with BF16 activations (CUTLASS on SM90); 0 takes it off the list",
        _flag(Here(backend="flashinfer_cutlass"), ABSENT),
        _of(VllmFamily.MXFP4),
    ),
)

MARLIN = (
    Switch(
        "VLLM_MXFP4_USE_MARLIN",
        "unset",
        "insists on Marlin for MXFP4",
        _flag(Here(backend="marlin"), ABSENT),
        _of(VllmFamily.MXFP4),
    ),
    Switch(
        "VLLM_TEST_FORCE_FP8_MARLIN",
        "0",
        "insists on Marlin, and so on activations left as they are, for FP8 and NVFP4",
        _flag(Here(backend="marlin"), ABSENT),
        _of(VllmFamily.FP8, VllmFamily.NVFP4),
    ),
    Switch(
        "VLLM_MARLIN_INPUT_DTYPE",
        "unset",
        "what Marlin rounds activations to",
        {
            "int8": Here({"model.load_as": f"{WEIGHTS} x int8_token"}, "a scale for each token"),
            "fp8": Here({"model.load_as": f"{WEIGHTS} x fp8_token"}, "a scale for each token"),
        },
        _of(VllmFamily.WNA16, VllmFamily.MXFP4),
    ),
    Switch(
        "VLLM_MARLIN_USE_ATOMIC_ADD",
        "0",
        "lets Marlin add partial sums atomically",
        _always("no kernel here adds atomically: the order of a sum never changes"),
    ),
    Switch(
        "VLLM_USE_TRITON_AWQ",
        "0",
        "Triton instead of Marlin for AWQ",
        _flag(Here(backend="triton"), ABSENT),
        _of(VllmFamily.WNA16),
    ),
    Switch(
        "VLLM_HUMMING_MOE_GEMM_TYPE",
        "unset",
        "which form of Humming's kernel runs: indexed, grouped, auto",
        _always("not built: the package humming"),
    ),
)

LINEAR_LAYERS = (
    Switch("VLLM_NVFP4_GEMM_BACKEND", "unset", "the kernel of NVFP4 linear layers", _always(LINEAR)),
    Switch(
        "VLLM_USE_NVFP4_CT_EMULATIONS", "0", "emulates compressed-tensors' NVFP4 linears", _always(LINEAR)
    ),
)

ROCM = (
    Switch(
        "VLLM_ROCM_USE_AITER",
        "0",
        "lets AITER be used at all",
        _flag(Here(backend="aiter"), ABSENT),
        beside="VLLM_ROCM_USE_AITER_MOE",
    ),
    Switch(
        "VLLM_ROCM_USE_AITER_MOE",
        "1",
        "lets AITER compute experts, where the switch above is on",
        _flag(Here(backend="aiter"), ABSENT),
        beside="VLLM_ROCM_USE_AITER",
    ),
    Switch(
        "VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS",
        "0",
        "computes shared experts in the call that computes the routed ones",
        _always("shared experts stay with the model server"),
    ),
    Switch(
        "VLLM_ROCM_MOE_PADDING",
        "1",
        "pads expert weights in memory",
        _always("a kernel's own form of the weights is its own matter; sizes it cannot take are in the plan"),
    ),
)

MEMORY = (
    Switch(
        "VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE",
        "163840",
        "how many rows the buffers of an FP4 expert hold",
        _always("an expert never gets more rows than a step has tokens: `step.max_step_tokens` bounds both"),
    ),
    Switch(
        "VLLM_FUSED_MOE_CHUNK_SIZE",
        "16384",
        "how many tokens a rank computes at once",
        {ANY: Here({"step.max_step_tokens": GIVEN}, "how many tokens a step has, over all lanes")},
    ),
    Switch(
        "VLLM_ENABLE_FUSED_MOE_ACTIVATION_CHUNKING",
        "1",
        "turns that bound on",
        _flag(UNCHANGED, Here(why="a step is always bounded; raise `step.max_step_tokens`")),
    ),
    Switch(
        "VLLM_MOE_DP_CHUNK_SIZE",
        "256",
        "how many tokens a data-parallel rank dispatches at once",
        {
            ANY: Here(
                {"step.lane_rows": GIVEN}, "how many rows a lane brings to a step; longer calls are split"
            )
        },
    ),
    Switch(
        "VLLM_ENABLE_MOE_DP_CHUNK",
        "1",
        "turns that bound on",
        _flag(UNCHANGED, Here(why="a lane is always bounded; raise `step.lane_rows`")),
    ),
    Switch(
        "VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD",
        "1",
        "where MXFP8 is emulated, decodes weights once while loading",
        _flag(
            Here({"model.load_as": "bf16"}, "decoded once; activations are then left as they are"),
            Here(
                {"plan.kernel": "torch_reference"}, "decodes an expert's weights in each step that needs it"
            ),
        ),
        _of(VllmFamily.MXFP8),
    ),
)

ROUTING = (
    Switch("VLLM_USE_FUSED_MOE_GROUPED_TOPK", "1", "one kernel for grouped top-k routing", _always(ROUTER)),
    Switch(
        "VLLM_MOE_ROUTING_SIMULATION_STRATEGY",
        "empty",
        "draws experts at random instead of routing",
        _always("the service computes the experts it is asked for; let the client draw, as `moeserve bench`"),
    ),
    Switch(
        "VLLM_MOE_SKIP_PADDING",
        "0",
        "gives padded tokens the expert id -1, so that no expert computes them",
        _always("nothing to do: id -1 means no expert, always"),
    ),
    Switch(
        "VLLM_BATCH_INVARIANT",
        "0",
        "allows only kernels whose answer for a token does not depend on the others",
        _flag(
            Here(why="not built: bits repeat for the same plan and step, and a step's company may differ"),
            UNCHANGED,
        ),
    ),
)

CARRYING = (
    Switch(
        "VLLM_ALL2ALL_BACKEND",
        "allgather_reducescatter",
        "what carries tokens to experts, in releases without `--all2all-backend`",
        {ANY: Here({"plan.all2all_backend": DISPATCHER})},
    ),
    Switch(
        "VLLM_DEEPEPLL_NVFP4_DISPATCH",
        "0",
        "rounds rows to NVFP4 before DeepEP's low-latency kernel carries them",
        _flag(
            Here(
                why="not built: NVFP4's outer scale is one for all rows, and here rows travel alone; "
                '`plan.wire = "mxfp4"` is the four-bit wire, for kernels that take it'
            ),
            ABSENT,
        ),
    ),
)

SWITCHES: dict[str, Switch] = {
    switch.name: switch
    for switch in (
        *DEEP_GEMM,
        *FLASHINFER,
        *MARLIN,
        *LINEAR_LAYERS,
        *ROCM,
        *MEMORY,
        *ROUTING,
        *CARRYING,
    )
}
"""The table of switches by name."""

BACKEND_NAMES = (
    "naive",
    "allgather_reducescatter",
    "pplx",
    "deepep_high_throughput",
    "deepep_low_latency",
    "deepep_v2",
    "mori",
    "mori_high_throughput",
    "mori_low_latency",
    "nixl_ep",
    "flashinfer_all2allv",
    "flashinfer_nvlink_two_sided",
    "flashinfer_nvlink_one_sided",
)
"""Every name that vLLM's `--all2all-backend` takes; `dispatcher_named` knows them all."""
