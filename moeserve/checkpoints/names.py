"""Names of a layer's expert tensors in a checkpoint: `LayerNames`, found by `expert_layers`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from moeserve.checkpoints.store import CheckpointError

BLOCKS = ("block_sparse_moe", "mlp", "feed_forward", "ffn")
SPELLINGS = (("w1", "w3", "w2"), ("gate_proj", "up_proj", "down_proj"))  # gate, up, down
STACKED = ("gate_up_proj", "gate_up_proj", "down_proj")

_BESIDE = r"(?!(?:.*[._])?(?:vision|visual|audio|talker|mtp|nextn)[._])"
"""Not in a model's part beside its text decoder, which may have layers with experts of its own."""

_LAYER = rf"(?P<module>{_BESIDE}(?:\w+\.)*layers\.(?P<layer>\d+)\.(?:{'|'.join(BLOCKS)}))"
_TENSOR = re.compile(
    rf"{_LAYER}\.experts\.(?:(?P<expert>\d+)\.)?(?P<projection>[a-z0-9_]+?)(?P<rest>[._].+)?"
)
_BIAS = re.compile(rf"{_LAYER}\.(?:(?:gate\.)?e_score_correction_bias|(?<=\.ffn\.)gate\.bias)")
_PROJECTIONS = {name: spelling for spelling in SPELLINGS for name in spelling}


@dataclass(frozen=True)
class LayerNames:
    """The names of one layer's expert tensors."""

    module: str  # model.layers.0.mlp
    spelling: tuple[str, str, str]  # gate, up, down
    stacked: bool  # one tensor for all experts
    experts: frozenset[int]  # ids that are named; empty if stacked
    tensors: frozenset[str]  # every tensor under `<module>.experts`

    @property
    def scales_beside(self) -> bool:
        """Whether weights are named by expert, and scales stand in one tensor for all."""
        stems = tuple(f"{self.module}.experts.{name}_" for name in STACKED)
        return not self.stacked and any(name.startswith(stems) for name in self.tensors)

    def stacks(self) -> tuple[str, str]:
        """Returns the names of the gate_up and down tensors that stack all experts."""
        return f"{self.module}.experts.{STACKED[0]}", f"{self.module}.experts.{STACKED[2]}"

    def projections(self, expert: int) -> tuple[str, str, str]:
        """Returns the names of an expert's gate, up and down; gate and up are one tensor if stacked."""
        stem = f"{self.module}.experts" + ("" if self.stacked else f".{expert}")
        gate, up, down = (f"{stem}.{name}" for name in self.spelling)
        return gate, up, down

    def modules(self) -> tuple[str, ...]:
        """Returns the names of all projections, expert by expert, as configs list them."""
        experts = sorted(self.experts) or [0]
        found = dict.fromkeys(name for expert in experts for name in self.projections(expert))
        return tuple(found)


def correction_biases(names: Iterable[str]) -> dict[int, str]:
    """Returns the name of the routing correction bias of each layer that has one, by layer."""
    return {int(found["layer"]): name for name in names if (found := _BIAS.fullmatch(name))}


def expert_layers(names: Iterable[str], depth: int | None = None) -> dict[int, LayerNames]:
    """Returns the layers that have expert tensors, whatever stands before `layers`.

    Layers from `depth` on are left out: they predict further tokens (MTP) and are spelled as they like.
    Raises CheckpointError for a layer with two spellings.
    """
    layers: dict[int, dict[tuple[str, tuple[str, str, str], bool], tuple[set[int], set[str]]]] = {}
    for name in names:
        if ".lora_" in name:
            raise CheckpointError(
                f"tensor {name} belongs to a LoRA adapter, which is not served: merge it first"
            )
        found = _TENSOR.fullmatch(name)
        if found is None or (depth is not None and int(found["layer"]) >= depth):
            continue
        expert, projection = found["expert"], _projection(name, found)
        spelling = STACKED if expert is None else _PROJECTIONS[projection]
        forms = layers.setdefault(int(found["layer"]), {})
        ids, tensors = forms.setdefault((found["module"], spelling, expert is None), (set(), set()))
        tensors.add(name)
        if expert is not None:
            ids.add(int(expert))
    return {layer: _only(layer, forms) for layer, forms in sorted(layers.items())}


def _projection(name: str, found: re.Match[str]) -> str:
    known = STACKED if found["expert"] is None else tuple(_PROJECTIONS)
    whole = found["projection"] + (found["rest"] or "")
    for projection in known:
        if whole == projection or whole.startswith((f"{projection}.", f"{projection}_")):
            return projection
    raise CheckpointError(
        f"tensor {name} is none of an expert's projections {', '.join(dict.fromkeys(known))}"
    )


def _with_scales_beside(
    forms: dict[tuple[str, tuple[str, str, str], bool], tuple[set[int], set[str]]],
) -> LayerNames | None:
    """Experts by number whose scales alone are one tensor for all of them, as transformers writes FP8."""
    apart = [key for key in forms if not key[2]]
    stacks = [key for key in forms if key[2]]
    if len(apart) != 1 or len(stacks) != 1 or apart[0][0] != stacks[0][0]:
        return None
    (ids, tensors), (_, scales) = forms[apart[0]], forms[stacks[0]]
    if any(name.endswith(STACKED) for name in scales):  # weights
        return None
    return LayerNames(*apart[0], frozenset(ids), frozenset(tensors | scales))


def _only(
    layer: int, forms: dict[tuple[str, tuple[str, str, str], bool], tuple[set[int], set[str]]]
) -> LayerNames:
    if len(forms) > 1 and (both := _with_scales_beside(forms)) is not None:
        return both
    if len(forms) > 1:
        examples = " and ".join(min(tensors) for _, tensors in forms.values())
        raise CheckpointError(f"layer {layer} names its experts in more than one way: {examples}")
    (((module, spelling, stacked), (ids, tensors)),) = forms.items()
    return LayerNames(module, spelling, stacked, frozenset(ids), frozenset(tensors))
