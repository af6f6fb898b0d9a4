"""Checks of an engine's model and of its forward passes that do not depend on the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Module

from moeserve.proto.integrations.expert_names import held_experts
from moeserve.proto.integrations.remote_layers import RemoteLayers


@dataclass(frozen=True)
class Engine:
    """What `check_taken` needs to know of an engine."""

    name: str
    experts: type[Any]  # modules that compute with experts, by their `quant_method`
    remote: type[Any]  # the method of those that ask the service
    named: Callable[[Module, list[int]], str]  # decoder layers of a model, in the words of the engine


def check_taken(engine: Engine, model: Module, layers: RemoteLayers) -> None:
    """ValueError names a module of `model` that computes, or holds, experts of its own."""
    for name, module in model.named_modules():
        if isinstance(module, engine.experts) and not isinstance(module.quant_method, engine.remote):
            method = type(module.quant_method).__name__
            raise ValueError(
                f"{name} ({type(module).__name__}, {method}) would compute with experts of its own"
            )
    if held := held_experts(model):
        raise ValueError(
            f"{held[0]} of {type(model).__name__} is an expert's tensor, which moeserve should hold"
        )
    if missing := layers.missing():
        raise ValueError(
            f"the plug-in did not take over {engine.named(model, missing)} of {type(model).__name__}, and "
            f"moeserve serves these experts; {engine.name} would compute them itself"
        )


def unlike_experts(engine: str, quantization: str, failed: Exception) -> str:
    """What to say where an engine cannot run the rest of a model whose experts are not the reason."""
    return (
        f"its experts are behind moeserve, but {engine} cannot run the rest of this {quantization} "
        f"checkpoint here: {failed} Serve a checkpoint with nothing but its experts quantized, as "
        "`moeserve quantize` writes it"
    )


def differ_over(group: Any, versions: frozenset[int]) -> bool:
    """Whether this process and the others of `group` saw several versions of the weights in one pass.

    group: an engine's own, with `world_size` and, as `cpu_group`, a process group of the CPU. All of its
    ranks ask together.
    """
    if group.world_size == 1:
        return len(versions) > 1
    most = torch.tensor([max(versions, default=0), -min(versions, default=1 << 62)], dtype=torch.int64)
    torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX, group=group.cpu_group)
    return bool(most[0] > 0 and most[0] != -most[1])
