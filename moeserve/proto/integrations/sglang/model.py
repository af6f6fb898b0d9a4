"""The seam of the model: what cannot be served is refused, and every MoE layer is behind the service."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_server_args
from torch.nn import Module

from moeserve.proto.integrations import taken
from moeserve.proto.integrations.remote_layers import RemoteLayers, floats_kept, of_one_version
from moeserve.proto.integrations.sglang.experts import LAYERS, RemoteExpertsMethod
from moeserve.proto.integrations.sglang.weights import PASSED_OVER

log = logging.getLogger(__name__)

ONLY: dict[str, tuple[Any, ...]] = {
    "pp_size": (1,),
    "enable_dp_attention": (False,),
    "enable_eplb": (False,),
    "ep_num_redundant_experts": (0,),
    "enable_lora": (None, False),
    "enable_two_batch_overlap": (False,),
    "enable_torch_compile": (False,),
    "speculative_algorithm": (None,),
    "moe_a2a_backend": (None, "none"),
    "load_format": ("auto", "safetensors"),
    "weight_loader_disable_mmap": (False,),
    "weight_loader_prefetch_checkpoints": (False,),
}
"""Arguments of SGLang's server, and the values that can be served."""


def install(layers: RemoteLayers) -> None:
    """Models that loaders make from now on are checked, and see one version of the weights a forward pass."""
    target = "sglang.srt.model_loader.loader.DefaultModelLoader.load_model"
    HookRegistry.register(target, load_model, HookType.AROUND)


def load_model(load: Any, loader: Any, **options: Any) -> Any:
    """Loads a model whose experts are elsewhere. ValueError names what cannot be served, or was not taken
    over.
    """
    refused = refusals(get_server_args())
    if refused:
        raise ValueError("with its experts behind moeserve, SGLang cannot run " + "; nor ".join(refused))
    layers = LAYERS[0]
    layers.begin()
    layers.check_architecture(list(options["model_config"].hf_config.architectures or ()))
    model = load(loader, **options)
    check_taken(model, layers)
    check_rest(model, options["model_config"])
    model.forward = of_one_version(model.forward, layers, is_mixed, inputs_kept)
    log.info(
        "%d MoE layers are behind moeserve at %s; %d tensors of experts were left in their files",
        len(layers.taken),
        layers.settings.address,
        len(PASSED_OVER),
    )
    return model


@contextmanager
def inputs_kept(arguments: Iterable[Any]) -> Iterator[Callable[[], None]]:
    """`floats_kept`, and a batch's images, which the pass takes out of it."""
    given = list(arguments)
    batches = [(one, one.mm_inputs) for one in given if hasattr(one, "mm_inputs")]
    with floats_kept(given) as restore_floats:

        def restore() -> None:
            restore_floats()
            for batch, images in batches:
                batch.mm_inputs = images

        yield restore


def refusals(arguments: Any) -> list[str]:
    """What a server's arguments ask for that cannot be served."""
    found = []
    for name, values in ONLY.items():
        asked = getattr(arguments, name)
        if asked not in values:
            found.append(f"{name}={asked!r}, only {' or '.join(repr(value) for value in values)}")
    if arguments.device != "cpu" and not arguments.disable_cuda_graph:
        found.append(
            f"graphs on {arguments.device}: a captured graph cannot wait for a service; disable_cuda_graph"
        )
    return found


def check_taken(model: Module, layers: RemoteLayers) -> None:
    """ValueError names a module of `model` that computes, or holds, experts of its own."""
    engine = taken.Engine("SGLang", FusedMoE, RemoteExpertsMethod, _named)
    taken.check_taken(engine, model, layers)


def check_rest(model: Module, model_config: Any) -> None:
    """ValueError where SGLang cannot compute the quantized linear layers that stay with it, in its own words.

    It finds out at the first forward pass otherwise. One row of zeros goes through one layer of each kind.
    """
    if model_config.quantization is None or get_server_args().device != "cpu":
        return
    tried: set[type[Any]] = set()
    for module in model.modules():
        if not isinstance(module, LinearBase) or type(module.quant_method) in tried:
            continue
        tried.add(type(module.quant_method))
        width = getattr(module, "input_size_per_partition", module.input_size)
        try:
            with torch.no_grad():
                module.quant_method.apply(module, torch.zeros(1, width, dtype=model_config.dtype), None)
        except Exception as failed:
            raise ValueError(taken.unlike_experts("SGLang", model_config.quantization, failed)) from failed


def _named(model: Module, missing: list[int]) -> str:
    """Decoder layers by their numbers."""
    return f"layers {missing}"


def is_mixed(versions: frozenset[int]) -> bool:
    """Whether this process and the other tensor-parallel ranks saw several versions in one pass."""
    return taken.differ_over(get_tp_group(), versions)
