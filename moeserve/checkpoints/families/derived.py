"""Reads a family that has no entry from its class in transformers: `derived_family`.

The model is made on torch's meta device, without memory or weights, and its experts are looked at: where they
are, their sizes, how their weights stand, and which of our activations their own gate computes. Nothing is
guessed: what does not come out of the class is named, and the checkpoint refused.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from moeserve.checkpoints.families.config import Config, activation_name
from moeserve.checkpoints.families.family import ModelFamily
from moeserve.checkpoints.store import CheckpointError
from moeserve.experts.activation import ACTIVATIONS, ALIASES, NO_GATED_FORM, NO_MUL, Activation, halves

_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks)\.(\d+)\.")
PROBES, WIDTH, SPREAD = 64, 16, 6.0  # rows and columns that an activation is tried with, and their deviation


def derived_family(config: Config, known: Sequence[str]) -> ModelFamily:
    """Returns the family of a text config from its class. Raises CheckpointError with what is missing."""
    kind = config.get("model_type")
    unknown = f"unknown architecture {config.get('architectures')} (model_type {kind!r})"
    supported = f"supported: {', '.join(sorted(known))}"
    if importlib.util.find_spec("transformers") is None:
        raise CheckpointError(
            f"{unknown}; its class could tell what it needs, but transformers is not installed; {supported}"
        )
    model = _on_meta(config, f"{unknown}; ", f"; {supported}")
    found = dict(_experts_modules(model))
    if not found:
        raise CheckpointError(
            f"{unknown}: no module of {type(model).__name__} uses transformers' experts interface, so its "
            f"class does not tell what its experts compute; {supported}"
        )
    one = next(iter(found.values()))
    alike = {(m.is_transposed, m.is_concatenated, m.has_bias, m.has_gate) for m in found.values()}
    if len(alike) > 1:
        raise CheckpointError(f"{unknown}: its layers have experts of several kinds; {supported}")
    activations = {layer: _activation(module, config, unknown) for layer, module in found.items()}
    layers = frozenset(found)
    return ModelFamily(
        str(kind),
        inner=lambda _: int(one.down_proj.shape[1 if one.is_transposed else 2]),
        layers=lambda _, __: layers,
        activation=lambda _, layer: activations[layer],
        stacked=True,
        transposed=one.is_transposed,
        interleaved=not one.is_concatenated,
        bias=one.has_bias,
        derived=True,
    )


def _on_meta(config: Config, before: str, after: str) -> Any:
    import transformers
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        config_class = CONFIG_MAPPING[str(config["model_type"])]
    except KeyError as error:
        version = f"transformers {transformers.__version__}"
        raise CheckpointError(f"{before}{version} does not have it: a later one may{after}") from error
    mappings = (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING, modeling_auto.MODEL_MAPPING)
    classes = [mapping[config_class] for mapping in mappings if config_class in mapping]
    classes += _of_module(config_class, transformers.PreTrainedModel)
    if not classes:
        raise CheckpointError(f"{before}transformers has no model of {config_class.__name__}{after}")
    try:
        with torch.device("meta"):
            return classes[0](config_class.from_dict(dict(config)))
    except Exception as error:  # whatever a model's own code finds wrong with a config
        raise CheckpointError(
            f"{before}its class {classes[0].__name__} does not take this config: {error}"[:1000] + after
        ) from error


def _of_module(config_class: Any, base: Any) -> list[Any]:
    """Returns the models of a text config that no auto class lists, the last defined first."""
    modeling = importlib.import_module(config_class.__module__.replace("configuration_", "modeling_"))
    own = [
        found
        for name, found in vars(modeling).items()
        if inspect.isclass(found)
        and issubclass(found, base)
        and getattr(found, "config_class", None) is config_class
        and not name.endswith("PreTrainedModel")
    ]
    return own[::-1]


def _experts_modules(model: Module) -> Iterator[tuple[int, Any]]:
    for name, module in model.named_modules():
        numbers = _LAYER.findall(name)
        # only transformers' decorator `use_experts_implementation` sets this on a module
        if numbers and getattr(module, "_is_expert_parallel", None) is not None:
            yield int(numbers[0]), module


def _activation(module: Any, config: Config, unknown: str) -> Activation:
    """Returns the activation of ours that computes what the module's own gate computes."""
    rows = torch.randn(PROBES, 2 * WIDTH, generator=torch.Generator().manual_seed(0)) * SPREAD
    theirs: Tensor = module._apply_gate(rows) if module.has_gate else module.act_fn(rows)
    ours = rows if module.is_concatenated or not module.has_gate else halves(rows)
    for candidate in _candidates(config, module):
        if candidate.gated == module.has_gate and torch.allclose(
            candidate.apply(ours), theirs.float(), 1e-5, 1e-6
        ):
            return candidate
    named = f"{type(module).__name__} (hidden_act {activation_name(config)!r})"
    raise CheckpointError(
        f"{unknown}: what {named} computes between its GEMMs is no activation that is known"
    )


def _candidates(config: Config, module: Any) -> Iterator[Activation]:
    """Returns the activations worth trying: the one that the config names first, with each bound it has."""
    name = ALIASES.get(activation_name(config), activation_name(config))
    limits = [module.__dict__.get(key, config.get(key)) for key in ("swiglu_limit", "limit")]
    limit = next((float(value) for value in limits if value is not None), None)
    alphas = (module.__dict__.get(key, config.get(key)) for key in ("swiglu_alpha", "alpha"))
    alpha = next((float(value) for value in alphas if value is not None), None)
    known = (name, "silu", "gelu_tanh", "gelu", "relu2", "relu")
    for named in (one + ending for one in known for ending in ("", NO_MUL)):
        if named in ACTIVATIONS and named not in NO_GATED_FORM and not ACTIVATIONS[named].needs:
            yield Activation(named)
    if limit is not None:
        yield Activation("silu", limit=limit)
        yield Activation("swiglustep", limit=limit)
        yield Activation("swigluoai", limit=limit, alpha=alpha)
