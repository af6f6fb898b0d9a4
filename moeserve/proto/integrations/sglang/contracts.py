"""What the plug-in replaces and calls in SGLang: `CONTRACTS`, names with the parameters that it knows them
by.
"""

from __future__ import annotations

from moeserve.proto.integrations.contracts import Contract, ContractError, differences

RUN = ("0.5.23",)
"""Releases that the tests run."""

_LAYER = "sglang.srt.layers.moe.fused_moe_triton.layer"
_METHOD = "sglang.srt.layers.quantization.base_config"
_LOADER = "sglang.srt.model_loader.loader"

CONTRACTS = (
    Contract(
        _LAYER,
        "FusedMoE.__init__",
        ("self", "num_experts", "hidden_size", "intermediate_size", "layer_id", "top_k"),
    ),
    Contract(
        _LAYER,
        "FusedMoE.forward_impl",
        ("self", "hidden_states", "topk_output", "pre_quant_input"),
        more=False,
    ),
    Contract(
        _METHOD,
        "FusedMoEMethodBase.create_weights",
        ("self", "layer", "num_experts", "hidden_size", "intermediate_size_per_partition", "params_dtype"),
    ),
    Contract(
        _METHOD, "FusedMoEMethodBase.create_moe_runner", ("self", "layer", "moe_runner_config"), more=False
    ),
    Contract(_LOADER, "DefaultModelLoader.load_model", ("self", "model_config", "device_config"), more=False),
    Contract(_LOADER, "safetensors_weights_iterator", ("hf_weights_files",)),
    Contract(_LOADER, "buffered_multi_thread_safetensors_weights_iterator", ("hf_weights_files",)),
    Contract("sglang.srt.plugins.hook_registry", "HookRegistry.register", ("target", "hook", "hook_type")),
)


def broken() -> list[str]:
    """What is not as it must be in this SGLang, a sentence each."""
    return differences(CONTRACTS)


def check() -> None:
    """ContractError where this SGLang is not as the plug-in knows it; says what differs."""
    found = broken()
    if found:
        from sglang.version import __version__

        raise ContractError(
            f"the moeserve plug-in does not fit SGLang {__version__}; it knows {', '.join(RUN)}. "
            + "; ".join(found)
        )
