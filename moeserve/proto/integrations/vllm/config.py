"""The seam of the configuration: what cannot be served is refused by name, before any process of an engine
starts.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from vllm.platforms import current_platform

from moeserve.proto.integrations.remote_layers import RemoteLayers
from moeserve.proto.integrations.vllm.op import VERIFIED

log = logging.getLogger(__name__)

LOAD_FORMATS = ("auto", "hf", "safetensors", "dummy")


RAY_COPIES = "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"
"""Where vLLM is told which variables its workers under Ray must have too."""


def install(_: RemoteLayers) -> None:
    """Configurations that are made from now on are checked; workers under Ray get the settings too."""
    copied = [prefix for prefix in os.environ.get(RAY_COPIES, "").split(",") if prefix]
    os.environ[RAY_COPIES] = ",".join(dict.fromkeys([*copied, "MOESERVE_"]))
    platform = type(current_platform)
    update = platform.check_and_update_config

    def check_and_update(cls: Any, vllm_config: Any) -> None:
        update(vllm_config)
        check(vllm_config)

    platform.check_and_update_config = classmethod(check_and_update)


def check(config: Any) -> None:
    """ValueError names everything in a VllmConfig that cannot be served; settings that are ours are turned
    off.
    """
    refused = refusals(config)
    if refused:
        raise ValueError("with its experts behind moeserve, vLLM cannot run " + "; nor ".join(refused))
    parallel = config.parallel_config
    if parallel.enable_eplb:
        log.warning("enable_eplb is turned off in vLLM: moeserve balances its experts itself ([balance])")
        parallel.enable_eplb = False
        parallel.eplb_config.num_redundant_experts = 0
    # else vLLM reads whole files ahead from network file systems
    config.load_config.safetensors_load_strategy = "lazy"


def refusals(config: Any) -> list[str]:
    """What a configuration asks for that cannot be served, each with the reason or the way out."""
    parallel, load, model = config.parallel_config, config.load_config, config.model_config
    found = []
    for name in ("pipeline_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name) > 1:
            found.append(f"{name}={getattr(parallel, name)}: one forward pass must see all layers")
    if parallel.use_ubatching:
        found.append(
            f"enable_dbo={parallel.enable_dbo}, ubatch_size={parallel.ubatch_size}: parts of a batch at "
            "once; moeserve overlaps shared experts alone"
        )
    if getattr(parallel, "enable_elastic_ep", False):
        found.append("enable_elastic_ep: moeserve's own ranks come and go without vLLM")
    if config.lora_config is not None:
        found.append("enable_lora: adapters replace MoE layers, and moeserve has none of theirs")
    if (draft := _drafts_experts(config.speculative_config)) is not None:
        found.append(
            f"speculative_config method {draft!r}: a draft model's experts are in no service; ngram is served"
        )
    if load.load_format not in LOAD_FORMATS:
        found.append(
            f"load_format={load.load_format!r}: it reads experts' tensors; use one of {LOAD_FORMATS}"
        )
    if load.safetensors_load_strategy not in (None, "lazy"):
        found.append(
            f"safetensors_load_strategy={load.safetensors_load_strategy!r}: it reads whole files; use 'lazy'"
        )
    if model is not None and (model.is_hybrid or model.has_inner_state):
        found.append(
            f"{model.architecture}: its layers keep a state, so a pass cannot run again after a reload"
        )
    device = str(config.device_config.device_type)
    if device not in VERIFIED and model is not None and not model.enforce_eager:
        found.append(
            f"compiled graphs on {device}: a captured graph cannot wait for a service; use --enforce-eager"
        )
    return found


def _drafts_experts(speculative: Any) -> str | None:
    """The method of a speculative configuration whose draft model has MoE layers."""
    if speculative is None:
        return None
    draft = speculative.draft_model_config
    if speculative.method in ("ngram", "ngram_gpu", "suffix") or draft is None:
        return None
    return str(speculative.method) if draft.is_moe or "mtp" in str(speculative.method) else None
