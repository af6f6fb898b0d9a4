"""The seam of the files: experts' tensors are passed over by name, before they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import safetensors
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from torch import Tensor

from moeserve.proto.integrations.expert_names import EXPERT

_LOADER = "sglang.srt.model_loader.loader"

TENSOR_BY_TENSOR = ("safetensors_weights_iterator", "buffered_multi_thread_safetensors_weights_iterator")
WHOLE_FILES = (
    "fastsafetensors_weights_iterator",
    "instanttensor_weights_iterator",
    "multi_thread_pt_weights_iterator",
    "np_cache_weights_iterator",
    "pt_weights_iterator",
)

PASSED_OVER: list[str] = []
"""Names of tensors that this process left in their files."""


def install() -> None:
    """Experts' tensors are not read from now on."""
    for name in TENSOR_BY_TENSOR:
        HookRegistry.register(f"{_LOADER}.{name}", without_experts, HookType.REPLACE)
    for name in WHOLE_FILES:
        HookRegistry.register(f"{_LOADER}.{name}", _refuse(name), HookType.REPLACE)


def without_experts(hf_weights_files: Sequence[str], *_: Any, **__: Any) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of safetensors files, one after the other, but for experts'."""
    for path in hf_weights_files:
        with safetensors.safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118  # a file cannot be iterated
                if EXPERT.search(name):
                    PASSED_OVER.append(name)
                else:
                    yield name, file.get_tensor(name)


def _refuse(name: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise ValueError(
            f"{name} of SGLang reads whole files, experts' tensors too; behind moeserve a checkpoint must be "
            "safetensors files, loaded with --load-format auto"
        )

    return refuse
