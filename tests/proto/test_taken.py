"""A model in which a module computes or holds experts of its own is refused with the module's name."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch import nn

from moeserve.proto.integrations.expert_names import EXPERT
from moeserve.proto.integrations.remote_layers import RemoteLayers
from moeserve.proto.integrations.settings import Settings
from moeserve.proto.integrations.taken import Engine, check_taken, differ_over


class Remote:
    """The method of a layer that asks the service."""


class Own:
    """A method of the engine's."""


class Layer(nn.Module):
    """An engine's module that computes with experts."""

    def __init__(self, method: object) -> None:
        super().__init__()
        self.quant_method = method


def named(model: nn.Module, missing: list[int]) -> str:
    return f"layers {missing}"


ENGINE = Engine("the engine", Layer, Remote, named)


def check(missing: list[int], **modules: nn.Module) -> None:
    model, layers = nn.Module(), RemoteLayers(Settings("a:1"))
    for name, module in modules.items():
        model.add_module(name, module)
    layers.missing = lambda: missing  # type: ignore[method-assign]
    check_taken(ENGINE, model, layers)


@pytest.mark.parametrize(
    ("name", "is_expert"),
    [
        ("model.layers.0.mlp.experts.3.up_proj.weight", True),
        ("model.layers.0.block_sparse_moe.input_linear.weight", True),
        ("model.layers.0.block_sparse_moe.output_linear.weight", True),
        ("model.layers.0.block_sparse_moe.router.layer.weight", False),
        ("model.layers.0.shared_mlp.input_linear.weight", False),
        ("model.layers.0.mlp.shared_experts.up_proj.weight", False),
        ("model.layers.0.mlp.experts.e_score_correction_bias", False),
    ],
)
def test_experts_are_known_by_their_names(name: str, is_expert: bool) -> None:
    assert bool(EXPERT.search(name)) == is_expert


def test_layers_that_ask_the_service_are_fine() -> None:
    check([], mlp=Layer(Remote()), gate=nn.Linear(2, 2))


def test_whoever_computes_with_experts_of_its_own_is_named() -> None:
    with pytest.raises(ValueError, match=r"mlp \(Layer, Own\) would compute with experts of its own"):
        check([], mlp=Layer(Own()))


def test_whoever_holds_an_experts_tensor_is_named() -> None:
    with pytest.raises(ValueError, match=r"experts\.weight of Module is an expert's tensor"):
        check([], experts=nn.Linear(2, 2))


def test_layers_that_were_not_taken_over_are_named() -> None:
    text = r"did not take over layers \[1, 2\] of Module, .*; the engine would compute them itself"
    with pytest.raises(ValueError, match=text):
        check([1, 2])


@pytest.mark.parametrize(("versions", "differ"), [((), False), ((3,), False), ((3, 4), True)])
def test_one_process_alone_compares_what_it_saw(versions: tuple[int, ...], differ: bool) -> None:
    assert differ_over(SimpleNamespace(world_size=1), frozenset(versions)) is differ
