"""What the plug-in replaces and calls in vLLM: `CONTRACTS`, names with the parameters that it knows them by.

A release of vLLM that renamed one would leave an engine that computes with experts of its own, or fails in
the middle of a forward pass. So each start compares, and stops with the name.
"""

from __future__ import annotations

from moeserve.proto.integrations.contracts import Contract, ContractError, differences

RUN = ("0.32",)
"""Releases that the tests run."""

COMPARED = ("0.33",)
"""Releases whose names and parameters were compared, and which were not run."""

_LAYERS = "vllm.model_executor.layers.fused_moe"
_LOADER = "vllm.model_executor.model_loader"


CONTRACTS = (
    Contract(
        f"{_LAYERS}.routed_experts",
        "RoutedExperts._get_quant_method",
        ("self", "prefix", "quant_config", "moe_config"),
        more=False,
    ),
    Contract(
        f"{_LAYERS}.routed_experts", "RoutedExperts._ensure_moe_quant_config_init", ("self",), more=False
    ),
    Contract(
        f"{_LAYERS}.fused_moe_method_base",
        "FusedMoEMethodBase.apply",
        ("self", "layer", "x", "topk_weights", "topk_ids", "shared_experts", "shared_experts_input"),
        more=False,
    ),
    Contract(
        f"{_LAYERS}.fused_moe_method_base",
        "FusedMoEMethodBase.create_weights",
        ("self", "layer", "num_experts", "hidden_size", "intermediate_size_per_partition", "params_dtype"),
    ),
    Contract(
        f"{_LAYERS}.fused_moe_method_base",
        "FusedMoEMethodBase.maybe_roundup_sizes",
        ("self", "hidden_size", "intermediate_size_per_partition", "act_dtype", "moe_parallel_config"),
        more=False,
    ),
    Contract(
        f"{_LAYERS}.runner.shared_experts",
        "SharedExperts.forward",
        ("self", "shared_experts_input", "order"),
        more=False,
    ),
    Contract(
        f"{_LAYERS}.runner.moe_runner",
        "MoERunner._forward_impl",
        ("self", "hidden_states", "router_logits", "shared_experts_input", "input_ids"),
        more=False,
    ),
    Contract(
        f"{_LOADER}.weight_utils", "should_skip_weight", ("weight_name", "local_expert_ids"), more=False
    ),
    Contract(
        f"{_LOADER}.weight_utils",
        "safetensors_weights_iterator",
        ("hf_weights_files", "use_tqdm_on_load", "safetensors_load_strategy"),
    ),
    Contract(
        f"{_LOADER}.base_loader",
        "BaseModelLoader.create_model",
        ("self", "vllm_config", "model_config", "prefix"),
        more=False,
    ),
    Contract(
        f"{_LOADER}.default_loader",
        "DefaultModelLoader._get_weights_iterator",
        ("self", "source"),
        more=False,
    ),
    Contract("vllm.platforms.interface", "Platform.check_and_update_config", ("vllm_config",), more=False),
    Contract("vllm.forward_context", "get_forward_context", (), more=False),
    Contract("vllm.v1.engine.core", "EngineCore.step", ("self",), more=False),
    Contract("vllm.v1.engine.core", "EngineCore.step_with_batch_queue", ("self",), more=False),
    Contract(
        "vllm.v1.core.sched.scheduler",
        "Scheduler.reset_prefix_cache",
        ("self", "reset_running_requests", "reset_connector"),
        more=False,
    ),
)

PROPERTIES = (
    (f"{_LAYERS}.fused_moe_method_base", "FusedMoEMethodBase", "supports_internal_mk"),
    (f"{_LAYERS}.fused_moe_method_base", "FusedMoEMethodBase", "mk_can_overlap_shared_experts"),
    (f"{_LAYERS}.fused_moe_method_base", "FusedMoEMethodBase", "is_monolithic"),
    (f"{_LAYERS}.fused_moe_method_base", "FusedMoEMethodBase", "topk_indices_dtype"),
    (f"{_LAYERS}.runner.moe_runner", "MoERunner", "do_naive_dispatch_combine"),
)
"""Properties by module and class that the plug-in answers, or relies on."""

ELSEWHERE = frozenset(
    {
        "vllm/lora/layers/base_linear.py",  # of linear layers, and LoRA is refused
        # layers of these models choose themselves: a start with one of them stops with its name
        "vllm/models/deepseek_v4/amd/model.py",
        "vllm/models/muse_spark/amd/muse_moe_runner.py",
        "vllm/models/muse_spark/nvidia/muse_moe_runner.py",
    }
)
"""Files of vLLM that define `_get_quant_method` besides `RoutedExperts`' own, which is replaced."""


def broken() -> list[str]:
    """What is not as it must be in this vLLM, a sentence each."""
    return differences(CONTRACTS, PROPERTIES)


def check() -> None:
    """ContractError where this vLLM is not as the plug-in knows it; says what differs."""
    found = broken()
    if found:
        from vllm.version import __version__

        known = ", ".join(f"{release}.*" for release in (*RUN, *COMPARED))
        raise ContractError(
            f"the moeserve plug-in does not fit vLLM {__version__}; it knows {known}. " + "; ".join(found)
        )
