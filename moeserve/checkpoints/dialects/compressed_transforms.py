"""Transforms of compressed-tensors: rotations of activations that a checkpoint needs while it is served.

Transforms at `weight_input` and `weight_output` are part of the stored weights. Those at `input` and `output`
are not: they must be computed while the model is served, which is not supported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from moeserve.checkpoints.dialects.compressed_config import CLASS_NAME, matches
from moeserve.checkpoints.names import LayerNames
from moeserve.checkpoints.store import CheckpointError

WHILE_SERVING = ("input", "output")


def check_transforms(settings: Mapping[str, Any], names: LayerNames) -> None:
    """Raises CheckpointError where the experts of the layer need a transform while they are served."""
    modules = names.modules()
    for group, apply in _applied(settings):
        location = str(apply.get("location"))
        meant = [module for module in modules if _means(apply, module)]
        if location in WHILE_SERVING and meant:
            raise CheckpointError(
                f"transform_config.{group} rotates the {location} of {meant[0]} while it is served, which is "
                "not supported; transforms at weight_input and weight_output are"
            )


def _applied(settings: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    groups = (settings.get("transform_config") or {}).get("config_groups") or {}
    for name, group in groups.items():
        for apply in group.get("apply") or []:
            yield name, apply


def _means(apply: Mapping[str, Any], module: str) -> bool:
    lists = (
        [found] if isinstance(found, str) else found or [] for found in map(apply.get, ("targets", "ignore"))
    )
    targets, ignored = lists
    if any(matches(entry, module) for entry in ignored):
        return False
    return CLASS_NAME in targets or any(matches(entry, module) for entry in targets)
