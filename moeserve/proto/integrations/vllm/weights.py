"""The seam of the files: experts' tensors are passed over by name, before they are read.

vLLM's iterator over safetensors files asks for each name whether this rank needs it. What is passed over
never reaches a model's loader, whichever way that one finds its parameters. Other iterators read whole files,
and are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from vllm.model_executor.model_loader import default_loader, weight_utils

from moeserve.proto.integrations.expert_names import EXPERT

PASSED_OVER: list[str] = []
"""Names of tensors that this process left in their files."""

WHOLE_FILES = (
    "fastsafetensors_weights_iterator",
    "instanttensor_weights_iterator",
    "multi_thread_pt_weights_iterator",
    "multi_thread_safetensors_weights_iterator",
    "np_cache_weights_iterator",
    "pt_weights_iterator",
)


def install() -> None:
    """Experts' tensors are not read from now on."""
    asked: Callable[[str, Any], bool] = weight_utils.should_skip_weight

    def skip(weight_name: str, local_expert_ids: set[int] | None) -> bool:
        if EXPERT.search(weight_name):
            PASSED_OVER.append(weight_name)
            return True
        return asked(weight_name, local_expert_ids)

    weight_utils.should_skip_weight = skip
    for name in WHOLE_FILES:
        setattr(default_loader, name, _refuse(name))


def _refuse(name: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise ValueError(
            f"{name} of vLLM reads whole files, experts' tensors too; behind moeserve a checkpoint must be "
            "safetensors files, loaded with --load-format auto"
        )

    return refuse
