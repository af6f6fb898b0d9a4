"""The seam of the layers: every `FusedMoE` of SGLang asks the service."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.distributed import get_tp_group, tensor_model_parallel_all_reduce
from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from torch import Tensor

from moeserve.proto.integrations.remote_layers import WEIGHTED_BY_SERVICE, RemoteLayers, share_of

LAYER = "sglang.srt.layers.moe.fused_moe_triton.layer.FusedMoE"

LAYERS: list[RemoteLayers] = []
"""The layers of this process, one entry, once the plug-in is installed."""


def install(layers: RemoteLayers) -> None:
    """Layers that are made from now on are behind `layers`."""
    LAYERS[:] = [layers]
    HookRegistry.register(f"{LAYER}.__init__", made_remote, HookType.AROUND)
    HookRegistry.register(f"{LAYER}.forward_impl", forward, HookType.REPLACE)


class RemoteExpertsMethod(FusedMoEMethodBase):  # type: ignore[misc]
    """How a layer whose experts are elsewhere is made: without weights."""

    runner = None

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Makes none."""

    def create_moe_runner(self, layer: Any, moe_runner_config: Any) -> None:
        """Makes none."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """There are none."""

    def apply(self, layer: Any, dispatch_output: Any) -> Any:
        """RuntimeError: the layer's own forward asks the service, and never comes here."""
        raise RuntimeError(f"{layer.layer_name} would compute with experts of its own")


def made_remote(make: Any, layer: Any, *arguments: Any, **options: Any) -> None:
    """Makes a layer without weights, and takes it over. ValueError: what is served does not fit it."""
    make(layer, *arguments, **options | {"quant_method": RemoteExpertsMethod()})
    name = layer.layer_name or f"layer {layer.layer_id}"
    config = layer.moe_runner_config
    refused = {
        "is of a draft model": layer.is_draft,
        "fuses shared experts": layer.num_fused_shared_experts,
        "does not combine its experts' answers": config.no_combine,
        f"scales its answers by {config.routed_scaling_factor}": config.routed_scaling_factor
        not in (None, 1.0),
    }
    for reason, holds in refused.items():
        if holds:
            raise ValueError(f"{name} {reason}, which moeserve's plug-in for SGLang does not")
    sizes = {"experts": layer.num_experts, "hidden": layer.hidden_size, "top_k": layer.top_k}
    info = LAYERS[0].take(layer.layer_id, name, **sizes)
    if config.apply_router_weight_on_input and info.routing != WEIGHTED_BY_SERVICE:
        raise ValueError(f"{name} weights its experts' input, and {info.routing} in the service does not")


def forward(layer: Any, hidden_states: Tensor, topk_output: Any, pre_quant_input: Any = None) -> Tensor:
    """Mixed rows like `hidden_states` [T, H]. Where nobody reduces here, ranks' answers add up."""
    from sglang.srt.layers.moe.topk import TopKOutputChecker

    if not TopKOutputChecker.format_is_standard(topk_output):
        raise ValueError(f"{layer.layer_name} got its choice of experts as {type(topk_output).__name__}")
    group = get_tp_group()
    part = share_of(len(hidden_states), group.rank_in_group, group.world_size)
    rows = (hidden_states, topk_output.topk_ids, topk_output.topk_weights)
    answer = torch.zeros_like(hidden_states)
    answer[part] = LAYERS[0].ask(layer.layer_id, *(tensor[part] for tensor in rows))
    if layer.reduce_results and group.world_size > 1:
        answer = tensor_model_parallel_all_reduce(answer)
    return answer
