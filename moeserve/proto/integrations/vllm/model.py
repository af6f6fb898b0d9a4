"""The seam of the model: every MoE layer is behind the service, or the start stops with its name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch.nn import Module
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from moeserve.proto.errors import MoeError
from moeserve.proto.integrations import taken
from moeserve.proto.integrations.remote_layers import (
    NotServed,
    RemoteLayers,
    floats_kept,
    layer_of,
    of_one_version,
)
from moeserve.proto.integrations.vllm.experts import RemoteExpertsMethod

log = logging.getLogger(__name__)


def install(layers: RemoteLayers) -> None:
    """Models that loaders make from now on are checked, and see one version of the weights a forward pass."""
    make = BaseModelLoader.create_model

    def create_model(self: Any, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
        if is_draft(vllm_config, model_config):  # it has no MoE layer
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
            raise ValueError(taken.unlike_experts("vLLM", model_config.quantization, failed)) from failed
        check_taken(model, layers)
        model.forward = of_one_version(model.forward, layers, is_mixed, partial(inputs_kept, model))
        log.info("%d MoE layers are behind moeserve at %s", len(layers.taken), layers.settings.address)
        return model

    BaseModelLoader.create_model = create_model


def is_draft(vllm_config: Any, model_config: Any) -> bool:
    """Whether a model is made that guesses tokens for the engine's own."""
    return model_config is not vllm_config.model_config or model_config.runner_type == "draft"


CLEAR = "_clear_deepstack_input_embeds"
"""The method by which models of images and texts forget what an image adds to layers, at a pass's end."""


@contextmanager
def inputs_kept(model: Any, arguments: Iterable[Any]) -> Iterator[Callable[[], None]]:
    """`floats_kept`, and what images add to layers: it is forgotten when the pass counts."""
    clear, asked = getattr(model, CLEAR, None), list[tuple[Any, ...]]()
    if clear is not None:
        setattr(model, CLEAR, lambda *rows: asked.append(rows))
    try:
        with floats_kept(arguments) as restore:
            yield restore
    finally:
        if clear is not None:
            delattr(model, CLEAR)
            for rows in asked[-1:]:
                clear(*rows)


def check_taken(model: Module, layers: RemoteLayers) -> None:
    """ValueError names a module of `model` that computes, or holds, experts of its own."""
    engine = taken.Engine("vLLM", RoutedExperts, RemoteExpertsMethod, _named)
    taken.check_taken(engine, model, layers)


def _named(model: Module, missing: list[int]) -> str:
    """The modules of decoder layers, or their numbers."""
    return ", ".join(_module_of(model, layer) for layer in missing)


def _module_of(model: Module, layer: int) -> str:
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
    return taken.differ_over(get_tp_group(), versions)
