"""The transformers plug-in: a model keeps attention and routers, and asks moeserve for its experts.

model = load("path/to/checkpoint", "127.0.0.1:50051")  # reads everything but the experts' weights
attach(model, "127.0.0.1:50051")  # or: a model that is there already

Works for every model class whose experts use transformers' experts interface, and for those that have a seam
(seams.py). Needs the extra `transformers`.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from types import MethodType
from typing import Any, Protocol, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from moeserve.proto import moe_pb2
from moeserve.proto.client import MoeClient
from moeserve.proto.integrations.seams import seam_of
from moeserve.proto.passes.lane_client import LaneClient

IMPLEMENTATION = "moeserve"
"""The name under which transformers knows these experts (`experts_implementation`)."""

_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|block)\.(\d+)\.")
_BESIDE = re.compile(r"(?:^|[._])(?:vision|visual|audio|talker|code2wav)(?:[._]|$)")
"""Parts of a model beside its text decoder: their experts stay with the model."""

READ_AS = {"kimi_k2": "deepseek_v3"}
"""Model types that transformers has under another name, and without remote code."""


class Service(Protocol):
    """What a model needs of a client: `MoeClient` is one."""

    def forward(self, layer: int, hidden: Tensor, experts: Tensor, weights: Tensor) -> Any:
        """One layer's experts, mixed: [T, H] on the CPU, in the dtype of `hidden`."""

    def model(self) -> moe_pb2.GetModelReply:
        """The description of the model that is served."""


@dataclass(frozen=True, eq=False)
class Remote:
    """The remote weights of an experts module: decoder layer `layer` of `service`."""

    service: Service
    layer: int
    top_k: int = 0  # K of the service; 0: as many as are asked for

    def forward(self, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Mixed rows [T, H] where `hidden` lies; experts [T, K] int64, -1 = none; weights [T, K]."""
        if short := max(0, self.top_k - experts.shape[1]):
            experts, weights = pad(experts, (0, short), value=-1), pad(weights, (0, short))
        if isinstance(self.service, LaneClient):
            weights = weights.float()  # as lanes take them
        answer = self.service.forward(self.layer, hidden, experts, weights)
        # a copy, since models add to it in place and it may lie in the reply's own bytes
        return cast(Tensor, answer).to(hidden.device, copy=True)


_REMOTES: WeakKeyDictionary[Module, Remote] = WeakKeyDictionary()


class _Ask(torch.autograd.Function):
    """A call of the service, as a node that refuses to be differentiated."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, experts: Tensor, weights: Tensor, remote: Remote) -> Tensor:
        return remote.forward(hidden, experts, weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise RuntimeError("experts behind moeserve give no gradients; call the model under torch.no_grad()")


@torch.compiler.disable  # type: ignore[untyped-decorator]  # modules with a seam are compiled up to here
def _ask(remote: Remote, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    return cast(Tensor, _Ask.apply(hidden, experts, weights, remote))  # type: ignore[no-untyped-call]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def experts_forward(
    module: Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The experts implementation: mixed rows [T, H] for hidden_states [T, H] and a choice [T, K] of experts.

    Ids from `num_experts` on are how transformers' expert parallelism says none. RuntimeError: the module was
    never attached. MoeError: the service did not answer.
    """
    remote = _remote_of(module)
    experts = top_k_index.masked_fill(top_k_index >= cast(int, module.num_experts), -1)
    if getattr(module, "has_post_expert_norm", False):  # releases before 5.20 have no such modules
        return _normed(module, remote, (hidden_states, experts, top_k_weights))
    return cast(Tensor, _ask(remote, hidden_states, experts, top_k_weights))


def seam_forward(module: Module, *arguments: Any, **options: Any) -> Any:
    """What a module with a seam does from `attach` on. RuntimeError: it is a copy, which has no service."""
    seam = seam_of(module)
    assert seam is not None
    return seam.forward(module, partial(_ask, _remote_of(module)))(*arguments, **options)


def _remote_of(module: Module) -> Remote:
    remote = _REMOTES.get(module)
    if remote is None:
        name = type(module).__name__
        raise RuntimeError(f"this {name} has no service; call attach(model, service) after making the model")
    return remote


def _normed(module: Module, remote: Remote, asked: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Mixed rows [T, H] of a module that norms each expert's answer: every choice is a row of its own."""
    hidden, experts, weights = asked
    rows = hidden.repeat_interleave(experts.shape[1], dim=0)
    one = torch.ones(len(rows), 1, dtype=weights.dtype, device=weights.device)
    apart = _ask(remote, rows, experts.reshape(-1, 1), one)
    normed = cast(Any, module).post_expert_norm(apart) * weights.reshape(-1, 1)
    normed = normed.masked_fill(experts.reshape(-1, 1) < 0, 0).reshape(*experts.shape, -1)
    return cast(Tensor, normed.sum(dim=1).to(hidden.dtype))


def register() -> None:
    """Makes `experts_implementation="moeserve"` known to transformers; again is harmless."""
    for interface in (ALL_EXPERTS_FUNCTIONS, ALL_FP8_EXPERTS_FUNCTIONS):
        interface.register(IMPLEMENTATION, experts_forward)


def attach(model: Any, service: Service | str) -> Service:
    """Puts the experts of `model` behind `service`, a client or an address, and returns the client.

    model: a transformers model. Weights that the model holds for them are kept but no longer used. Raises
    ValueError for a model that cannot be attached, or is not the one served.
    """
    modules = experts_modules(model)
    client: Service = MoeClient(service) if isinstance(service, str) else service
    try:
        served = client.model()
        _check_served(model, modules, served)
    except BaseException:
        if isinstance(service, str) and isinstance(client, MoeClient):
            client.close()
        raise
    register()
    if any(seam_of(module) is None for _, module in modules.values()):
        model.set_experts_implementation(IMPLEMENTATION)
    top_k = {info.layer: info.top_k for info in served.layers}
    for layer, (name, module) in modules.items():
        remote = Remote(client, layer, top_k[layer])
        seam = seam_of(module)
        if seam is not None:
            # bound to the module, so that a copy of it is no other module's way to the service
            module.forward = MethodType(seam_forward, module)
            _REMOTES[module] = remote
        elif cast(Any, module).config._experts_implementation != IMPLEMENTATION:
            raise ValueError(f"transformers does not let {name} of {type(model).__name__} be replaced")
        else:
            _REMOTES[module] = remote
    return client


def load(
    path: str, service: Service | str, *, cls: Any = AutoModelForCausalLM, **options: Any
) -> PreTrainedModel:
    """A model of `cls` from the checkpoint at `path`, without its experts' weights, attached to `service`.

    The experts' weights take neither memory nor reading. options: as `from_pretrained` takes them, `dtype`
    among them. Raises ValueError as `attach` does.
    """
    kind = PreTrainedConfig.get_config_dict(path)[0].get("model_type")
    if kind in READ_AS and "config" not in options:
        config = CONFIG_MAPPING[READ_AS[kind]].from_pretrained(path)
        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
        options["config"] = config
    with without_expert_weights():
        model = cls.from_pretrained(path, **options)
    held = [
        name for name, _, holder in _holders(model) if any(p is not None for p in holder._parameters.values())
    ]
    if held:
        raise RuntimeError(f"this transformers version loaded the weights of {held[0]} all the same")
    attach(model, service)
    return cast(PreTrainedModel, model)


def experts_modules(model: Module) -> dict[int, tuple[str, Module]]:
    """Name and module of the experts of each layer of the text model that has some, by the layer's number.

    Layers of a decoder that follows an encoder are numbered after the encoder's. ValueError: there are none,
    or they neither use transformers' experts interface nor have a seam.
    """
    found: dict[int, tuple[str, Module]] = {}
    for name, module in model.named_modules():
        # only transformers' decorator `use_experts_implementation` sets this on a module
        if getattr(module, "_is_expert_parallel", None) is None and seam_of(module) is None:
            continue
        if _BESIDE.search(name):
            continue
        layer = _number(model, name)
        if layer is None or layer in found:
            raise ValueError(f"{name} of {type(model).__name__} is not the experts of one decoder layer")
        found[layer] = (name, module)
    if not found:
        kind = getattr(getattr(model, "config", None), "model_type", "")
        why = "none of its modules uses transformers' experts interface"
        raise ValueError(f"{type(model).__name__} ({kind}) cannot be put behind moeserve: {why}")
    return found


def _number(model: Module, name: str) -> int | None:
    """The number of the layer that a module is in."""
    numbers = _LAYER.findall(name)
    if len(numbers) != 1:
        return None
    config = cast(Any, model).config
    after = config.num_hidden_layers if config.is_encoder_decoder and "decoder." in name else 0
    return int(numbers[0]) + after


def _holders(model: Module) -> Iterator[tuple[str, Module, Module]]:
    """Name, experts module and module of everything that holds weights of the model's experts."""
    for name, module in experts_modules(model).values():
        seam = seam_of(module)
        if seam is None:
            yield name, module, module
            continue
        for below in seam.holders:
            for inner, holder in module.get_submodule(below).named_modules():
                yield ".".join(part for part in (name, below, inner) if part), module, holder


def drop_expert_weights(model: Module) -> list[str]:
    """Lets go of all weights of the model's experts; returns the names of the modules that held them."""
    names = []
    for name, _, holder in list(_holders(model)):
        for parameter in list(holder._parameters):
            holder._parameters[parameter] = None
        holder._is_hf_initialized = True  # type: ignore[assignment]  # or transformers would fill what is gone
        names.append(name)
    return names


_LOADING = threading.RLock()


@contextmanager
def without_expert_weights() -> Iterator[None]:
    """Inside, models that this thread makes with `from_pretrained` come without their experts' weights.

    ValueError, from `from_pretrained`, for a model that could not be attached. Other threads are not
    affected; those that enter this context wait.
    """
    thread, plan = threading.get_ident(), PreTrainedModel._get_dtype_plan
    fill = PreTrainedModel._initialize_missing_keys
    dropped: dict[Any, list[_Dropped]] = {}

    def drop_then_plan(model: Any, *args: Any, **options: Any) -> Any:
        if threading.get_ident() == thread:
            dropped[model] = _expert_parameters(model)
            absent = {rf"^{re.escape(name)}\." for name in drop_expert_weights(model)}
            model._keys_to_ignore_on_load_unexpected |= absent
        return plan(model, *args, **options)

    def fill_others(model: Any, *args: Any, **options: Any) -> Any:
        with _with_shapes(dropped.get(model, ())):
            return fill(model, *args, **options)

    with _LOADING:
        # asked once of each model: its modules are final by then, and neither placed nor read yet
        PreTrainedModel._get_dtype_plan = drop_then_plan
        # and this one once what the files have is read
        PreTrainedModel._initialize_missing_keys = fill_others
        try:
            yield
        finally:
            PreTrainedModel._get_dtype_plan = plan
            PreTrainedModel._initialize_missing_keys = fill


_Dropped = tuple[Module, str, Tensor]
"""A module, the name of a parameter that it had, and the parameter without its numbers."""


def _expert_parameters(model: Module) -> list[_Dropped]:
    return [
        (holder, name, parameter.to("meta"))
        for _, _, holder in _holders(model)
        for name, parameter in holder._parameters.items()
        if parameter is not None
    ]


@contextmanager
def _with_shapes(dropped: Iterable[_Dropped]) -> Iterator[None]:
    """Inside, modules have the parameters that were dropped, without numbers.

    Some classes fill experts' weights from the block above, which does not look whether there are any. They
    pass over what is marked as filled.
    """
    dropped = list(dropped)
    for holder, name, shaped in dropped:
        shaped._is_hf_initialized = True  # type: ignore[attr-defined]
        holder._parameters[name] = cast(Any, shaped)
    try:
        yield
    finally:
        for holder, name, _ in dropped:
            holder._parameters[name] = None


def _check_served(model: Any, modules: dict[int, tuple[str, Module]], served: moe_pb2.GetModelReply) -> None:
    """ValueError unless `served` has the experts that `modules` of `model` stand for."""
    declared = model.config.architectures or []
    if declared and served.architecture not in declared:
        raise ValueError(f"the model is {declared[0]}, but {served.model} is served, {served.architecture}")
    layers = {info.layer: info for info in served.layers}
    absent = sorted(set(modules) - set(layers))
    if absent:
        raise ValueError(
            f"layers {absent} of the model have experts, but {served.model} serves only {sorted(layers)}"
        )
    for layer, (name, module) in modules.items():
        ours = _sizes(model, module)
        theirs = (layers[layer].experts, layers[layer].hidden)
        if ours != theirs:
            raise ValueError(f"{name}: E, H = {ours} in the model, {theirs} in what {served.model} serves")


def _sizes(model: Any, module: Module) -> tuple[int, int]:
    """E and H of an experts module."""
    seam = seam_of(module)
    if seam is not None:
        return attrgetter(seam.count)(module), attrgetter(seam.hidden)(module)
    config = model.config.get_text_config()
    wide = (getattr(config, key, None) for key in ("moe_latent_size", "moe_hidden_size"))
    return cast(int, module.num_experts), next((size for size in wide if size), config.hidden_size)
