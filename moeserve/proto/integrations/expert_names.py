"""How experts' tensors are known by their names, in checkpoints and in engines' models."""

from __future__ import annotations

import re

from torch.nn import Module

EXPERT = re.compile(
    r"(?:^|\.)(?:experts\.(?!e_score_correction_bias$)|block_sparse_moe\.(?:in|out)put_linear\.)"
)
"""In names of experts' tensors; `shared_experts.` is another word, and the correction bias is the router's.
GraniteMoE's experts are two tensors of a block.
"""

_SMALL = ("_expert_map", "expert_mask", "e_score_correction_bias", "hash_indices_table")
_OTHERS = ("gate.", "_shared_experts.", "shared_expert", "router.")


def held_experts(model: Module) -> list[str]:
    """Parameters and buffers of a model that are of experts. Maps of experts, the router's, and what an
    engine keeps of shared experts inside of a layer's module are not.
    """
    names = (name for name, _ in (*model.named_parameters(), *model.named_buffers()))
    return [name for name in names if _is_expert(name)]


def _is_expert(name: str) -> bool:
    if not EXPERT.search(name) or name.endswith(_SMALL):
        return False
    return not EXPERT.split(name, maxsplit=1)[-1].startswith(_OTHERS)
