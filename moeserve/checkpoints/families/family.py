"""What a model family says of its experts beyond their tensors: `ModelFamily`, read from a model's config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from moeserve.checkpoints.families.config import (
    ALL_INNER_KEYS,
    HIDDEN_KEYS,
    INNER_KEYS,
    Config,
    activation_name,
    depth_of,
    first,
    sparse_layers,
)
from moeserve.experts.activation import NO_MUL, Activation


def plain(config: Config, _: int) -> Activation:
    """The activation that the config names."""
    return Activation(activation_name(config))


def ungated(config: Config, _: int) -> Activation:
    """The activation that the config names, of experts that have no gate."""
    return Activation(activation_name(config) + NO_MUL)


def _inner(config: Config) -> int:
    return first(config, *INNER_KEYS, *ALL_INNER_KEYS, usual="moe_intermediate_size")


def _none(_: Config, __: int) -> bool:
    return False


@dataclass(frozen=True)
class ModelFamily:
    """One model family: what its config and its tensors mean, where the common reading is not all of it.

    `spelling` (gate, up, down) is what transformers calls an expert's projections; reading accepts every
    known one. `layers` returns those layers of a model of a given depth that have experts, or None where
    tensors tell.
    """

    model_type: str
    block: str = "mlp"
    spelling: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    inner: Callable[[Config], int] = _inner
    layers: Callable[[Config, int], frozenset[int] | None] = sparse_layers
    by_token: Callable[[Config, int], bool] = _none  # a layer whose experts a table chooses by token id
    activation: Callable[[Config, int], Activation] = plain  # of a layer
    stacked: bool = False  # transformers has no per-expert names for it
    transposed: bool = False  # stacked tensors are [E, H, 2I] and [E, I, H]
    interleaved: bool = False  # stacked gate and up rows stand as g0, u0, g1, u1, ...
    bias: bool = False
    others_after: bool = False  # experts with ids from E on are of another modality, or compute nothing
    stacks: tuple[str, ...] = ()  # stacks of layers, numbered one after the other
    given: Mapping[str, int] = field(default_factory=dict)  # keys that every config of it stands for
    derived: bool = False  # read from transformers' class, not from the table

    def numbers(self, config: Config) -> Mapping[str, int]:
        """Returns the number of the first layer of each of its `stacks`."""
        depth = depth_of(config) if self.stacks else 0
        return {stack: place * depth for place, stack in enumerate(self.stacks)}

    def hidden(self, config: Config) -> int:
        """H, the size of an expert's rows. Raises CheckpointError."""
        return first(config, *HIDDEN_KEYS, usual="hidden_size")
