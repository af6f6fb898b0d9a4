"""The seam of the layers: every `RoutedExperts` of vLLM, and of its models' own subclasses, asks the service.

vLLM gives each of these layers a method by which it makes its weights and computes. It is chosen in one
place, which subclasses (gpt-oss', DBRX's, the transformers fallback's) inherit: here it is always ours, and
makes no weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExpertsOrder

from moeserve.proto.integrations.remote_layers import WEIGHTED_BY_SERVICE, NotServed, RemoteLayers, layer_of
from moeserve.proto.integrations.vllm import op


def install(layers: RemoteLayers) -> None:
    """Layers that are made from now on are behind `layers`."""

    def remote(self: Any, prefix: str, quant_config: Any, moe_config: Any) -> RemoteExpertsMethod:
        return RemoteExpertsMethod(layers, self, prefix, moe_config)

    RoutedExperts._get_quant_method = remote


class RemoteExpertsMethod(FusedMoEMethodBase):  # type: ignore[misc]
    """How a layer whose experts are elsewhere computes. NotServed: what is served does not fit the layer."""

    def __init__(self, layers: RemoteLayers, layer: Any, name: str, moe: Any) -> None:
        super().__init__(moe)
        self.number = layer_of(name)
        sizes = {"experts": moe.num_logical_experts, "hidden": moe.hidden_dim}
        info = layers.take(self.number, name, **sizes, top_k=moe.experts_per_token)
        self.weights_input = bool(layer.apply_router_weight_on_input) and info.routing != WEIGHTED_BY_SERVICE
        if self.weights_input and moe.experts_per_token != 1:
            raise NotServed(
                f"{name} weights the input of {moe.experts_per_token} experts; moeserve does for one"
            )
        # ranks of sequence parallelism have rows of their own, and nobody sums up
        alone = moe.is_sequence_parallel
        self.rank = 0 if alone else get_tensor_model_parallel_rank()
        self.ranks = 1 if alone else get_tensor_model_parallel_world_size()

    @property
    def supports_internal_mk(self) -> bool:
        """Data-parallel ranks ask with their own rows: nothing is gathered before."""
        return True

    @property
    def mk_can_overlap_shared_experts(self) -> bool:
        """Shared experts are computed here, while the answer is on its way."""
        return True

    @property
    def is_monolithic(self) -> bool:
        """vLLM's router chooses the experts."""
        return False

    @property
    def topk_indices_dtype(self) -> torch.dtype:
        """As the contract has them."""
        return torch.int32

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

    def maybe_roundup_sizes(
        self,
        hidden_size: int,
        intermediate_size_per_partition: int,
        act_dtype: torch.dtype,
        moe_parallel_config: Any,
    ) -> tuple[int, int]:
        """The sizes as they are."""
        return hidden_size, intermediate_size_per_partition

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """None: nothing is quantized here."""
        return

    def process_weights_after_loading(self, layer: Any) -> None:
        """There are none."""

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Any:
        """Mixed rows, a tensor like `x`; over tensor-parallel ranks they add up to the whole."""
        hidden = x.reshape(-1, x.shape[-1])
        if self.weights_input:
            hidden = hidden * topk_weights.to(hidden.dtype)
            topk_weights = torch.ones_like(topk_weights)
        place = (self.rank, self.ranks)
        if shared_experts is None:
            answer = torch.ops.moeserve.experts(hidden, topk_ids, topk_weights, self.number, *place)
        else:
            ticket = torch.ops.moeserve.start(hidden, topk_ids, topk_weights, self.number, *place)
            shared_experts(shared_experts_input, SharedExpertsOrder.MK_INTERNAL_OVERLAPPED)
            answer = torch.ops.moeserve.finish(ticket, hidden, *place)
        return answer.reshape(x.shape)


# the operators are registered where they are defined
assert op.experts is not None
