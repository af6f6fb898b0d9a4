"""Names of a layer's expert tensors in a checkpoint: `LayerNames`, found by `expert_layers`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from moeserve.checkpoints.store import CheckpointError

_BESIDE = (
    r"(?!(?:.*[._])?(?:vision|visual|audio|talker|mtp|nextn)[._])"  # parts of a model beside its text decoder
    r"(?!.*\.(?:\w*attn|\w*attention|\w*vision_moe|shared_\w+)\.)"  # parts of a layer beside its text experts
)
_LAYER = (
    rf"(?P<module>{_BESIDE}(?P<prefix>(?:\w+\.)*?)(?:layers|layer|blocks|block)\.(?P<layer>\d+)(?:\.\w+)*?)"
)
_NUMBERED = re.compile(rf"{_LAYER}\.experts\.(?:expert_)?(?P<expert>\d+)\.(?P<tensor>.+)")
_STACKED = re.compile(rf"{_LAYER}\.experts\.(?P<tensor>(?!\d|expert_\d).+)")
_BARE = re.compile(
    rf"{_LAYER}\.(?P<tensor>(?:input|output)_linear\.weight|(?<=\.moe\.)(?:gate|up|down)_proj\..+)"
)
_BIAS = re.compile(
    rf"{_LAYER}\.(?:\w+\.)*?(?:e_score_correction_bias|expert_bias|router_bias|(?<=\.ffn\.)gate\.bias)"
)
_BIAS_OF_INKLING = re.compile(rf"(?=(?:\w+\.)*llm\.layers\.\d+\.mlp\.gate\.bias$){_LAYER}\.gate\.bias")

_BESIDE_EXPERTS = re.compile(
    r"e_score_correction_bias|post_expert_norm\."
)  # under `experts`, and no projection


@dataclass(frozen=True)
class Spelling:
    """One way to call a layer's expert tensors."""

    projections: tuple[str, str, str]  # gate, up, down; gate and up are one tensor where they are one name
    within: str = "experts"  # of the block; "": in the block itself
    number: str = ".{}"  # before an expert's projections
    stacked: bool = False  # one tensor for all experts
    interleaved: bool = False  # gate and up rows stand as g0, u0, g1, u1, ...
    flat: bool = False  # stacked rows of all experts are one dimension, and down stands as [E * I, H]


SPELLINGS = (("w1", "w3", "w2"), ("gate_proj", "up_proj", "down_proj"))  # gate, up, down
STACKED = ("gate_up_proj", "gate_up_proj", "down_proj")

NUMBERED = (
    Spelling(SPELLINGS[0]),
    Spelling(SPELLINGS[1]),
    Spelling(("wi", "wi", "wo"), number=".expert_{}"),  # Switch Transformers
    Spelling(("fc1", "fc1", "fc2"), number=".expert_{}"),  # NLLB-MoE
)
IN_ONE = (
    Spelling(STACKED, stacked=True),
    Spelling(("up_proj", "up_proj", "down_proj"), stacked=True),  # without a gate
    Spelling(("fc1.weight", "fc1.weight", "fc2.weight"), stacked=True),  # Aria
    Spelling(("w13_weight", "w13_weight", "w2_weight"), stacked=True, interleaved=True),  # Inkling
    Spelling(("mlp.w1", "mlp.v1", "mlp.w2"), stacked=True, flat=True),  # DBRX
)
IN_BLOCK = (
    Spelling(("input_linear.weight", "input_linear.weight", "output_linear.weight"), within="", stacked=True),
    Spelling(("gate_proj.weight", "up_proj.weight", "down_proj.weight"), within="", stacked=True),  # Step 3
)


@dataclass(frozen=True)
class LayerNames:
    """The names of one layer's expert tensors."""

    module: str  # model.layers.0.mlp
    form: Spelling
    experts: frozenset[int]  # ids that are named; empty if stacked
    tensors: frozenset[str]  # every tensor of the layer's experts

    @property
    def spelling(self) -> tuple[str, str, str]:
        """What gate, up and down are called."""
        return self.form.projections

    @property
    def stacked(self) -> bool:
        """Whether one tensor holds all experts."""
        return self.form.stacked

    @property
    def scales_beside(self) -> bool:
        """Whether weights are named by expert, and scales stand in one tensor for all."""
        stems = tuple(f"{self.module}.experts.{name}_" for name in STACKED)
        return not self.stacked and any(name.startswith(stems) for name in self.tensors)

    def stacks(self) -> tuple[str, str]:
        """Returns the names of the gate_up and down tensors that stack all experts."""
        if self.stacked:
            return self.projections(0)[0], self.projections(0)[2]
        return f"{self.module}.experts.{STACKED[0]}", f"{self.module}.experts.{STACKED[2]}"

    def projections(self, expert: int) -> tuple[str, str, str]:
        """Returns the names of an expert's gate, up and down; gate and up may be one tensor."""
        stem = f"{self.module}.{self.form.within}" if self.form.within else self.module
        stem += "" if self.stacked else self.form.number.format(expert)
        gate, up, down = (f"{stem}.{name}" for name in self.spelling)
        return gate, up, down

    def modules(self) -> tuple[str, ...]:
        """Returns the names of all projections, expert by expert, as configs list them."""
        experts = sorted(self.experts) or [0]
        found = dict.fromkeys(name for expert in experts for name in self.projections(expert))
        return tuple(found)

    def ungated(self) -> LayerNames:
        """These names of experts that have no gate: up stands in its place."""
        _, up, down = self.spelling
        return replace(self, form=replace(self.form, projections=(up, up, down)))

    def below(self, count: int) -> LayerNames:
        """These names without those of experts from `count` on."""
        beyond = tuple(self.projections(e)[0].rpartition(".")[0] + "." for e in self.experts if e >= count)
        kept = (
            frozenset(name for name in self.tensors if not name.startswith(beyond))
            if beyond
            else self.tensors
        )
        return replace(self, experts=frozenset(e for e in self.experts if e < count), tensors=kept)


def correction_biases(names: Iterable[str], numbers: Numbers | None = None) -> dict[int, str]:
    """Returns the name of the routing correction bias of each layer that has one, by layer."""
    numbers = numbers or Numbers()
    found = ((name, _BIAS.fullmatch(name) or _BIAS_OF_INKLING.fullmatch(name)) for name in names)
    return {layer: name for name, match in found if match and (layer := numbers.of(match)) is not None}


@dataclass(frozen=True)
class Numbers:
    """How layers are numbered: by the number in a name, below `depth`; of several stacks one after the other.

    Layers from `depth` on are left out: they predict further tokens (MTP) and are spelled as they like.
    """

    depth: int | None = None
    stacks: Mapping[str, int] = field(default_factory=dict)  # a stack's name -> the number of its first layer

    def of(self, found: re.Match[str]) -> int | None:
        """Returns the number of a name's layer; None for a layer that is left out."""
        layer = int(found["layer"])
        if self.stacks:
            stack = found["prefix"].rstrip(".").rpartition(".")[2]
            return self.stacks[stack] + layer if stack in self.stacks else None
        return layer if self.depth is None or layer < self.depth else None


def expert_layers(names: Iterable[str], numbers: Numbers | None = None) -> dict[int, LayerNames]:
    """Returns the layers that have expert tensors, whatever stands before `layers`.

    Raises CheckpointError for a layer with two spellings, and for a tensor that is in none.
    """
    layers: dict[int, dict[str, list[re.Match[str]]]] = {}
    numbers = numbers or Numbers()
    for name in names:
        if ".lora_" in name:
            raise CheckpointError(
                f"tensor {name} belongs to a LoRA adapter, which is not served: merge it first"
            )
        for kind, pattern in (("numbered", _NUMBERED), ("stacked", _STACKED), ("bare", _BARE)):
            if found := pattern.fullmatch(name):
                layer = numbers.of(found)
                if layer is not None and not _BESIDE_EXPERTS.match(found["tensor"]):
                    layers.setdefault(layer, {}).setdefault(f"{found['module']} {kind}", []).append(found)
                break
    return {layer: _only(layer, list(_forms(kinds))) for layer, kinds in sorted(layers.items())}


def _forms(kinds: Mapping[str, list[re.Match[str]]]) -> Iterator[LayerNames]:
    """Returns the names of a layer under each module and spelling that it has."""
    for place, matches in kinds.items():
        module, kind = place.split(" ")
        if kind == "numbered":
            spelled: dict[Spelling, list[re.Match[str]]] = {}
            for found in matches:
                spelled.setdefault(_spelling(found), []).append(found)
            for form, those in spelled.items():
                ids = frozenset(int(found["expert"]) for found in those)
                yield LayerNames(module, form, ids, frozenset(found[0] for found in those))
            continue
        known = IN_ONE if kind == "stacked" else IN_BLOCK
        fits = [form for form in known if all(_is_of(form, found["tensor"]) for found in matches)]
        if not fits:
            stray = next(
                (found for found in matches if not any(_is_of(f, found["tensor"]) for f in known)), matches[0]
            )
            projections = dict.fromkeys(name for form in known[:1] for name in form.projections)
            raise CheckpointError(
                f"tensor {stray[0]} is none of an expert's projections {', '.join(projections)}"
            )
        yield LayerNames(module, fits[0], frozenset(), frozenset(found[0] for found in matches))


def _is_of(form: Spelling, tensor: str) -> bool:
    return any(
        tensor == projection or tensor.startswith((f"{projection}.", f"{projection}_"))
        for projection in form.projections
    )


def _spelling(found: re.Match[str]) -> Spelling:
    for form in NUMBERED:
        if _is_of(form, found["tensor"]):
            return form
    known = dict.fromkeys(name for form in NUMBERED[:2] for name in form.projections)
    raise CheckpointError(f"tensor {found[0]} is none of an expert's projections {', '.join(known)}")


def _only(layer: int, forms: list[LayerNames]) -> LayerNames:
    if len(forms) == 2 and (both := _with_scales_beside(forms)) is not None:
        return both
    if len(forms) > 1:
        examples = " and ".join(min(names.tensors) for names in forms)
        raise CheckpointError(f"layer {layer} names its experts in more than one way: {examples}")
    return forms[0]


def _with_scales_beside(forms: list[LayerNames]) -> LayerNames | None:
    """Experts by number whose scales alone are one tensor for all of them, as transformers writes FP8."""
    apart, stacks = sorted(forms, key=lambda names: names.stacked)
    if apart.stacked or not stacks.stacked or apart.module != stacks.module:
        return None
    if any(name.endswith(STACKED) for name in stacks.tensors):  # weights
        return None
    return replace(apart, tensors=apart.tensors | stacks.tensors)
