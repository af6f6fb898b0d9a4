"""The seam of the model: every MoE layer is behind the service, or the start stops with its name."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch.nn import Module
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from moeserve.proto.errors import MoeError
from moeserve.proto.integrations.expert_names import held_experts
from moeserve.proto.integrations.remote_layers import NotServed, RemoteLayers, layer_of, of_one_version
from moeserve.proto.integrations.vllm.experts import RemoteExpertsMethod

log = logging.getLogger(__name__)


def install(layers: RemoteLayers) -> None:
    """Models that loaders make from now on are checked, and see one version of the weights a forward pass."""
    make = BaseModelLoader.create_model

    def create_model(self: Any, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
        if model_config is not vllm_config.model_config:  # a draft model, which has no MoE layer
            return make(self, vllm_config=vllm_config, model_config=model_config, prefix=prefix)
        layers.begin()
        layers.check_architecture(list(model_config.hf_config.architectures or ()))
        try:
            model = make(self, vllm_config=vllm_config, model_config=model_config, prefix=prefix)
        except (NotServed, MoeError):
            raise
        except Exception as failed:
            if model_config.quantization is None:
                raise
            raise ValueError(unlike_experts(model_config.quantization, failed)) from failed
        check_taken(model, layers)
        model.forward = of_one_version(model.forward, layers, is_mixed)
        log.info("%d MoE layers are behind moeserve at %s", len(layers.taken), layers.settings.address)
        return model

    BaseModelLoader.create_model = create_model


def unlike_experts(quantization: str, failed: Exception) -> str:
    """What to say where vLLM cannot make the rest of a model whose experts are not the reason."""
    return (
        f"its experts are behind moeserve, but vLLM cannot run the rest of this {quantization} checkpoint "
        f"here: {failed} Serve a checkpoint with nothing but its experts quantized, as `moeserve quantize` "
        "writes it"
    )


def check_taken(model: Module, layers: RemoteLayers) -> None:
    """ValueError names a module of `model` that computes, or holds, experts of its own."""
    for name, module in model.named_modules():
        if isinstance(module, RoutedExperts) and not isinstance(module.quant_method, RemoteExpertsMethod):
            method = type(module.quant_method).__name__
            raise ValueError(
                f"{name} ({type(module).__name__}, {method}) would compute with experts of its own"
            )
    if held := held_experts(model):
        raise ValueError(
            f"{held[0]} of {type(model).__name__} is an expert's tensor, which moeserve should hold"
        )
    missing = layers.missing()
    if missing:
        names = ", ".join(_named(model, layer) for layer in missing)
        raise ValueError(
            f"the plug-in did not take over {names} of {type(model).__name__}, and moeserve serves its "
            "experts; vLLM would compute them itself"
        )


def _named(model: Module, layer: int) -> str:
    """The module of a decoder layer that should have asked, or the layer's own name."""
    for name, module in model.named_modules():
        try:
            if layer_of(name) == layer and (
                "moe" in type(module).__name__.lower() or name.endswith(("mlp", "ffn"))
            ):
                return f"{name} ({type(module).__name__})"
        except ValueError:
            continue
    return f"layer {layer}"


def is_mixed(versions: frozenset[int]) -> bool:
    """Whether this process and the other tensor-parallel ranks saw several versions in one pass."""
    group = get_tp_group()
    if group.world_size == 1:
        return len(versions) > 1
    most = torch.tensor([max(versions, default=0), -min(versions, default=1 << 62)], dtype=torch.int64)
    torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX, group=group.cpu_group)
    return bool(most[0] > 0 and most[0] != -most[1])
